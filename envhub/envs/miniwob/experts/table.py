"""Which expert solves which page, by the table `pages.yaml`.

An expert may know what the page's script knows, since it is the way that shows an item to be
solvable; it acts by the agent's own actions.
"""

from collections.abc import Callable
from importlib import import_module

from envhub.envs.miniwob.pages import PAGES
from envhub.envs.miniwob.view import PageView
from envhub.tables import read_text

Expert = Callable[[PageView], str | None]
INSIDE = read_text(__file__, "inside.js")


def _expert(name: str) -> Expert:
    module, _, function = name.partition(".")
    return getattr(import_module(f"envhub.envs.miniwob.experts.{module}"), function)


BY_PAGE = {page: _expert(facts["expert"]) for page, facts in PAGES.items() if "expert" in facts}


def inside_script(page: str) -> str | None:
    """Return the expression that tells a page's expert what its script knows; None for none."""
    name = PAGES[page].get("inside")
    return name and f"{INSIDE}.{name}()"
