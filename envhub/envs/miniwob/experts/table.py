"""The experts of the pages, from the table `pages.yaml`.

An expert may read the state of the page's script, since its purpose is to show that an item is
solvable. It acts with the agent's own actions.
"""

from collections.abc import Callable
from importlib import import_module

from envhub.envs.miniwob.pages import PAGES
from envhub.envs.miniwob.view import PageView
from envhub.tables import read_text

Expert = Callable[[PageView], str | None]
INSIDE = read_text(__file__, "inside.js")


def _expert(name: str) -> Expert:
    """Return an expert by its module and function."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"envhub.envs.miniwob.experts.{module}"), function)


BY_PAGE = {page: _expert(facts["expert"]) for page, facts in PAGES.items() if "expert" in facts}


def inside_script(page: str) -> str | None:
    """Return the expression for the script state of a page's expert; None if it needs none."""
    name = PAGES[page].get("inside")
    return name and f"{INSIDE}.{name}()"
