"""Laws of the dashboard in a real Chromium: what a person clicks, sees, and is safe from."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page, Request, Route, expect, sync_playwright
from tokenizers import Tokenizer

from actor.api.chat_endpoints import ChatEndpoint, endpoint_path
from common.repository import ROOT
from common.store.run_dir import RunDir
from tests.actor.toy_servers import ToyEndpoint, serve
from tests.tools.dashboard.runs import TOKENIZER, append, episode, make_run

expect.set_options(timeout=30_000)  # milliseconds: Chromium beside other tests
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
]
AXE = find_spec("axe_playwright_python")  # from the extra `dev`; it holds axe.min.js
VIEWS = (
    *("run?run=a", "fleet?run=a", "episodes?run=a", "episodes?run=a&outcome=failed"),
    *("episode?run=a&id=g0000000/0", "group?run=a&id=g0000000", "compare?run=a"),
    *("play?run=a&env=maze", "episodes?run=talk.json", "episode?run=talk.json&id=0"),
)
HOSTILE = '<script>window.broken=1</script><img src=x onerror="window.broken=1">\x1b[2J\u202e\u05e9'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("runs")
    run_dir = make_run(folder / "a")
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(HOSTILE).ids
    hostile = episode(401, text_ids=ids * 2)
    append(run_dir, replace(hostile, episode_id="g0000100/1", actor=HOSTILE[:40]))
    append(run_dir, episode(804, text_ids=[5 + i % 90 for i in range(50_000)]))
    _as_a_fleet(run_dir)
    make_run(folder / "b", 12)
    said = [{"from": "human", "value": HOSTILE}, {"from": "gpt", "value": HOSTILE, "loss": True}]
    talk = folder / "talk.json"
    talk.write_text(
        json.dumps([{"conversations": said, "item_id": "babyai_1", "reward": 0.5}]),
        encoding="utf-8",
    )
    argv = [sys.executable, "run.py", "dashboard", "port=0", f"run.dir={folder}", "a", "b", talk]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    said_next = {"message": {"role": "assistant", "content": "move right"}}
    answer = {"choices": [said_next], "model": f"a, version 12 {HOSTILE}"}
    with serve(ToyEndpoint(script=[answer]).app()) as actor:
        (run_dir.root / "keys").mkdir()
        door = ChatEndpoint(url=f"{actor}/v1", key="k", host=socket.gethostname())
        endpoint_path(run_dir.root, "actor-0").write_text(door.as_text(), encoding="utf-8")
        server = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", env=env)
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            server.communicate(timeout=60)


def _as_a_fleet(run_dir: RunDir) -> None:
    """Write what a scheduler, a launcher and its watch leave behind."""
    actor = {"name": "actor-0", "role": "actor", "version": 12, "running": 3, "num_slots": 8}
    actor |= {"tokens_per_s": 900.0, "rss_bytes": 2 << 30, "last_seen_s": 0.4}
    waits = {**actor, "name": HOSTILE[:30], "waiting_for": "a lease"}
    hub = {"name": "envhub-2", "role": "envhub", "node": "beta (10.0.0.2)", "cpu_s": 77.0}
    hub |= {"url": "http://10.0.0.2:1", "envs": ["maze", HOSTILE], "rss_bytes": 1 << 30}
    hub |= {"num_sessions": 3, "max_sessions": 64, "num_restarts": 2, "last_seen_s": 0.5}
    gone = {**hub, "name": "envhub-3", "gone": "silent"}
    status = {"phase": "train", "version": 12, "actors": [actor, waits], "learner": actor}
    status |= {"hubs": [hub, gone]}
    run_dir.status.write_text(json.dumps(status), encoding="utf-8")
    run_dir.logs.mkdir()
    (run_dir.logs / "launcher.log").write_text(
        "2026-01-01 10:00:00,000 W launcher tools.launch.launcher: role ended role=actor-0"
        " exit=killed by SIGKILL restart=1/20 in_s=0.1 last=MemoryError: <b>no room</b>\n",
        encoding="utf-8",
    )
    run_dir.stalls.mkdir()
    (run_dir.stalls / "1.txt").write_text(f"learner waits for a batch {HOSTILE}", encoding="utf-8")


@pytest.fixture(scope="module")
def shared(url: str) -> Generator[Page]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser.new_page(viewport={"width": 390, "height": 800})
        browser.close()


@pytest.fixture
def page(shared: Page, url: str) -> Generator[Page]:
    """A page that logs no error and sends requests only to its server."""
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


def test_charts_have_data_and_ledger_links_work(page: Page) -> None:
    expect(page.locator(".verdict")).not_to_be_empty()
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator(".chart canvas").nth(6)).to_be_attached()
    page.get_by_role("link", name=re.compile("4 filtered")).click()
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("tbody tr").first).to_contain_text("zero_variance")
    page.get_by_text("Filters", exact=True).wait_for()
    page.locator("select[name=success]").select_option("1")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(4)


def test_badge_of_an_ended_run_is_not_live(page: Page) -> None:
    expect(page.locator("#live")).to_have_text("stopped")


def test_keyboard_replays_episode_and_reaches_group(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#episode?run=a&id=g0000000/0")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn .edge").first).to_have_attribute("data-v", "4")
    page.get_by_role("button", name="first part").click()
    expect(page.locator(".turn:visible")).to_have_count(1)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".turn:visible")).to_have_count(2)
    page.get_by_role("button", name="Version").click()
    expect(page.locator(".turn:visible")).to_have_count(2)
    page.get_by_role("link", name="compare the episodes of this group").click()
    expect(page.locator(".members > .card")).to_have_count(4)


@pytest.mark.parametrize("width", [1280, 390])
def test_hardest_subset_links_best_and_worst_episodes(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.reload()
    subsets = page.locator("section").filter(has=page.get_by_role("heading", name="By subset"))
    hardest = subsets.locator("tbody tr").first
    for sort, verdict in (("best", "solved"), ("worst", "not solved")):
        assert hardest.evaluate("row => row.scrollWidth <= row.closest('.scroll').clientWidth")
        hardest.get_by_role("link", name=sort, exact=True).click()
        expect(page.locator("select[name=sort]")).to_have_value(sort)
        page.locator("tbody a").first.click()
        expect(page.locator("h1 .chip")).to_have_text(verdict)
        if sort == "best":
            page.get_by_role("link", name="Run", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("first in turn 2")
    expect(page.locator(".turn.invalid h3")).to_contain_text("Action 2")
    expect(page.locator(".turn.invalid h3")).to_contain_text("invalid action")
    page.set_viewport_size({"width": 390, "height": 800})


def test_hostile_and_huge_texts_are_shown_harmlessly(page: Page) -> None:
    base = page.url.partition("#")[0]
    page.goto(f"{base}#episode?run=a&id=g0000100/1")
    expect(page.locator(".replay")).to_contain_text("<script>")
    assert page.locator(".replay script, .replay img").count() == 0
    page.goto(f"{base}#episode?run=a&id=g0000201/0")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.get_by_role("button", name=re.compile("more tokens")).first).to_be_visible()


def test_fleet_and_compare_preserve_the_run(page: Page) -> None:
    page.get_by_role("link", name="Fleet").click()
    expect(page.locator("svg.lanes rect").first).to_be_attached()
    page.get_by_role("link", name="Compare").click()
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator("#run")).to_have_value("a")


def test_a_part_of_the_journal_is_no_result(page: Page) -> None:
    def cut(route: Route) -> None:
        """The answer while .04 of the journal of a finished run has been read."""
        answer = route.fetch()
        view = answer.json()
        scores = {"success": 0.085, "ci95": [0.05, 0.13], "num": 200, "by_subset": {}}
        view["evaluations"] = {"before-model": scores}
        gain = {"success": 0.495, "ci95": [0.42, 0.56], "num_pairs": 200}
        view.update(indexed=0.04, report={"gain": gain})
        route.fulfill(response=answer, json=view)

    page.route(re.compile(r"/api/run/a$"), cut)
    page.goto(page.url.partition("#")[0] + "#fleet?run=a")
    page.goto(page.url.partition("#")[0] + "#run?run=a")
    expect(page.get_by_text("those of 4.0% of the journal")).to_be_visible()
    expect(page.get_by_text("+49.5 points on the same 200 items")).to_be_visible()
    expect(page.locator(".hero")).to_have_count(0)


def test_fleet_shows_restart_reasons_and_stall_reports(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#fleet?run=a")
    expect(page.get_by_role("row", name=re.compile("killed by SIGKILL"))).to_contain_text(
        "MemoryError: <b>no room</b>"
    )
    expect(page.get_by_role("row", name=re.compile("waits for a lease"))).to_be_visible()
    page.get_by_text("Stall report 1.txt").click()
    expect(page.get_by_text("learner waits for a batch")).to_be_visible()


def test_fleet_lists_hubs_with_node_and_usage(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#fleet?run=a")
    row = page.get_by_role("row", name=re.compile("envhub-2"))
    expect(row).to_contain_text("at http://10.0.0.2:1")
    use = ["3 of 64", "1.0 GiB", "77 s", "2", "0.5 s ago"]
    expect(row.locator("td").nth(1)).to_be_visible()
    told = row.locator("td").all_text_contents()
    assert (told[1:3], told[5:]) == (["beta (10.0.0.2)", "serves"], use)
    expect(page.get_by_role("row", name=re.compile("envhub-3"))).to_contain_text("silent")
    expect(page.get_by_text("roles on 1 node")).to_be_visible()


def test_keyboard_alone_finds_and_replays_best_episode(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # past the head
    page.goto(page.url.partition("#")[0] + "#episodes?run=a")
    expect(page.locator("#view")).to_be_focused()  # as each new view is
    page.locator("summary").press("Enter")
    page.locator("select[name=sort]").focus()
    for value in ("oldest", "best"):
        page.keyboard.press("ArrowDown")
        expect(page.locator("select[name=sort]")).to_have_value(value)
        expect(page.locator("select[name=sort]")).to_be_focused()
        page.wait_for_url(f"**sort={value}")
    expect(page.locator("tbody tr td.good").first).to_have_text("1")
    link = page.locator("tbody a").first
    for _ in range(40):
        if link.evaluate("each => each === document.activeElement"):
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="first part").press("Enter")
    expect(page.locator(".turn:visible")).to_have_count(1)
    page.keyboard.press("j")
    expect(page.locator(".turn:visible")).to_have_count(2)
    page.go_back()
    expect(page.locator("select[name=sort]")).to_have_value("best")


def test_sort_order_persists_across_views(page: Page) -> None:
    base = page.url.partition("#")[0]
    page.goto(f"{base}#episodes?run=a&env=maze&sort=worst")
    expect(page.locator("tbody tr td.bad").first).to_have_text("0")
    page.locator("select[name=sort]").select_option("surprising")
    expect(page.locator("select[name=env]")).to_have_value("maze")
    page.wait_for_url("**sort=surprising**")
    page.reload()
    expect(page.locator("select[name=sort]")).to_have_value("surprising")
    page.locator("tbody a").first.click()
    page.get_by_role("link", name="Fleet").click()
    page.get_by_role("link", name="Trajectories").click()
    expect(page.locator("select[name=env]")).to_have_value("maze")


def test_manual_play_works_and_closes_its_session(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#play?run=a&env=maze")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("svg.drawn")).to_be_visible()
    before = page.locator("svg.drawn").inner_html()
    page.get_by_role("button", name="move right", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("1 of 50")
    assert page.locator("svg.drawn").inner_html() != before
    page.get_by_role("button", name="Let the policy of a act").click()
    expect(page.locator(".facts")).to_contain_text("2 of 50")
    expect(page.locator(".facts")).to_contain_text("a, version 12 <script>")
    page.get_by_label("Action", exact=True).fill(HOSTILE)
    page.get_by_role("button", name="Act", exact=True).click()
    expect(page.locator(".facts")).to_contain_text("invalid, not executed")
    assert page.locator(".log script, .log img").count() == 0
    with page.expect_request("**/api/play/close"):
        page.get_by_role("link", name="Fleet").click()


def test_mismatched_picture_is_refused_with_a_message(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#episode?run=a&id=g0000000/0")
    page.get_by_role("button", name="Show pictures of the environment").click()
    expect(page.locator(".env .notes")).to_contain_text("This turn has no picture", timeout=30_000)


@pytest.mark.skipif(AXE is None, reason="axe-playwright-python is not installed")
@pytest.mark.parametrize(
    ("theme", "width", "views"),
    [
        pytest.param("light", 1280, VIEWS, marks=pytest.mark.long, id="light-1280"),
        pytest.param("dark", 390, VIEWS, marks=pytest.mark.long, id="dark-390-all"),
        pytest.param("dark", 390, VIEWS[::3], id="dark-390"),
    ],
)
def test_views_have_no_serious_axe_findings(
    page: Page, theme: str, width: int, views: tuple[str, ...]
) -> None:
    assert AXE is not None
    assert AXE.submodule_search_locations is not None
    script = Path(AXE.submodule_search_locations[0]) / "axe.min.js"
    page.evaluate(f"localStorage.setItem('theme', '{theme}')")
    page.set_viewport_size({"width": width, "height": 900})
    page.reload()
    page.evaluate(script.read_text(encoding="utf-8"))
    found: list[str] = []
    for view in views:
        page.goto(f"{page.url.partition('#')[0]}#{view}")
        page.locator("nav a[aria-current]").wait_for()
        page.locator("h1").first.wait_for()
        if view.startswith("play"):
            page.get_by_role("button", name="Start").wait_for()
        for each in page.evaluate("axe.run().then(found => found.violations)"):
            if each["impact"] in ("serious", "critical"):
                where = [node["html"][:150] for node in each["nodes"][:3]]
                found.append(f"{view}: {each['id']} {where}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("localStorage.removeItem('theme')")
    assert found == []


# Draws one chart below the page's own view, which replaces its content at any time, and returns the
# colours of its pixels as counts.
DRAW = """async ([data, bands]) => {
  const { chart } = await import("/static/charts.js");
  const card = chart({ title: "t", series: ["x"] }, data, { bands });
  document.querySelector("#drawn")?.remove();
  const place = document.createElement("div");
  place.id = "drawn";
  place.append(card);
  document.body.append(place);
  while (!place.querySelector("canvas")) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  const canvas = place.querySelector("canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let strong = 0, pale = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const isBlue = pixels[i + 2] > pixels[i] + 60;
    strong += isBlue && pixels[i + 3] > 200;
    pale += isBlue && pixels[i + 3] < 100 && pixels[i + 3] > 20;
  }
  return [strong, pale];
}"""


def test_chart_draws_a_single_point_and_an_interval_as_a_band(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("main section").first).to_be_visible()
    point, no_band = page.evaluate(DRAW, [{"step": [3], "x": [0.5]}, {}])
    assert point > 30
    data = {"step": [0, 1, 2], "x": [0.4, 0.5, 0.6], "low": [0.2] * 3, "high": [0.8] * 3}
    _, band = page.evaluate(DRAW, [data, {"x": ["low", "high"]}])
    assert band > 1000 + 10 * no_band
    legend = page.locator("#drawn .legend li")
    expect(legend).to_have_count(1)
    expect(legend).to_contain_text("0.6 [0.2, 0.8]")


def test_band_of_two_seeds_has_the_quantile_of_students_t(page: Page, url: str) -> None:
    page.goto(url)
    script = """async (quantiles) => {
      const { pooled } = await import("/static/views.js");
      const series = { a: { step: [1], x: [0.2] }, b: { step: [1], x: [0.4] } };
      const pools = [{ names: ["a", "b"], title: "p" }];
      return pooled({ title: "t", series: ["x"] }, series, pools, quantiles)[1];
    }"""
    drawn = page.evaluate(script, [12.5])
    assert drawn["p"] == [pytest.approx(0.3)]
    assert drawn["p high"] == [pytest.approx(0.3 + 12.5 * 0.1)]


def test_continued_run_shows_its_last_evaluation_at_its_version(page: Page, url: str) -> None:
    page.goto(url)
    # The card lies below the page's own view, which replaces its content at any time.
    script = """async (evaluations) => {
      const { evaluationsCard } = await import("/static/results.js");
      const card = evaluationsCard({ evaluations, step: 80 });
      document.body.append(card);
      return card.querySelector(".hero").textContent;
    }"""
    scores = {
        f"{name}-model": {"num": 9, "success": share, "ci95": [0, 1], "version": version}
        for name, share, version in (
            ("before", 0.1, 0),
            ("after", 0.2, 40),
            ("step-60", 0.3, 60),
            ("after-2", 0.4, 80),
        )
    }
    assert page.evaluate(script, scores) == "10% → 40%"
    page.evaluate("""() => {
      const plain = window.uPlot;
      window.drawn = [];  // The page itself draws other charts meanwhile.
      window.uPlot = function (...given) {
        window.drawn.push(JSON.stringify(given[1].slice(0, 2)));
        return new plain(...given);
      };
    }""")
    page.evaluate(script, scores)
    # The page's policy forbids `wait_for_function`, which evaluates a text at its second look.
    await_drawn = """wanted => new Promise(done => {
      const look = () => window.drawn.includes(wanted) ? done(true) : requestAnimationFrame(look);
      look();
    })"""
    assert page.evaluate(await_drawn, "[[0,40,60,80],[0.1,0.2,0.3,0.4]]")
