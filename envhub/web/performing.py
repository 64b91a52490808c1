"""Execution of actions on a page."""

from collections.abc import Coroutine, Sequence
from typing import Any

from playwright.async_api import Page

from envhub.web.actions import InvalidAction, WebAction, WebActionType

# Limit for a field with key listeners, where each key can take some milliseconds.
MAX_KEYED_CHARS = 300
DRAG_STEPS = 4  # Mouse moves between two points.
MOVE_MS = 20  # Advance of a page's virtual clock for each mouse move.
NO_ELEMENT = (
    'Attempt to perform "{}" on element "[{}]" but no matching element found. '
    "Please check the observation more carefully."
)


async def act(page: Page, action: WebAction) -> None:
    """Perform an action on the page.

    Raises: InvalidAction: it is impossible on this page.
    """
    match action.kind:
        case WebActionType.CLICK | WebActionType.HOVER:
            await _point(page, action.kind, action.element)
        case WebActionType.TYPE:
            await _type(page, action)
        case WebActionType.DRAG:
            await _drag(page, action)
        case WebActionType.MOUSE_CLICK:
            await page.mouse.click(*action.points[0])
        case WebActionType.MOUSE_MOVE:
            await page.mouse.move(*action.points[0])
        case WebActionType.MOUSE_DRAG:
            await _hold(page, action.points)
        case WebActionType.PRESS:
            await page.keyboard.press(action.text)
        case WebActionType.SCROLL:
            await page.evaluate("n => __ls.scroll(n)", 1 if action.text == "down" else -1)
        case WebActionType.GOTO:
            await _goto(page, action.text)
        case WebActionType.GO_BACK:
            await _turn(page, page.go_back())
        case WebActionType.GO_FORWARD:
            await _turn(page, page.go_forward())


async def _aim(page: Page, kind: WebActionType, element: int) -> dict:
    """Scroll an element into view; return its position on the page."""
    is_click = kind is WebActionType.CLICK
    aim = await page.evaluate("([i, how]) => __ls.aim(i, how)", [element, is_click])
    if aim.get("is_gone"):
        raise InvalidAction(NO_ELEMENT.format(kind, element))
    return aim


async def _point(page: Page, kind: WebActionType, element: int) -> None:
    """Click an element or hover over it."""
    aim = await _aim(page, kind, element)
    if aim.get("is_option"):
        if kind is WebActionType.CLICK and not await page.evaluate("i => __ls.pick(i)", element):
            raise InvalidAction(f"Option [{element}] cannot be chosen.")
    elif kind is WebActionType.CLICK:
        await page.mouse.click(aim["x"], aim["y"])
    else:
        await page.mouse.move(aim["x"], aim["y"])


async def _drag(page: Page, action: WebAction) -> None:
    """Drag one element onto another."""
    start = await _aim(page, action.kind, action.element)
    end = await _aim(page, action.kind, action.target)
    if start.get("is_option") or end.get("is_option"):
        raise InvalidAction("Options cannot be dragged.")
    x = start["x"]
    y = start["y"]
    # A drag to the same place must also move the mouse.
    aside = [(x + 1, y + 1)] if start == end else []
    await _hold(page, [(x, y), *aside, (end["x"], end["y"])])


async def _hold(page: Page, points: Sequence[tuple[float, float]]) -> None:
    """Drag the mouse through points."""
    mouse = page.mouse
    await mouse.move(*points[0])
    await page.evaluate("ms => __ls.hold(ms)", MOVE_MS)
    await mouse.down()
    for x, y in points[1:]:
        await mouse.move(x, y, steps=DRAG_STEPS)
    await page.evaluate("ms => __ls.hold(ms)", 0)
    await mouse.up()


async def _type(page: Page, action: WebAction) -> None:
    """Write a text into an element."""
    outcome = await page.evaluate(
        "([i, words]) => __ls.startTyping(i, words)", [action.element, action.text]
    )
    if outcome == "gone":
        raise InvalidAction(NO_ELEMENT.format(action.kind, action.element))
    if outcome == "locked":
        raise InvalidAction(f"Nothing can be typed into [{action.element}].")
    if outcome == "click":
        await _point(page, WebActionType.CLICK, action.element)
    if outcome == "keys":
        if len(action.text) > MAX_KEYED_CHARS:
            text = f"Nothing longer than {MAX_KEYED_CHARS} characters can be typed into"
            raise InvalidAction(f"{text} [{action.element}].")
        await page.keyboard.type(action.text)
    elif outcome != "set":
        await _type_over(page, action.text)
    if action.enter:
        await page.keyboard.press("Enter")


async def _type_over(page: Page, words: str) -> None:
    """Replace the selection; the last character is typed as a key, for pages with key listeners."""
    if not words:
        await page.keyboard.press("Delete")
        return
    if len(words) > 1:
        await page.keyboard.insert_text(words[:-1])
    await page.keyboard.type(words[-1])


async def _goto(page: Page, url: str) -> None:
    """Go to an address. Raises: InvalidAction: the page cannot be loaded."""
    response = await page.goto(url, wait_until="load")
    if response is not None and response.status >= 400:
        raise InvalidAction(f'The page "{url[:200]}" answers with status {response.status}.')


async def _turn(page: Page, turning: Coroutine[Any, Any, object]) -> None:
    """Go back or forward in the history, but never to the empty page before the first."""
    await turning
    if page.url == "about:blank":
        await page.go_forward()
