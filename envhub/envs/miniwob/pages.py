"""The pages of MiniWoB++, the subsets made of them, and where their files lie."""

import importlib.util
from pathlib import Path

from envhub.env import ItemId, SubsetSpec

PAGES = tuple(
    [
        "ascending-numbers",
        "bisect-angle",
        "book-flight",
        "book-flight-nodelay",
        "button-delay",
        "buy-ticket",
        "chase-circle",
        "choose-date",
        "choose-date-easy",
        "choose-date-medium",
        "choose-date-nodelay",
        "choose-list",
        "circle-center",
        "click-button",
        "click-button-sequence",
        "click-checkboxes",
        "click-checkboxes-large",
        "click-checkboxes-soft",
        "click-checkboxes-transfer",
        "click-collapsible",
        "click-collapsible-2",
        "click-collapsible-2-nodelay",
        "click-collapsible-nodelay",
        "click-color",
        "click-dialog",
        "click-dialog-2",
        "click-link",
        "click-menu",
        "click-menu-2",
        "click-option",
        "click-pie",
        "click-pie-nodelay",
        "click-scroll-list",
        "click-shades",
        "click-shape",
        "click-tab",
        "click-tab-2",
        "click-tab-2-easy",
        "click-tab-2-hard",
        "click-tab-2-medium",
        "click-test",
        "click-test-2",
        "click-test-transfer",
        "click-widget",
        "copy-paste",
        "copy-paste-2",
        "count-shape",
        "count-sides",
        "daily-calendar",
        "drag-box",
        "drag-circle",
        "drag-cube",
        "drag-items",
        "drag-items-grid",
        "drag-shapes",
        "drag-shapes-2",
        "drag-single-shape",
        "drag-sort-numbers",
        "draw-circle",
        "draw-line",
        "email-inbox",
        "email-inbox-delete",
        "email-inbox-forward",
        "email-inbox-forward-nl",
        "email-inbox-forward-nl-turk",
        "email-inbox-important",
        "email-inbox-nl-turk",
        "email-inbox-noscroll",
        "email-inbox-reply",
        "email-inbox-star-reply",
        "enter-date",
        "enter-password",
        "enter-text",
        "enter-text-2",
        "enter-text-dynamic",
        "enter-time",
        "find-greatest",
        "find-midpoint",
        "find-word",
        "focus-text",
        "focus-text-2",
        "form-sequence",
        "form-sequence-2",
        "form-sequence-3",
        "generate-number",
        "grid-coordinate",
        "guess-number",
        "highlight-text",
        "highlight-text-2",
        "hot-cold",
        "hover-shape",
        "identify-shape",
        "login-user",
        "login-user-popup",
        "moving-items",
        "multi-layouts",
        "multi-orderings",
        "navigate-tree",
        "number-checkboxes",
        "odd-or-even",
        "order-food",
        "phone-book",
        "read-table",
        "read-table-2",
        "resize-textarea",
        "right-angle",
        "scroll-text",
        "scroll-text-2",
        "search-engine",
        "sign-agreement",
        "simon-says",
        "simple-algebra",
        "simple-arithmetic",
        "social-media",
        "social-media-all",
        "social-media-some",
        "stock-market",
        "terminal",
        "text-editor",
        "text-transform",
        "tic-tac-toe",
        "unicode-test",
        "use-autocomplete",
        "use-autocomplete-nodelay",
        "use-colorwheel",
        "use-colorwheel-2",
        "use-slider",
        "use-slider-2",
        "use-spinner",
        "visual-addition",
    ]
)
# Pages that small models can begin with: one or two actions, everything in plain sight.
FIRST_STEPS = [
    "click-button",
    "click-dialog",
    "click-link",
    "click-test",
    "click-test-2",
    "click-option",
    "enter-text",
    "focus-text",
    "click-tab",
    "choose-list",
]
NUM_TRAIN = 1000
NUM_TEST = 100
MAX_TURNS = 20
MORE_TURNS = {
    "sign-agreement": 40,  # a long text to scroll through
    "stock-market": 40,  # a price to wait for
}
# By how much a page's clock moves with every look: less where much happens within a second.
STEP_MS = 1000
SHORT_STEPS_MS = {"simon-says": 250, "stock-market": 200}
# Pages on which lines tell where they stand: the mouse must go to points between elements.
WITH_PLACES = frozenset(
    [
        "daily-calendar",
        "drag-cube",
        "drag-items",
        "drag-items-grid",
        "drag-sort-numbers",
        "draw-circle",
        "draw-line",
        "highlight-text",
        "highlight-text-2",
        "hot-cold",
        "resize-textarea",
        "text-editor",
    ]
)
# Pages that cannot be solved, and why: they are in no pool and no task, only in their own subset.
UNSOLVABLE = {
    "hover-shape": "never ends with a reward; its score is only computed and thrown away",
}
REMEDY = "pip install --no-deps miniwob"


def pages_dir() -> Path | None:
    """Returns the folder of the pages' files; None when the package `miniwob` is not installed.

    The package is found, not imported: importing it wants a browser driver of its own.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "html"
    return folder if (folder / "core" / "core.js").is_file() else None


def subset_name(page: str) -> str:
    """Returns the subset of one page; item ids keep the hyphen for themselves."""
    return page.replace("-", "_")


def pools() -> dict[str, tuple[str, ...]]:
    """Returns the pages of every subset: one per page, and two that mix pages."""
    return {
        "first_steps": tuple(FIRST_STEPS),
        "all": tuple(page for page in PAGES if page not in UNSOLVABLE),
        **{subset_name(page): (page,) for page in PAGES},
    }


def subset_specs(pages_by_subset: dict[str, tuple[str, ...]]) -> dict[str, SubsetSpec]:
    """Returns the sizes of the subsets."""
    return {
        name: SubsetSpec(
            num_train=NUM_TRAIN * len(pages),
            num_test=NUM_TEST * len(pages),
            max_turns=max(MORE_TURNS.get(page, MAX_TURNS) for page in pages),
        )
        for name, pages in pages_by_subset.items()
    }


def page_and_seed(item: ItemId, pages: tuple[str, ...]) -> tuple[str, str]:
    """Returns an item's page and the text that seeds its chance."""
    page, variation = pages[item.index % len(pages)], item.index // len(pages)
    return page, f"{page}/{item.split}/{variation}"
