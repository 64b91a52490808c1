"""Experts for pages that are solved by clicks: buttons, links, boxes, menus, drawings."""

import re

from envhub.envs.miniwob.view import PageView, click
from envhub.tables import read_table
from envhub.web.actions import WebActionType

WORDS = read_table(__file__, "words.yaml")


def submit(page: PageView) -> str | None:
    """Click the button that submits the page; None: the page has none."""
    for name in ("Submit", "Search", "Go!", "Order!", "OK", "Login"):
        for role in ("button", "clickable"):
            if buttons := page.all(role, name=name):
                return click(buttons[-1])
    return None


def quoted_button(page: PageView) -> str | None:
    """Click the quoted button."""
    return click(page.one("button", name=page.quoted()[0]))


def button_one(page: PageView) -> str | None:
    """Click the button ONE."""
    return click(page.one("button", name="ONE"))


def only_button(page: PageView) -> str | None:
    """Click the only button."""
    return click(page.one("button"))


def one_then_two(page: PageView) -> str | None:
    """Click ONE, then TWO."""
    return click(page.one("button", name="TWO" if page.taken else "ONE"))


def one_wait_two(page: PageView) -> str | None:
    """Click ONE, wait for the seconds of the goal, and click TWO."""
    seconds = int(page.goal_part(r"wait (\d+) second") or 0)
    one = page.one("button", name="ONE")
    two = page.one("button", name="TWO")
    if not page.taken:
        return click(one)
    # Each snapshot advances the page's clock by one second.
    waits = sum(action.kind is WebActionType.HOVER for action in page.taken)
    if one is not None and waits + 1 < seconds:
        return f"hover [{one.id}]"
    return click(two)


def quoted_link(page: PageView) -> str | None:
    """Click the link quoted in the goal; expand the section that hides it first."""
    word = page.quoted()[0]
    if link := page.one("clickable", name=word, cls="alink"):
        return click(link)
    tabs = [tab for tab in page.all("tab") if "expanded: True" not in tab.states]
    opened = {action.element for action in page.taken}
    return click(next((tab for tab in tabs if tab.id not in opened), tabs[0] if tabs else None))


def accordion_link(page: PageView) -> str | None:
    """Expand one section after another until the quoted link is visible."""
    word = page.quoted()[0]
    if link := page.one("clickable", name=word, cls="alink"):
        return click(link)
    tabs = page.all("tab")
    num_clicks = sum(action.kind is WebActionType.CLICK for action in page.taken)
    return click(tabs[num_clicks % len(tabs)]) if tabs else None


def expand_and_submit(page: PageView) -> str | None:
    """Expand the section, then submit."""
    section = page.one("tab")
    if section is not None and "expanded: False" in section.states:
        return click(section)
    return click(page.one("button", name="Submit"))


def tab_by_name(page: PageView) -> str | None:
    """Click the named tab."""
    return click(page.one("tab", name=page.goal_part(r"Click on (Tab #\d+)")))


def tabs_to_link(page: PageView) -> str | None:
    """Open one tab after another until the quoted link is visible."""
    if link := page.one("clickable", name=page.quoted()[0], cls="alink"):
        return click(link)
    tabs = page.all("tab")
    return click(tabs[(len(page.taken) + 1) % len(tabs)]) if tabs else None


def close_dialog(page: PageView) -> str | None:
    """Close the dialog."""
    return click(page.one("button", name="Close"))


def dialog_button(page: PageView) -> str | None:
    """Click the quoted button of the dialog; x closes it."""
    name = page.quoted()[0]
    return click(page.one("button", name="Close" if name == "x" else name))


def checkboxes(page: PageView) -> str | None:
    """Select the named boxes, then submit."""
    names = page.goal_part(r"Select (.*) and click Submit").split(", ")
    for box in page.all("checkbox"):
        if (box.name in names) != box.is_checked:
            return click(box)
    return submit(page)


def radio(page: PageView) -> str | None:
    """Select the named option, then submit."""
    option = page.one("radio", name=page.goal_part(r"Select (.*) and click Submit"))
    if option is not None and not option.is_checked:
        return click(option)
    return submit(page)


def listed_options(page: PageView) -> str | None:
    """Select the named options of the list, then submit."""
    names = page.goal_part(r"Select (.*) from the (?:scroll )?list").split(", ")
    for option in page.all("option"):
        if option.name in names and not option.is_selected:
            return click(option)
    return submit(page)


