"""Experts for pages with form fields."""

import calendar
import operator
import re

from envhub.envs.miniwob.experts.click import submit
from envhub.envs.miniwob.view import PageView, click, write
from envhub.web.actions import WebActionType
from envhub.web.tree import PageNode

FIELD_ROLES = ("textbox", "spinbutton", "searchbox", "Date", "InputTime")
MONTHS = list(calendar.month_name)


def fields(page: PageView) -> list[PageNode]:
    """Return the form fields of a page."""
    return [node for node in page.nodes if node.role in FIELD_ROLES]


def fill(page: PageView, *texts: str) -> str | None:
    """Write the texts into the fields in order, then submit."""
    for field, text in zip(fields(page), texts, strict=False):
        if field.value != text:
            return write(field, text)
    return submit(page)


def quoted_text(page: PageView) -> str | None:
    """Write the quoted text and submit."""
    return fill(page, page.quoted()[0])


def cased_text(page: PageView) -> str | None:
    """Write the quoted text in upper or lower case and submit."""
    text = page.quoted()[0]
    return fill(page, text.upper() if "upper case" in page.goal else text.lower())


def password_twice(page: PageView) -> str | None:
    """Write the quoted password into both fields and submit."""
    return fill(page, page.quoted()[0], page.quoted()[0])


def login(page: PageView) -> str | None:
    """Write the quoted user name and password, then submit."""
    if cancel := page.one("button", name="Cancel"):
        return click(cancel)
    return fill(page, *page.quoted()[:2])


def date_field(page: PageView) -> str | None:
    """Write the date and submit."""
    month, day, year = page.goal_part(r"Enter (\d+/\d+/\d+)").split("/")
    return fill(page, f"{year}-{month}-{day}")


def time_field(page: PageView) -> str | None:
    """Write the time and submit."""
    hour, minute, half = re.findall(r"(\d+):(\d+) ([AP])M", page.goal)[0]
    return fill(page, f"{int(hour) % 12 + 12 * (half == 'P'):02d}:{minute}")


def date_picker(page: PageView) -> str | None:
    """Select the month and click the day; the year never changes."""
    wanted = page.goal_part(r"(\d+/\d+/\d+)")
    month, day, _ = (int(part) for part in wanted.split("/"))
    field = next(n for n in fields(page) if n.dom_id == "datepicker")
    if field.value == wanted:
        return submit(page)
    shown = page.one("StaticText", cls="ui-datepicker-month")
    if shown is None:
        return click(field)
    distance = month - MONTHS.index(shown.name)
    if distance:
        name = "Next" if distance > 0 else "Prev"
        return click(
            next(n for n in page.nodes if n.name == name and n.role in ("clickable", "link"))
        )
    days = page.all("link", name=str(day), cls="ui-state-default")
    return click(days[0] if days else None)


def copy_area(page: PageView) -> str | None:
    """Copy the content of the text area into the field."""
    box = next(n for n in fields(page) if n.dom_id == "to-copy")
    answer = next(n for n in fields(page) if n.dom_id == "answer-input")
    return _copy(page, box.value, answer)


def copy_nth_area(page: PageView) -> str | None:
    """Copy the n-th text area into the answer's field."""
    box = fields(page)[int(page.goal_part(r"the (\d)\w\w text area")) - 1]
    answer = next(n for n in fields(page) if n.dom_id == "answer-input")
    return _copy(page, box.value, answer)


def _copy(page: PageView, text: str, answer: PageNode) -> str | None:
    """Write a text into the answer's field; submit once it is there."""
    return submit(page) if answer.value == text else write(answer, text)


def last_word(page: PageView) -> str | None:
    """Write the last word of the text area into the answer's field."""
    area, answer = fields(page)[:2]
    word = re.sub(r"[^a-zA-Z]", "", area.value.split()[-1])
    return _copy(page, word, answer)


def nth_word(page: PageView) -> str | None:
    """Write the n-th word of the text and submit."""
    words = page.texts()[0].name.split()
    return fill(page, re.sub(r"[^a-zA-Z]", "", words[int(page.goal_part(r"the (\d+)")) - 1]))


def spelled(page: PageView) -> str | None:
    """Write the word that the letters spell and submit."""
    letters = [t.name for t in page.texts() if len(t.name) <= 5]
    return fill(page, "".join(letters))


def arithmetic(page: PageView) -> str | None:
    """Write the result of the calculation."""
    left, sign, right = re.findall(r"(\d+) ([-+x]) (\d+)", page.texts()[0].name)[0]
    act = {"+": operator.add, "-": operator.sub, "x": operator.mul}[sign]
    return fill(page, str(act(int(left), int(right))))


def algebra(page: PageView) -> str | None:
    """Write the value of x in the equation."""
    left, sign, right, total = page.texts()[0].name.replace("= ", "").split()
    if left == "x":
        answer = int(total) - int(right) if sign == "+" else int(total) + int(right)
    else:
        answer = int(total) - int(left) if sign == "+" else int(left) - int(total)
    return fill(page, str(answer))


