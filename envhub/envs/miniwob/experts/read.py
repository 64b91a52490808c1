"""Experts for pages that must be read: inboxes, posts, contacts, tickets, menus."""

import re

from envhub.envs.miniwob.experts.click import WORDS, submit
from envhub.envs.miniwob.experts.form import date_picker, fields
from envhub.envs.miniwob.view import PageView, click, write
from envhub.web.actions import WebActionType
from envhub.web.tree import PageNode

# Screens of the longest text: on the scrolling page, and on the page read to the end.
NUM_SCREENS = 12
MAX_SCREENS = 40


def email(page: PageView) -> str | None:
    """Find the email and delete, star, answer or forward it."""
    sender = page.goal_part(r"(?:email|message) (?:by|from) ([\w-]+)")
    threads = page.all("clickable", cls="email-thread")
    thread = next((t for t in threads if t.name.split(" ")[0] == sender), None)
    to = page.goal_part(r"forward that email to ([\w-]+)")
    icon = "trash" if "delete" in page.goal else "star" if "star icon" in page.goal else ""
    return _deal_with(page, thread, icon=icon, to=to, text=(page.quoted() or [""])[0])


def email_in_free_words(page: PageView) -> str | None:
    """Perform the email task of a goal in free wording."""
    order = page.inside
    threads = page.all("clickable", cls="email-thread")
    thread = threads[order["place"]] if threads else None
    icon = {"delete": "trash", "important": "star"}.get(order["action"], "")
    return _deal_with(page, thread, icon=icon, to=order["forward"], text=order["reply"])


def _deal_with(
    page: PageView, thread: PageNode | None, *, icon: str, to: str, text: str
) -> str | None:
    """Click the icon, forward the email if `to` is a name, or else answer with the text."""
    area = page.one("textbox", dom_id="reply-text")
    if area is not None:
        done = area.value == text
        return click(page.one(dom_id="send-reply")) if done else write(area, text)
    address = page.one("textbox", cls="forward-sender")
    if address is not None:
        done = address.value == to
        return click(page.one(dom_id="send-forward")) if done else write(address, to)
    opened = page.one("clickable", cls="email-reply") or page.one("clickable", cls="email-forward")
    if opened is not None and icon:
        return click(page.one("clickable", cls=icon))
    if opened is not None:
        return click(page.one("clickable", cls="email-forward" if to else "email-reply"))
    if thread is None:
        return None
    inner = [n for n in page.inside_of(thread) if icon and icon in n.dom_class.split()]
    # An inbox without icons shows them only in the opened email.
    return click(inner[0] if inner else thread)


def _posts(page: PageView) -> list[tuple[str, list[PageNode]]]:
    """Return each post's user with the nodes of the post."""
    posts: list[tuple[str, list[PageNode]]] = []
    for node in page.nodes:
        if node.role == "StaticText" and "username" in node.dom_class.split():
            posts.append((node.name, []))
        elif posts:
            posts[-1][1].append(node)
    return posts


def one_post(page: PageView) -> str | None:
    """Click the button of the user's post; it may be inside the post's menu."""
    user = page.goal_part(r"For the user (@\w+)")
    word = WORDS["buttons"][page.quoted()[0]]
    for name, nodes in _posts(page):
        if name != user:
            continue
        button = next(
            (n for n in nodes if word in n.dom_class.split() and n.role != "StaticText"), None
        )
        return click(button or next((n for n in nodes if "more" in n.dom_class.split()), None))
    return None


def all_posts(page: PageView) -> str | None:
    """Click the button of every post by the user, or of the requested number, and submit."""
    user = page.goal_part(r"by (@\w+)")
    word = WORDS["buttons"][page.quoted()[0]]
    limit = int(page.goal_part(r"on (\d+) post") or 99)
    buttons = [
        next(n for n in nodes if word in n.dom_class.split())
        for name, nodes in _posts(page)
        if name == user
    ]
    for button in buttons[:limit]:
        if "active" not in button.dom_class.split():
            return click(button)
    return submit(page)


def contact(page: PageView) -> str | None:
    """Page through the contacts to the right one and click the property."""
    name, what = re.findall(r"Find (.*) in the contact book and click on their (\w+)", page.goal)[0]
    shown = page.one("heading")
    if shown is not None and shown.name == name:
        return click(next(n for n in page.all(cls=what) if n.role != "StaticText"))
    return click(page.one("link", name=">"))


