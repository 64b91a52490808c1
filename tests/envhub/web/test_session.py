"""What actions do in a real browser."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from common.config.envs import BrowserOptions
from envhub.env import EnvFailure
from envhub.web.actions import InvalidAction, WebActionType, parse
from envhub.web.browser import check_browser, find_browser, host_rules
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.tree import Snapshot
from tests.envhub.web.web_rig import Rig, find, in_browser, needs_browser, on_session


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stop()


async def act(session: WebSession, text: str) -> Snapshot:
    await session.perform(parse(text, frozenset(WebActionType)))
    return await session.snapshot()


# A page with a box that reports mouse events and a field that reports key events.
PAD = """() => {
  document.body.innerHTML = '<div id="pad" style="position:fixed;left:0;top:0;width:300px;'
    + 'height:200px"></div><input style="position:fixed;top:300px"><p id="told"></p>';
  const told = [];
  const tell = (words) => { told.push(words); document.title = told.join(' '); };
  for (const type of ['mousedown', 'mousemove', 'mouseup']) {
    document.getElementById('pad').addEventListener(type, (event) => {
      tell(`${type.slice(5)}${event.buttons}:${event.clientX},${event.clientY}`);
    });
  }
  document.querySelector('input').addEventListener('keydown', (event) => tell(event.key));
}"""


def test_check_browser_names_a_remedy_for_wrong_paths():
    options = BrowserOptions(executable="/nowhere/chromium")
    assert find_browser(options) == ""
    assert "envs.browser.executable='/nowhere/chromium'" in check_browser(options)[0]


def test_host_rules_reach_nothing_but_the_hosts():
    rules = host_rules({"a.test": "127.0.0.1:7"}, reachable=frozenset({"b.test"}))
    assert rules == "MAP a.test 127.0.0.1:7, MAP * ~NOTFOUND, EXCLUDE b.test"


@on_session
async def test_click_on_link_opens_page(session: WebSession) -> None:
    home = await session.snapshot()
    other = await act(session, f"click [{find(home, 'link', 'Other').id}]")
    assert (other.url, other.title) == ("http://site.test/other", "Other")
    again = await act(session, "go_back")
    assert again.nodes == home.nodes
    still = await act(session, "go_back")
    assert still.url == "http://site.test/"


@on_session
async def test_form_takes_text_choice_and_date(session: WebSession) -> None:
    page = await session.snapshot()
    page = await act(session, f"type [{find(page, 'textbox', 'Name').id}] [wrong] [0]")
    page = await act(session, f"type [{find(page, 'textbox', 'Name').id}] [A [b]] [0]")
    assert find(page, "textbox", "Name").value == "A [b]"
    page = await act(session, f"click [{find(page, 'option', 'blue').id}]")
    assert find(page, "combobox", "Tint").value == "blue"
    page = await act(session, f"type [{find(page, 'Date', 'Day').id}] [2024-02-29] [0]")
    page = await act(session, f"click [{find(page, 'button', 'Go').id}]")
    assert find(page, "StaticText", "You said A [b]-blue-2024-02-29")


@on_session
async def test_new_tab_becomes_current_and_tabs_can_switch(session: WebSession) -> None:
    page = await session.snapshot()
    page = await act(session, f"click [{find(page, 'link', 'New tab').id}]")
    assert await session.tab_titles() == ["Home", "Other"]
    assert page.title == "Other"
    assert (await act(session, "tab_focus [0]")).title == "Home"
    assert (await act(session, "tab_focus [1]")).title == "Other"
    assert (await act(session, "close_tab")).title == "Home"
    with pytest.raises(InvalidAction, match="last tab"):
        await session.perform(parse("close_tab"))


@on_session
async def test_goto_opens_the_configured_sites_only(session: WebSession) -> None:
    page = await session.snapshot()
    for url in ("http://elsewhere.test/", "file:///etc/passwd", "javascript:alert(1)"):
        with pytest.raises(InvalidAction, match="not among the sites"):
            await session.perform(parse(f"goto [{url}]"))
    with pytest.raises(InvalidAction, match="status 404"):
        await session.perform(parse("goto [http://site.test/missing]"))
    page = await act(session, "goto [http://site.test/]")
    page = await act(session, f"click [{find(page, 'link', 'Elsewhere').id}]")
    assert page.url.startswith("chrome-error://")


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("way", ["click", "goto"])
def test_site_that_ends_fails_the_session(way: str) -> None:
    rig = Rig()

    async def leave() -> None:
        session = await rig.session()
        link = find(await session.snapshot(), "link", "Other")
        await rig.site.stop()
        action = f"click [{link.id}]" if way == "click" else "goto [http://site.test/other]"
        with pytest.raises(EnvFailure, match=r"site\.test/other does not respond"):
            await act(session, action)
        with pytest.raises(EnvFailure, match="cannot be opened"):
            async with session.aside("http://site.test/other"):
                pytest.fail("the page of a check is open")
        await session.close()

    try:
        rig.run(leave())
    finally:
        rig.stop()


@in_browser
async def test_error_of_a_server_is_a_page_of_outside_sites_only(rig: Rig) -> None:
    outside = await rig.session()
    with pytest.raises(InvalidAction, match="status 500"):
        await act(outside, "goto [http://site.test/crashed]")
    page = await act(outside, "goto [http://site.test/crashing]")
    assert find(page, "StaticText", "Fine")
    own = await rig.session(is_own_site=True)
    for name in ("crashed", "crashing"):
        with pytest.raises(EnvFailure, match=r"site\.test/crashed answers with status 500"):
            await act(own, f"goto [http://site.test/{name}]")
        await own.open("http://site.test/")
        assert (await own.snapshot()).title == "Home", "the next episode in this tab"
    await own.close()
    with pytest.raises(EnvFailure, match=r"site\.test/broken answers with status 503"):
        await act(outside, "goto [http://site.test/broken]")
    await outside.close()


@on_session
async def test_session_waits_for_fetches_and_accepts_dialogs(session: WebSession) -> None:
    page = await session.snapshot()
    page = await act(session, f"click [{find(page, 'button', 'Ask').id}]")
    assert (page.title, session.dialogs) == ("yes", ["confirm: Sure?"])
    page = await act(session, f"click [{find(page, 'button', 'Load').id}]")
    assert find(page, "button", "loaded")


@on_session
async def test_scroll_reveals_content_and_click_scrolls_by_itself(session: WebSession) -> None:
    page = await session.snapshot()
    assert not find(page, "button", "Deep down").is_in_view
    for _ in range(5):
        page = await act(session, "scroll [down]")
    assert find(page, "button", "Deep down").is_in_view
    assert not find(page, "link", "Other").is_in_view
    page = await act(session, f"click [{find(page, 'link', 'Other').id}]")
    assert page.title == "Other"


@on_session
async def test_mouse_drag_holds_button_between_points(session: WebSession) -> None:
    await session.run(PAD)
    seen = await act(session, "mouse_move [10,20]")
    assert seen.title == "move0:10,20"
    seen = await act(session, "mouse_click [30,40]")
    assert seen.title.split()[1:] == ["move0:30,40", "down1:30,40", "up0:30,40"]
    seen = await act(session, "mouse_drag [100,50] [140,50] [140,90]")
    told = seen.title.split()[4:]
    assert told[:2] == ["move0:100,50", "down1:100,50"]
    assert told[2:-1] == [
        *[f"move1:{x},50" for x in (110, 120, 130, 140)],
        *[f"move1:140,{y}" for y in (60, 70, 80, 90)],
    ]
    assert told[-1] == "up0:140,90"


@on_session
async def test_drag_onto_itself_moves_held_mouse(session: WebSession) -> None:
    await session.run(PAD)
    seen = await session.snapshot()
    await session.run("() => { document.getElementById('pad').tabIndex = 0; }")
    pad = next(node for node in (await session.snapshot()).nodes if node.dom_id == "pad")
    assert pad.dom_id not in [node.dom_id for node in seen.nodes]
    seen = await act(session, f"drag [{pad.id}] [{pad.id}]")
    told = seen.title.split()
    assert told[:2] == ["move0:150,100", "down1:150,100"]
    assert "move1:151,101" in told
    assert told[-2:] == ["move1:150,100", "up0:150,100"]


# A button with another over it, and a drawn frame with nothing in it.
HIDDEN = """left => {
  const style = 'position:fixed;width:40px;height:40px;top:50px;left:';
  document.body.innerHTML = [50, left].map((x, i) => `<button style="${style}${x}px"`
    + ` onclick="document.title = 'clicked ${i}'">B${i}</button>`).join('')
    + '<svg style="position:fixed;left:0;top:100px"><rect x="10" y="10" width="100" height="60"'
    + ' fill="none" stroke="black"/></svg>';
  document.addEventListener('mouseup', (e) => { document.title += ` ${e.clientX},${e.clientY}`; });
}"""


@pytest.mark.parametrize("left", [49, 51])
@on_session
async def test_click_reaches_an_element_with_one_visible_pixel(
    session: WebSession, left: int
) -> None:
    await session.run(HIDDEN, left)
    below = find(await session.snapshot(), "button", "B0")
    assert "clicked 0" in (await act(session, f"click [{below.id}]")).title


@in_browser
async def test_drag_reaches_covered_and_hollow_elements(rig: Rig) -> None:
    context = await rig.browser.open_context()
    session = WebSession(
        context, SnapshotSettings(deep=True), may_go=lambda _: False, action_timeout_s=5.0
    )
    await session.open("http://site.test/")
    await session.run(HIDDEN, 51)
    seen = await session.snapshot()
    frame = next(node for node in seen.nodes if node.role == "rect")
    below = find(seen, "button", "B0")
    assert (await act(session, f"drag [{below.id}] [{frame.id}]")).title.endswith(" 60,140")
    assert (await act(session, f"drag [{frame.id}] [{below.id}]")).title.endswith(" 70,70")
    assert (await act(session, f"click [{frame.id}]")).title.endswith(" 60,140")
    await session.close()


@pytest.mark.long
@on_session
async def test_field_receives_every_key_event(session: WebSession) -> None:
    await session.run(PAD)
    field = find(await session.snapshot(), "textbox", "")
    seen = await act(session, f"type [{field.id}] [a.b] [1]")
    assert seen.title == "a . b Enter"
    assert find(seen, "textbox", "").value == "a.b"


@on_session
async def test_view_includes_coordinates_only_on_request(session: WebSession) -> None:
    await session.run(PAD)
    field = find(await session.snapshot(), "textbox", "")
    assert "at:" not in field.states
    placed = find(await session.snapshot(has_places=True), "textbox", "")
    assert f"at: ({field.x},{field.y}) size: {field.width}x{field.height}" in placed.states


@on_session
async def test_text_is_cut_between_characters(session: WebSession) -> None:
    await session.run("""() => {
      const words = 'a'.repeat(399) + '\\u{1f600}' + 'b';
      document.body.innerHTML = '<button></button><input>';
      document.querySelector('button').textContent = words;
      document.querySelector('input').value = words;
    }""")
    page = await session.snapshot()
    assert find(page, "button", "a" * 399).name == "a" * 399
    assert find(page, "textbox", "").value == "a" * 399


@in_browser
async def test_sessions_share_no_tabs(rig: Rig) -> None:
    first, second = await rig.session(), await rig.session()
    page = await first.snapshot()
    await act(first, f"click [{find(page, 'link', 'Other').id}]")
    assert (await second.snapshot()).title == "Home"
    with pytest.raises(InvalidAction, match="no matching element"):
        await first.perform(parse("click [999]"))
    await first.close()
    await second.close()


def is_browser(process: psutil.Process) -> bool:
    """Return whether a process is a browser's main process and alive."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "--headless" in words and not any(word.startswith("--type=") for word in words)


@in_browser
async def test_killed_browser_fails_its_sessions_and_is_replaced(rig: Rig) -> None:
    session = await rig.session()
    num_starts = rig.browser.num_starts
    killed = [child for child in psutil.Process().children(recursive=True) if is_browser(child)]
    for child in killed:
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvFailure):
        await session.snapshot()
    await session.close()
    fresh = await rig.session()
    assert (await fresh.snapshot()).title == "Home"
    assert rig.browser.num_starts == num_starts + 1
    await fresh.close()
