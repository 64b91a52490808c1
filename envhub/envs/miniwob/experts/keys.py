"""Experts for pages with sliders, colours, an editor, a terminal, a calendar and games."""

import re
from collections import deque

from envhub.envs.miniwob.experts.click import submit
from envhub.envs.miniwob.experts.form import fields, fill
from envhub.envs.miniwob.pages import PAGES
from envhub.envs.miniwob.view import PageView, click, hold, write
from envhub.web.actions import WebActionType

FLASH_EVERY_MS = 600
KEYS_PER_PAGE = 5  # One page is a fifth of a slider's range.
HUES = ("red", "orange", "yellow", "green", "blue", "purple")


def _keys(low: int, high: int, value: int, wanted: int) -> list[str]:
    """Return the shortest key sequence that moves a slider from a value to the wanted one."""
    page = (high - low) / KEYS_PER_PAGE
    queue: deque[tuple[float, list[str]]] = deque([(value, [])])
    seen = {float(value)}
    while queue:
        at, keys = queue.popleft()
        if at == wanted:
            return keys
        moves = {"ArrowRight": at + 1, "ArrowLeft": at - 1, "PageUp": at + page,
                 "PageDown": at - page, "Home": low, "End": high}  # fmt: skip
        for key, to in moves.items():
            to = min(max(round(to), low), high)
            if to not in seen:
                seen.add(to)
                queue.append((to, [*keys, key]))
    raise ValueError(f"{wanted} is not between {low} and {high}")


def _slide(page: PageView, wanted: list[int]) -> str | None:
    """Move the first slider with a wrong value; None if all are right."""
    handles = page.all("clickable", cls="ui-slider-handle")
    for handle, (low, high, value), number in zip(handles, page.inside, wanted, strict=True):
        if value != number:
            is_focused = "focused: True" in handle.states
            return f"press [{_keys(low, high, value, number)[0]}]" if is_focused else click(handle)
    return None


def slider(page: PageView) -> str | None:
    """Move the slider to the value and submit."""
    return _slide(page, [int(page.goal_part(r"Select (-?\d+)"))]) or submit(page)


def sliders(page: PageView) -> str | None:
    """Move all sliders to their values and submit."""
    return _slide(page, [int(n) for n in re.findall(r"\d+", page.goal)]) or submit(page)


def slider_and_box(page: PageView) -> str | None:
    """Move the slider, check the n-th box, then submit."""
    box = page.all("checkbox")[int(page.goal_part(r"the (\d)\w\w checkbox")) - 1]
    if moving := _slide(page, [int(page.goal_part(r"Select (-?\d+)"))]):
        return moving
    return submit(page) if box.is_checked else click(box)


def named_colour(page: PageView) -> str | None:
    """Write the code of the named colour and submit."""
    return _colour(page, page.inside.lstrip("#").upper())


def rgb_colour(page: PageView) -> str | None:
    """Write the code of the colour that the goal gives as rgb(...), and submit."""
    levels = re.findall(r"\d+", page.goal_part(r"rgb\((.*?)\)"))
    return _colour(page, "".join(f"{int(level):02X}" for level in levels))


def _colour(page: PageView, code: str) -> str | None:
    """Write the code of a colour; submit once it is there."""
    field = fields(page)[0]
    return submit(page) if field.value.upper() == code else write(field, code)


def similar_words(page: PageView) -> str | None:
    """Check the boxes whose words are synonyms of the goal's words."""
    words = set(page.goal_part(r"similar to (.*) and click Submit").split(", "))
    for box in page.all("checkbox"):
        is_meant = any(box.name in group and words & set(group) for group in page.inside)
        if is_meant != box.is_checked:
            return click(box)
    return submit(page)


def menu_item(page: PageView) -> str | None:
    """Open the menu and click the item with the name or icon of the goal."""
    icon = page.goal_part(r"\[(ui-icon-\S+)\]")
    name = next(n for n, i in page.inside.items() if i == icon) if icon else page.quoted()[1]
    items = {item.name: item for item in page.all("menuitem")}
    if name in items:
        return click(items[name])
    if "Playback" in items:
        return f"hover [{items['Playback'].id}]"
    return click(page.one("button", name="Menu"))


