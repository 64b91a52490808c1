"""Takes pictures of the dashboard's views: `python docs/pictures/take.py URL FOLDER [RUN]`.

URL is the address that `run.py dashboard` prints. The documentation uses `run-light.png` and
`episode-dark.png` of a finished quickstart.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Error, Page, sync_playwright

SIZES = {"light": (1280, 900), "dark": (1280, 900), "phone": (390, 844)}
STILL = "*{transition:none!important;caret-color:transparent!important}"
WAIT_MS = 60_000  # Longest wait for an element of a page.


def main(url: str, folder: Path, run: str) -> None:
    """Write a PNG for each view in light, in dark, and as narrow as a phone.

    Raises: SystemExit: a view did not show its elements in time; names the view.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for look, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(WAIT_MS)
            theme = "dark" if look == "dark" else "light"
            page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
            for name in VIEWS:
                try:
                    _take(page, f"{url}#{BEGINS.get(name, name)}?run={run}", name)
                except Error as error:
                    sys.exit(f"the view {name} of the run {run} ({look}): {error.message}")
                if (shown := page.locator("#run").input_value()) != run:
                    sys.exit(f"RUN={run}: the dashboard has no such run. It shows {shown}.")
                page.screenshot(path=folder / f"{name}-{look}.png")
        browser.close()


def _take(page: Page, address: str, name: str) -> None:
    """Open a view and wait for the elements of its picture."""
    _open(page, address)
    VIEWS[name](page)
    page.add_style_tag(content=STILL)
    page.wait_for_timeout(600)  # Charts are drawn in the next frames.


def _open(page: Page, address: str) -> None:
    """Load a page again. After a change of the hash alone the old view stays for a while."""
    page.goto(address)
    page.reload()
    page.locator("h1").first.wait_for()


def _nothing(page: Page) -> None:
    """Keep the initial state of the view."""


def _best(page: Page) -> None:
    _open(page, f"{page.url}&sort=longest&success=1&policy=model")
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Show pictures of the environment").click()
    page.locator(".env .drawn, .env .notes").first.wait_for()


def _group(page: Page) -> None:
    _open(page, f"{page.url}&kind=train")  # The newest episodes of a finished run are evaluations.
    page.locator("tbody a").first.click()
    page.get_by_role("link", name="compare the episodes of this group").click()
    page.locator(".members").wait_for()


def _play(page: Page) -> None:
    _open(page, f"{page.url}&env=babyai&subset=GoToLocal")
    page.get_by_role("button", name="Start").click()
    page.locator(".choices button").first.click()
    page.locator(".log li.action").first.wait_for()


VIEWS = {
    "run": _nothing,
    "fleet": _nothing,
    "episodes": _nothing,
    "episode": _best,
    "group": _group,
    "compare": _nothing,
    "play": _play,
}

BEGINS = {"episode": "episodes", "group": "episodes"}  # Views that open from a list.

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["quickstart"])[0])