def _price(node: PageNode) -> int:
    """Return the price of a flight."""
    return int(node.name.rpartition("$")[2])


def _minutes(node: PageNode) -> int:
    """Return the duration of a flight in minutes."""
    hours, minutes = re.findall(r"(\d+)h (\d+)m", node.name)[0]
    return int(hours) * 60 + int(minutes)


def ticket(page: PageView) -> str | None:
    """Book the cheapest, most expensive, shortest or longest ticket."""
    books = [b for b in page.all("button") if b.name.startswith("Book")]
    times = [t for t in page.texts() if re.fullmatch(r"\d+h \d+m", t.name)]
    if "cost" in page.goal or "cheapest" in page.goal:
        ranked = sorted(books, key=_price)
    else:
        pairs = sorted(zip(times, books, strict=True), key=lambda pair: _minutes(pair[0]))
        ranked = [book for _, book in pairs]
    is_last = "most expensive" in page.goal or "longest" in page.goal
    return click(ranked[-1] if is_last else ranked[0])


def flight(page: PageView) -> str | None:
    """Fill in the form with its suggestions, search and book."""
    start, end, _ = re.findall(r"from: (.*) to: (.*) on (\S+?)\.?$", page.goal)[0]
    if any(b.name.startswith("Book flight") for b in page.all("button")):
        return ticket(page)
    items = [n for n in page.nodes if "ui-menu-item-wrapper" in n.dom_class.split()]
    for dom_id, city in (("flight-from", start), ("flight-to", end)):
        field = next(n for n in fields(page) if n.dom_id == dom_id)
        if city in field.value and field.value != city:
            continue
        fit = [n for n in items if city in n.name]
        if fit and field.value == city:
            exact = [n for n in fit if n.name.startswith(city + " (") or f"({city})" in n.name]
            return click((exact or fit)[0])
        return write(field, city)
    day = page.goal_part(r"(\d+/\d+/\d+)")
    picker = next(n for n in fields(page) if n.dom_id == "datepicker")
    return date_picker(page) if picker.value != day else click(page.one("button", name="Search"))


def order(page: PageView) -> str | None:
    """Order the named items, or the requested number of items of a kind."""
    dishes = _dishes(page)
    kind = page.goal_part(r"items that are (\S+)")
    if kind:
        fit = [adder for _, kinds, adder, _ in dishes if kind in kinds][:1]
        wanted = int(page.goal_part(r"Order (\d+)"))
        done = sum(action.kind is WebActionType.CLICK for action in page.taken)
        return click(fit[0]) if done < wanted else submit(page)
    names = [n.strip() for n in page.goal_part(r"each item: (.*)").split(",")]
    for name, _, adder, count in dishes:
        if name in names and not count:
            return click(adder)
    return submit(page)


def _dishes(page: PageView) -> list[tuple[str, set[str], PageNode, int]]:
    """Return name, kinds, plus sign and ordered number of each dish."""
    dishes = []
    name = ""
    kinds = set()
    count = 0
    for node in page.nodes:
        if "item-name" in node.dom_class.split():
            name = node.name
            kinds = set()
            count = 0
        elif node.role == "img":
            kinds.add(node.name)
        elif "quantity" in node.dom_class.split() and node.name.isdigit():
            count = int(node.name)
        elif node.name == "+" and node.role == "clickable":
            dishes.append((name, kinds, node, count))
    return dishes


def scroll_area(page: PageView) -> str | None:
    """Scroll the text to its top or bottom, within `NUM_SCREENS` screens, and submit."""
    direction = "down" if "to the bottom" in page.goal else "up"
    return _scroll(page, direction, NUM_SCREENS) or submit(page)


def _scroll(page: PageView, direction: str, limit: int) -> str | None:
    """Return the next action of a scroll; None after `limit` scrolls."""
    area = page.one("textbox", dom_id="text-area")
    if not page.taken:
        return f"hover [{area.id}]" if area else None
    scrolls = sum(action.kind is WebActionType.SCROLL for action in page.taken)
    return f"scroll [{direction}]" if scrolls < limit else None


def agreement(page: PageView) -> str | None:
    """Read to the end, sign and answer; or only cancel."""
    if "Click the cancel button" in page.goal:
        return click(page.one("button", name="Cancel"))
    field = page.one("textbox", dom_id="name")
    if field is None or "disabled" in field.states:
        return _scroll(page, "down", MAX_SCREENS)
    name, answer = page.quoted()
    return click(page.one("button", name=answer)) if field.value == name else write(field, name)
