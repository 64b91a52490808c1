"""Laws of the dashboard in a real Chromium: what a person clicks, sees, and is safe from."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace

import pytest
from playwright.sync_api import Page, Request, expect, sync_playwright
from tokenizers import Tokenizer

from common.repository import ROOT
from tests.common.dashboard.runs import TOKENIZER, append, episode, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
]
HOSTILE = '<script>window.broken=1</script><img src=x onerror="window.broken=1">\x1b[2J\u202e\u05e9'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("runs")
    run_dir = make_run(folder / "a")
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(HOSTILE).ids
    hostile = episode(401, text_ids=ids * 2)
    append(run_dir, replace(hostile, episode_id="g0000100/1", actor=HOSTILE[:40]))
    append(run_dir, episode(804, text_ids=[5 + i % 90 for i in range(50_000)]))
    make_run(folder / "b", 12)
    argv = [sys.executable, "run.py", "dashboard", "port=0", f"run.dir={folder}"]
    server = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.communicate(timeout=20)


@pytest.fixture(scope="module")
def shared(url: str) -> Generator[Page]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser.new_page(viewport={"width": 390, "height": 800})
        browser.close()


@pytest.fixture
def page(shared: Page, url: str) -> Generator[Page]:
    """A page that must not say an error, nor ask anybody but the server."""
    wrong: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            wrong.append(request.url)

    def said(message: object) -> None:
        wrong.append(str(message))

    shared.on("request", asked)
    shared.on("pageerror", said)
    shared.goto(f"{url}#run?run=a")
    shared.reload()
    yield shared
    shared.remove_listener("request", asked)
    shared.remove_listener("pageerror", said)
    assert wrong == []
    assert shared.evaluate("window.broken") is None
    assert shared.evaluate("document.documentElement.scrollWidth") <= 390


def test_charts_have_data_and_a_box_of_the_ledger_opens_its_episodes(page: Page) -> None:
    expect(page.locator(".verdict")).not_to_be_empty()
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert page.locator(".chart canvas").count() > 6
    page.get_by_role("link", name=re.compile("4 filtered")).click()
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("tbody tr").first).to_contain_text("zero_variance")
    page.get_by_text("Filters", exact=True).wait_for()
    page.locator("select[name=success]").select_option("1")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(4)


def test_episode_is_replayed_by_keyboard_and_leads_to_its_group(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#episode?run=a&id=g0000000/0")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn .edge").first).to_have_attribute("data-v", "4")
    page.get_by_role("button", name="from the start").click()
    expect(page.locator(".turn:visible")).to_have_count(1)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".turn:visible")).to_have_count(2)
    page.get_by_role("button", name="Version").click()
    expect(page.locator(".turn:visible")).to_have_count(2)
    page.get_by_role("link", name="its group side by side").click()
    expect(page.locator(".members > .card")).to_have_count(4)


def test_hostile_and_huge_texts_are_shown_harmlessly(page: Page) -> None:
    base = page.url.partition("#")[0]
    page.goto(f"{base}#episode?run=a&id=g0000100/1")
    expect(page.locator(".replay")).to_contain_text("<script>")
    assert page.locator(".replay script, .replay img").count() == 0
    page.goto(f"{base}#episode?run=a&id=g0000201/0")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.get_by_role("button", name=re.compile("more tokens")).first).to_be_visible()


def test_fleet_and_compare_keep_the_run(page: Page) -> None:
    page.get_by_role("link", name="Fleet").click()
    expect(page.locator("svg.lanes rect").first).to_be_attached()
    page.get_by_role("link", name="Compare").click()
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator("#run")).to_have_value("a")