def coloured_box(page: PageView) -> str | None:
    """Click the box of the quoted colour."""
    colour = page.goal_part(r"Click on the (\w+) colored")
    boxes = page.all("clickable", cls="color")
    return click(next((b for b in boxes if b.states == f"color: {colour}"), None))


def shades(page: PageView) -> str | None:
    """Select every span whose strongest colour is the goal's, and submit."""
    channel = ("red", "green", "blue").index(page.goal_part(r"shades of (\w+)"))
    for node in page.all("clickable"):
        levels = [int(n) for n in re.findall(r"\d+", node.states.partition("color: rgb")[2])]
        if len(levels) == 3 and levels[channel] == max(levels) and node.name != "selected":
            return click(node)
    return submit(page)


def widget(page: PageView) -> str | None:
    """Click a widget of the quoted kind."""
    kind = page.quoted()[0]
    if kind in ("radio", "checkbox", "button"):
        return click(page.one(kind))
    fields = page.all("textbox")
    # A text area is taller than an input.
    tall = [field for field in fields if field.height > 25]
    low = [field for field in fields if field.height <= 25]
    chosen = tall if kind == "textarea" else low
    return click(chosen[0] if chosen else None)


def menu_path(page: PageView) -> str | None:
    """Open the menus on the path and click the last item."""
    path = page.goal_part(r"Select (.*)").split(">")
    items = page.all("menuitem")
    for depth in range(len(path) - 1, -1, -1):
        item = next((i for i in items if i.name == path[depth]), None)
        if item is not None:
            last = depth == len(path) - 1
            return click(item) if last else f"hover [{item.id}]"
    return None


def pie(page: PageView) -> str | None:
    """Expand the pie and click the quoted slice."""
    letter = page.quoted()[0]
    slices = [t for t in page.all("text", name=letter) if t.height > 5]
    return click(slices[0] if slices else page.one("text", name="+"))


def grid_point(page: PageView) -> str | None:
    """Click the circle at the coordinates, which are relative to the middle of the grid."""
    column, row = (int(n) for n in re.findall(r"-?\d+", page.goal)[-2:])
    circles = page.all("circle")
    xs = sorted({circle.x for circle in circles})
    ys = sorted({circle.y for circle in circles}, reverse=True)
    wanted = (xs[column + 2], ys[row + 2])
    return click(next(c for c in circles if (c.x, c.y) == wanted))


def circle_center(page: PageView) -> str | None:
    """Click the circle, at its middle, and submit."""
    return submit(page) if page.taken else click(page.one("circle"))


def ascending(page: PageView) -> str | None:
    """Click the numbers in ascending order; covered numbers are listed in this order."""
    if number := page.one("text", name="1"):
        return click(number)
    squares = page.all("rect")
    return click(squares[0] if squares else None)


def greatest_card(page: PageView) -> str | None:
    """Turn the card with the greatest number over and submit."""
    cards = [n for n in page.all("clickable", cls="card") if n.name.lstrip("-").isdigit()]
    best = max(cards, key=lambda card: int(card.name), default=None)
    if best is not None and "hidden" in best.dom_class:
        return click(best)
    return submit(page)


def odd_or_even(page: PageView) -> str | None:
    """Mark each number as odd or even, then submit."""
    numbers = [t for t in page.texts() if re.fullmatch(r"-?\d+", t.name)]
    for number in numbers:
        name = "Odd" if int(number.name) % 2 else "Even"
        buttons = [b for b in page.all("button", name=name)]
        button = min(buttons, key=lambda b: abs(b.y - number.y))
        if "selected" not in button.dom_class:
            return click(button)
    return submit(page)


def number_pattern(page: PageView) -> str | None:
    """Check the boxes that draw the digit."""
    rows = WORDS["digits"][int(page.quoted()[0])].split()
    boxes = page.all("checkbox")
    for box, mark in zip(boxes, "".join(rows), strict=False):
        if box.is_checked != (mark == "1"):
            return click(box)
    return submit(page)


def focus_nth(page: PageView) -> str | None:
    """Click the n-th field, or the only one."""
    place = page.goal_part(r"(\d)\w\w input")
    fields = page.all("textbox")
    return click(fields[int(place) - 1] if place else fields[0])


def tree_item(page: PageView) -> str | None:
    """Open the folders from the top until the named item is visible, and click it."""
    name = page.quoted()[0]
    if item := page.one(name=name):
        return click(item)
    opener = next(
        (n for n in page.all("clickable") if "expandable-hitarea" in n.dom_class.split()), None
    )
    return click(opener)
