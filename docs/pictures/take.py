"""Takes pictures of the dashboard's views: `python docs/pictures/take.py URL FOLDER [RUN]`.

URL is what `run.py dashboard` printed. Those of the README are `run-light.png` and
`episode-dark.png` of a finished quickstart.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SIZES = {"light": (1280, 900), "dark": (1280, 900), "phone": (390, 844)}
STILL = "*{transition:none!important;caret-color:transparent!important}"


def main(url: str, folder: Path, run: str) -> None:
    """Write a PNG for each view in light, in dark, and as narrow as a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for look, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            theme = "dark" if look == "dark" else "light"
            page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
            for name in VIEWS:
                page.goto(f"{url}#{BEGINS.get(name, name)}?run={run}")
                page.reload()
                page.locator("h1").first.wait_for(timeout=60_000)
                page.add_style_tag(content=STILL)
                VIEWS[name](page)
                page.wait_for_timeout(600)  # charts are drawn in the next frames
                page.screenshot(path=folder / f"{name}-{look}.png")
        browser.close()


def _nothing(page: Page) -> None:
    """Show the view as it opens."""


def _best(page: Page) -> None:
    page.goto(f"{page.url}&sort=longest&success=1")
    page.locator("tbody a").first.click(timeout=60_000)
    page.get_by_role("button", name="Show the environment").click()
    page.locator(".env .drawn, .env .notes").first.wait_for()


def _group(page: Page) -> None:
    page.locator("tbody a").first.click(timeout=60_000)
    page.get_by_role("link", name="its group side by side").click()
    page.locator(".members").wait_for()


def _play(page: Page) -> None:
    page.goto(f"{page.url}&env=babyai&subset=GoToLocal")
    page.get_by_role("button", name="Begin").click(timeout=60_000)
    page.locator(".choices button").first.click(timeout=60_000)
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

BEGINS = {"episode": "episodes", "group": "episodes"}  # views that are reached from a list

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["quickstart"])[0])