def terminal(page: PageView) -> str | None:
    """List the files and remove one with the goal's ending."""
    field = page.one("textbox", dom_id="terminal-target")
    outputs = [t.name for t in page.all("StaticText", cls="output")]
    if not page.taken:
        return write(field, "ls", enter=True)
    files = outputs[-1].split() if outputs else []
    ending = page.goal_part(r"the extension \.(\S+)")
    fit = [f for f in files if (f.endswith(f".{ending}") if ending else "." not in f)]
    return write(field, f"rm {fit[0]}", enter=True) if fit else None


def editor(page: PageView) -> str | None:
    """Select the word or the whole text, apply the style or colour, and submit."""
    num_taken = len(page.taken)
    word = page.goal_part(r"give the text (\S+) the")
    is_selected = num_taken >= (1 if word else 2)
    if not is_selected and word:
        _, left, right, height = next(row for row in page.inside if row[0] == word)
        return hold((left + 0.5, height), (right, height))
    if not is_selected:
        area = page.one("textbox", cls="ql-editor")
        return "press [ctrl+a]" if num_taken else click(area)
    num_styled = num_taken - (1 if word else 2)
    return _style(page, num_styled) or submit(page)


def _style(page: PageView, num_taken: int) -> str | None:
    """Click the control of the style; None once it is applied."""
    style = page.goal_part(r"style (bold|italics|underlined)")
    if style:
        names = {"bold": "ql-bold", "italics": "ql-italic", "underlined": "ql-underline"}
        return None if num_taken else click(page.one("button", cls=names[style]))
    if num_taken == 0:
        return click(page.one("clickable", cls="ql-picker-label"))
    hue = page.goal_part(r"the color (\w+)")
    choices = page.all("clickable", cls="ql-picker-item") or page.all(
        "button", cls="ql-picker-item"
    )
    # A row has seven colours: black or white, then the hues.
    return click(choices[1 + HUES.index(hue)]) if num_taken == 1 else None


def event(page: PageView) -> str | None:
    """Drag over free half hours within the time window, name the event and create it."""
    name = page.quoted()[0]
    if field := page.one("textbox", dom_id="event-name"):
        return (
            click(page.one("button", name="Create")) if field.value == name else write(field, name)
        )
    amount, unit = re.findall(r"([\d.]+) (hour|min)", page.goal)[0]
    count = round(float(amount) * 2) if unit == "hour" else int(amount) // 30
    first, last = (_half_hour(t) for t in re.findall(r"between (\w+) and (\w+)", page.goal)[0])
    start = next(
        at
        for at in range(first, last - count + 1)
        if all(at + i in page.inside for i in range(count))
    )
    cells = {node.dom_id: node for node in page.all("clickable", cls="half-hour")}
    return f"drag [{cells[f'hh-{start}'].id}] [{cells[f'hh-{start + count - 1}'].id}]"


def _half_hour(time: str) -> int:
    """Return the number of half hours since midnight."""
    return (int(time[:-2]) % 12 + 12 * time.endswith("PM")) * 2


def blocks(page: PageView) -> str | None:
    """Write the number of blocks and submit."""
    return fill(page, str(len(page.all("box", cls="addition-block"))))


def sides(page: PageView) -> str | None:
    """Click the button with the number of the figure's sides."""
    canvas = page.one("canvas")
    corners = re.findall(r"-?\d+,-?\d+", canvas.states.partition("points:")[2]) if canvas else []
    return click(page.one("button", name=str(len(corners) - 1)))


def stock(page: PageView) -> str | None:
    """Wait for the price and buy."""
    price = next(float(t.name[1:]) for t in page.texts() if t.name.startswith("$"))
    buy = page.one("button", name="Buy")
    is_low = price <= float(page.goal_part(r"less than \$([\d.]+\d)"))
    return click(buy) if is_low or buy is None else f"hover [{buy.id}]"


def flashes(page: PageView) -> str | None:
    """Wait until all buttons have flashed, then click them in that order."""
    clicks = sum(action.kind is WebActionType.CLICK for action in page.taken)
    num_snapshots = len(page.inside) * FLASH_EVERY_MS / PAGES["simon-says"]["step_ms"]
    buttons = page.all("button")
    if len(page.taken) + 1 < num_snapshots:
        return f"hover [{buttons[0].id}]"
    return click(buttons[page.inside[clicks] - 1])


def three_in_a_row(page: PageView) -> str | None:
    """Play the first of the winning moves."""
    if not page.inside:
        return None
    return click(page.one("clickable", dom_id=f"ttt-{page.inside[0]}"))
