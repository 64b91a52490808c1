"""Laws of the page that shows runs without a server."""

import contextlib
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Request, expect, sync_playwright

from common.errors import ConfigError
from common.store.run_dir import write_json
from common.wire.messages import Outcome
from learner.journal.journal import journal_files
from learner.views import MIN_SAMPLES, samples
from scheduler.episodes.audit import Cell, SelectionAudit, length_class_of
from tests.tools.dashboard.runs import append, episode, make_run
from tools.cli.command_line import parse
from tools.dashboard.web.views import horizon_marks, pooled_score
from tools.report.command import read_run, report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>window.broken=1</script><!--\u2028"


def write(folder: Path, *words: str) -> tuple[int, str]:
    request = parse(["report", *words, f"run.dir={folder}"])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = report(request)
    return code, output.getvalue().rstrip("\n")


def test_report_prints_dropped_tokens_by_length(tmp_path: Path) -> None:
    audit = SelectionAudit()
    for outcome, num in ((Outcome.TRAINED, 100), (Outcome.STALE, 300)):
        cell = Cell("maze", "hard", 20, 1, length_class_of(num))
        audit.add(cell, outcome, "", num_tokens=num)
    make_run(tmp_path / "a", 3)
    write_json(tmp_path / "a" / "selection.json", audit.report())
    _, text = write(tmp_path, "a")
    rows = [line.split() for line in text.splitlines()]
    assert ["1-128", "1", "0.0%", "100", "0", "0.0%"] in rows
    assert ["257-512", "1", "100.0%", "300", "300", "100.0%"] in rows


def test_samples_cover_each_subset_hardest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 60)
    run = read_run("a", runs=tmp_path)
    found = samples(run.rows)
    assert len(found) >= MIN_SAMPLES
    assert len({each["id"] for each in found}) == len(found)
    shares = {name: [] for name in ("Open", "GoTo")}
    for row in range(run.rows.num):
        each = run.rows.get(row)
        shares[each["subset"]].append(each["success"])
    hardest = min(shares, key=lambda name: sum(shares[name]) / len(shares[name]))
    assert found[0]["subset"] == hardest
    for subset in shares:
        whys = {each["why"]: each["reward"] for each in found if each["subset"] == subset}
        assert (whys["best"], whys["worst"]) == (1.0, 0.0)
        assert "most surprising" in whys


def test_horizon_is_marked_only_at_stage_starts() -> None:
    series = {
        "step": [1.0, 2.0, 3.0, 4.0, 5.0],
        "horizon/value": [4.0, 6.0, 10.0, 8.0, 6.0],
        "horizon/stage": [0.0, 0.0, 1.0, 1.0, 0.0],
    }
    marks = horizon_marks(series)
    assert [(each["step"], each["horizon"]) for each in marks] == [(1, 6), (3, 10), (5, 6)]
    assert len(horizon_marks(series | {"horizon/stage": []})) == 5


def test_seeds_are_pooled_with_their_mean_interval() -> None:
    one, two = ({"num": 10, "success": share, "ci95": (0.0, 1.0)} for share in (0.4, 0.6))
    found = pooled_score([one, two])
    assert (found["num"], found["seeds"], found["success"]) == (20, 2, 0.5)
    assert found["ci95"] == (0.0, 1.0)  # 0.5 +- 12.71 * 0.1, cut
    three = pooled_score([one, two, {"num": 10, "success": 0.5, "ci95": (0.0, 1.0)}])
    assert three["ci95"] == pytest.approx((0.5 - 0.248, 0.5 + 0.248), abs=1e-3)
    assert pooled_score([one])["ci95"] == (0.0, 1.0)


def test_wrong_argument_is_reported_and_writes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    for words in ((), ("b",), ("a", "a"), ("a", "size=1"), ("a", f"to={tmp_path}/no/where.html")):
        with pytest.raises(ConfigError):
            write(tmp_path, *words)
    assert not [*tmp_path.rglob("*.html")]


def test_page_names_damaged_journal_and_shows_rest(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    (path,) = journal_files(run_dir.journal).values()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    code, text = write(tmp_path, "a")
    assert code == 0
    assert "note: " in text
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert '"id":"g0000000/0"' in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_page_sends_no_network_request(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a b&c")
    append(run_dir, replace(episode(401), item_id=f"{HOSTILE}-train-1", actor=HOSTILE))
    audit = SelectionAudit()
    cell = Cell("maze", "hard", 20, 1, length_class_of(200))
    audit.add(cell, Outcome.TRAINED, "", num_tokens=200, num_stale=50)
    write_json(tmp_path / "a b&c" / "selection.json", audit.report())
    make_run(tmp_path / "b", 12)
    assert write(tmp_path, "a b&c")[0] == 0
    text = write(tmp_path, "a b&c", "b")[1]
    both = text.partition("report: ")[2]
    asked: list[str] = []
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []

    def note(request: Request) -> None:
        if not request.url.startswith(("data:", "file:")):
            asked.append(request.url)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("request", note)
        page.on("pageerror", lambda error: asked.append(str(error)))
        page.goto((tmp_path / "a b&c" / "report.html").as_uri())
        expect(page.locator(".verdict")).not_to_be_empty()
        expect(page.locator(".chart canvas").first).to_be_visible()
        expect(page.locator(".chart canvas").nth(6)).to_be_attached()
        expect(page.get_by_text("By subset")).to_be_visible()
        expect(page.get_by_role("cell", name="129-256")).to_be_visible()  # Its tokens are stale.
        page.get_by_role("link", name="Trajectories").click()
        expect(page.locator("tbody tr").nth(MIN_SAMPLES - 1)).to_be_visible()
        page.get_by_role("link", name="g0000100/1").click()
        expect(page.locator(".turn")).to_have_count(4)
        page.get_by_role("button", name="first part").click()
        expect(page.locator(".turn:visible")).to_have_count(1)
        assert page.evaluate("window.broken") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.goto(Path(both).as_uri())
        expect(page.get_by_role("heading", name="Differences in the configuration")).to_be_visible()
        expect(page.locator(".chart canvas").first).to_be_visible()
        browser.close()
    assert asked == []