def guess_number(page: PageView) -> str | None:
    """Find the number by bisection."""
    low = 0
    high = 9
    asked = [int(a.text) for a in page.taken if a.kind is WebActionType.TYPE]
    for number in asked[:-1]:
        low, high = _narrow(page, asked, number, low, high)
    page_text = " ".join(t.name for t in page.texts())
    field = fields(page)[0]
    if asked:
        number = asked[-1]
        if "higher than" in page_text and str(number) in page_text:
            low = max(low, number + 1)
        elif "lower than" in page_text and str(number) in page_text:
            high = min(high, number - 1)
        elif field.value == str(number):
            return submit(page)
    return write(field, str((low + high) // 2))


def _narrow(page: PageView, asked: list[int], number: int, low: int, high: int) -> tuple[int, int]:
    """Return the range after an earlier guess, derived from the guess that followed it."""
    following = asked[asked.index(number) + 1]
    return (number + 1, high) if following > number else (low, number - 1)


def generate_number(page: PageView) -> str | None:
    """Generate numbers until one fits, then submit."""
    shown = next((t.name for t in page.texts() if re.fullmatch(r"\d+|-", t.name)), "-")
    if shown != "-":
        number = int(shown)
        limit = int(page.goal_part(r"than (\d+)") or 0)
        fits = {
            "less": number < limit,
            "greater": number > limit,
            "odd": number % 2 == 1,
            "even": number % 2 == 0,
        }
        word = next(w for w in fits if re.search(rf"\b{w}\b", page.goal))
        if fits[word]:
            return submit(page)
    return click(page.one("button", name="Generate"))


def radio_and_number(page: PageView) -> str | None:
    """Select the n-th radio button and fill the n-th field."""
    place = int(page.goal_part(r"the (\d)\w\w radio")) - 1
    button = page.all("radio")[place]
    if not button.is_checked:
        return click(button)
    field = fields(page)[int(page.goal_part(r"the (\d)\w\w textbox")) - 1]
    text = page.quoted()[0]
    return submit(page) if field.value == text else write(field, text)


def height_and_button(page: PageView) -> str | None:
    """Choose the option in the list and click the button."""
    name = page.goal_part(r"Choose (.*) from the dropdown")
    option = page.one("option", name=name)
    if option is not None and not option.is_selected:
        return click(option)
    return click(page.one("button", name=page.quoted()[0]))


def table_value(page: PageView) -> str | None:
    """Write the value that the table has for the name and submit."""
    return fill(page, _table(page)[page.goal_part(r"the value of (.*) into")])


def table_values(page: PageView) -> str | None:
    """Write the values that the table has for the labels."""
    table = _table(page)
    labels = [t.name[:-1] for t in page.texts() if t.name.endswith(":")]
    return fill(page, *[table[label] for label in labels])


def _table(page: PageView) -> dict[str, str]:
    """Return the values of a table of two columns by their names."""
    cells = [cell.name for cell in page.all("cell")]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def movies(page: PageView) -> str | None:
    """Fill in genre, director and year, in any order and with any labels."""
    genre, director, year = re.findall(
        r"for (.*) movies directed by (.*) from year (\d+)", page.goal
    )[0]
    boxes = fields(page)
    words = {"genre": genre, "director": director, "year": year, "date": year}
    labels = [
        next(words[w] for w in words if w in n.name.lower())
        for n in page.nodes
        if n.role in ("StaticText", "columnheader")
        and n.role != "cell"
        and any(w in n.name.lower() for w in words)
    ]
    texts = list(dict.fromkeys(labels))
    for box, text in zip(boxes, texts, strict=True):
        if box.value != text:
            return write(box, text)
    return submit(page)


def search_result(page: PageView) -> str | None:
    """Search, go to the page of the wanted result and click it."""
    place = int(page.goal_part(r"click the (\d+)")) - 1
    name = page.quoted()[0]
    field = fields(page)[0]
    if field.value != name:
        return write(field, name)
    results = page.all("link", cls="search-title")
    if not results:
        return click(page.one("button", name="Search"))
    number = str(place // 3 + 1)
    turned = [a for a in page.taken if a.kind is WebActionType.CLICK]
    if place >= 3 and len(turned) < 2:
        return click(page.one("link", name=number))
    return click(results[place % 3])


def autocomplete(page: PageView) -> str | None:
    """Type the beginning and click the suggestion with the right ending."""
    quoted = page.quoted()
    start = quoted[0]
    end = quoted[1] if len(quoted) > 1 else ""
    field = page.one("textbox", dom_id="tags")
    if field is None:
        return None
    if field.value.startswith(start) and field.value.endswith(end) and len(field.value) > 1:
        is_chosen = page.taken and page.taken[-1].kind is WebActionType.CLICK
        if is_chosen or not end:
            return submit(page)
    items = [n for n in page.nodes if "ui-menu-item-wrapper" in n.dom_class.split()]
    fit = [n for n in items if n.name.startswith(start) and n.name.endswith(end)]
    if fit:
        return click(fit[0])
    return write(field, start)


def spinner(page: PageView) -> str | None:
    """Set the spinner with its arrows, because it does not accept text."""
    distance = int(page.goal_part(r"Select (-?\d+)")) - int(fields(page)[0].value or 0)
    if distance == 0:
        return submit(page)
    arrow = "ui-spinner-up" if distance > 0 else "ui-spinner-down"
    return click(page.one("button", cls=arrow))
