"""Experts of the pages that a look at what chance has in store decides."""

from envhub.envs.miniwob.pages import PAGES
from envhub.envs.miniwob.view import PageView, click
from envhub.web.actions import Kind

FLASH_EVERY_MS = 600


def flashes(page: PageView) -> str | None:
    """Look on until all buttons have flashed, then pushes them in that order."""
    clicks = sum(action.kind is Kind.CLICK for action in page.taken)
    num_looks = len(page.inside) * FLASH_EVERY_MS / PAGES["simon-says"]["step_ms"]
    buttons = page.all("button")
    if len(page.taken) + 1 < num_looks:
        return f"hover [{buttons[0].id}]"
    return click(buttons[page.inside[clicks] - 1])


def three_in_a_row(page: PageView) -> str | None:
    """Make the first of the moves that win."""
    if not page.inside:
        return None
    return click(page.one("clickable", dom_id=f"ttt-{page.inside[0]}"))
