"""The pages of MiniWoB++, their subsets, and the location of their files."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envhub.env import ItemId, SubsetSpec
from envhub.tables import read_table

_TABLE = read_table(__file__, "pages.yaml")
PAGES: dict[str, Mapping[str, Any]] = _TABLE["pages"]
FIRST_STEPS: list[str] = _TABLE["first_steps"]
# Unsolvable pages, with the reasons.
UNSOLVABLE = {page: facts["unsolvable"] for page, facts in PAGES.items() if "unsolvable" in facts}
NUM_TRAIN = 1000
NUM_TEST = 100
MAX_TURNS = 20
STEP_MS = 1000  # Advance of a page's virtual clock before each snapshot.
REMEDY = "pip install --no-deps miniwob"


def pages_dir() -> Path | None:
    """Return the folder of the pages' files; None if the package `miniwob` is not installed.

    The package is located without an import, which would need a further browser driver.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "html"
    return folder if (folder / "core" / "core.js").is_file() else None


def subset_name(page: str) -> str:
    """Return the subset of one page. The hyphen is the separator of item ids."""
    return page.replace("-", "_")


def pools() -> dict[str, tuple[str, ...]]:
    """Return the pages of every subset: one page each, and two mixed subsets."""
    return {
        "first_steps": tuple(FIRST_STEPS),
        "all": tuple(page for page in PAGES if page not in UNSOLVABLE),
        **{subset_name(page): (page,) for page in PAGES},
    }


def subset_specs(pages_by_subset: dict[str, tuple[str, ...]]) -> dict[str, SubsetSpec]:
    """Return the sizes of the subsets."""
    return {
        name: SubsetSpec(
            num_train=NUM_TRAIN * len(pages),
            num_test=NUM_TEST * len(pages),
            max_turns=max(PAGES[page].get("max_turns", MAX_TURNS) for page in pages),
        )
        for name, pages in pages_by_subset.items()
    }


def page_and_seed(item: ItemId, pages: tuple[str, ...]) -> tuple[str, str]:
    """Return an item's page and the text that seeds its random numbers."""
    page = pages[item.index % len(pages)]
    variation = item.index // len(pages)
    return page, f"{page}/{item.split}/{variation}"
