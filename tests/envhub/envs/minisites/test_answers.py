"""Answers of the sites' tasks, found a second time: from bare rows, in plain Python."""

import re
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterator

import pytest

from envhub.envs.minisites.env import DOMAINS, SUBSETS, SiteTask, split_tasks
from envhub.envs.minisites.store import master
from tests.marks import long_for

Row = sqlite3.Row
MAX_TASKS_PER_TEMPLATE = 12
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class World:
    """The tables of one database as lists of rows."""

    def __init__(self, database: str, seed: int) -> None:
        self._db = master(database, seed)

    def rows(self, table: str, **values: object) -> list[Row]:
        rows = self._db.execute(f"SELECT * FROM {table}").fetchall()
        return [r for r in rows if all(r[key] == value for key, value in values.items())]

    def one(self, table: str, **values: object) -> Row:
        (row,) = self.rows(table, **values)
        return row


def dollars(cents: int) -> str:
    return "$" + format(cents / 100, ",.2f")


def total(world: World, order: Row) -> int:
    lines = world.rows("purchase_line", purchase_id=order["id"])
    return order["shipping_cents"] + sum(x["quantity"] * x["price_cents"] for x in lines)


def product_price(w: World, name: str) -> list[str]:
    return [dollars(w.one("product", name=name)["price_cents"])]


def extreme_product(w: World, word: str, category: str) -> list[str]:
    rows = w.rows("product", category_id=w.one("category", name=category)["id"])
    pick = min if word == "cheapest" else max
    row = pick(rows, key=lambda r: r["price_cents"])
    return [row["name"], dollars(row["price_cents"])]


def order_total(w: World, number: str) -> list[str]:
    order = w.one("purchase", number=number, customer_id=1)
    return [order["status"], dollars(total(w, order))]


def spent_in_month(w: World, first: str, last: str | None) -> list[str]:
    orders = w.rows("purchase", customer_id=1)
    chosen = [o for o in orders if first <= o["created"][:7] <= (last or first)]
    return [dollars(sum(total(w, o) for o in chosen if o["status"] != "Canceled"))]


def order_of_product(w: World, name: str, number: str) -> list[str]:
    order, product = w.one("purchase", number=number), w.one("product", name=name)
    line = w.one("purchase_line", purchase_id=order["id"], product_id=product["id"])
    return [str(line["quantity"])]


def unhappy_reviewers(w: World, name: str) -> list[str]:
    rows = w.rows("review", product_id=w.one("product", name=name)["id"], status="Approved")
    return sorted(r["nickname"] for r in rows if r["rating"] in (1, 2))


def bestseller(w: World, month: str) -> list[str]:
    sold: Counter[int] = Counter()
    for order in w.rows("purchase"):
        if order["created"].startswith(month) and order["status"] != "Canceled":
            for line in w.rows("purchase_line", purchase_id=order["id"]):
                sold[line["product_id"]] += line["quantity"]
    (best, num), (_, second) = sold.most_common(2)
    assert num > second
    return [w.one("product", id=best)["name"], str(num)]


def month_sales(w: World, question: str, month: str) -> list[str]:
    orders = [o for o in w.rows("purchase") if o["created"][:7] == month]
    if "total sales" in question:
        return [dollars(sum(total(w, o) for o in orders))]
    return [str(sum("canceled" not in question or o["status"] == "Canceled" for o in orders))]


def customer_of_order(w: World, number: str) -> list[str]:
    customer = w.one("customer", id=w.one("purchase", number=number)["customer_id"])
    return [customer["name"], customer["email"]]


def customer_phone(w: World, name: str) -> list[str]:
    return [w.one("customer", name=name)["phone"]]


def product_stock(w: World, sku: str) -> list[str]:
    return [str(w.one("product", sku=sku)["stock"])]


def waiting_reviews(w: World, name: str) -> list[str]:
    product = w.one("product", name=name)
    rows = w.rows("review", product_id=product["id"], status="Pending")
    return sorted(r["nickname"] for r in rows)


def place_phone(w: World, name: str) -> list[str]:
    return [w.one("place", name=name)["phone"]]


def place_address(w: World, name: str) -> list[str]:
    place = w.one("place", name=name)
    return [f"{place['number']} {place['street']}", place["quarter"]]


def closing_time(w: World, name: str, day: str) -> list[str]:
    place = w.one("place", name=name)
    return [w.one("hours", place_id=place["id"], weekday=WEEK.index(day))["closes"]]


def blocks(start: Row, end: Row) -> int:
    """Return the shortest way in blocks, by trying all ways through the grid and its bridges."""
    queue = deque([(start["col"], start["line"], 0)])
    seen = {(start["col"], start["line"])}
    while queue:
        col, line, steps = queue.popleft()
        if (col, line) == (end["col"], end["line"]):
            return steps
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            spot = (col + dx, line + dy)
            is_river = dx != 0 and {col, spot[0]} == {5, 6}
            is_inside = 0 <= spot[0] < 12 and 0 <= spot[1] < 12
            if is_inside and spot not in seen and not (is_river and line not in (2, 9)):
                seen.add(spot)
                queue.append((*spot, steps + 1))
    raise AssertionError("no way")


def travel_minutes(w: World, start: str, end: str, how: str) -> list[str]:
    meters = 150 * blocks(w.one("place", name=start), w.one("place", name=end))
    speed, extra = {"on foot": (75, 0), "by bicycle": (250, 1), "by car": (500, 4)}[how]
    return [str((meters + speed - 1) // speed + extra)]


def travel_distance(w: World, start: str, end: str) -> list[str]:
    num = blocks(w.one("place", name=start), w.one("place", name=end))
    return [f"{num * 0.15:.2f} km"]


def nearest_place(w: World, category: str, name: str) -> list[str]:
    centre = w.one("place", name=name)
    rows = w.rows("place", category=category.capitalize())
    (best, place), (second, _) = sorted((blocks(centre, r), r["name"]) for r in rows)[:2]
    assert best < second
    return [place, f"{best * 0.15:.2f} km"]


def best_rated(w: World, category: str, word: str) -> list[str]:
    pick = max if word == "best" else min
    row = pick(w.rows("place", category=category.capitalize()), key=lambda r: r["rating"])
    return [row["name"], row["street"]]


def open_on_day(w: World, plural: str, day: str) -> list[str]:
    singular = {"bakeries": "Bakery", "libraries": "Library", "pharmacies": "Pharmacy"}
    rows = w.rows("place", category=singular.get(plural, plural[:-1].capitalize()))
    open_ids = {h["place_id"] for h in w.rows("hours", weekday=WEEK.index(day))}
    return sorted(r["name"] for r in rows if r["id"] in open_ids)


def closer_of_two(w: World, centre: str, first: str, second: str) -> list[str]:
    middle = w.one("place", name=centre)
    return [min((first, second), key=lambda name: blocks(middle, w.one("place", name=name)))]


def commit_count(w: World, name: str, project: str) -> list[str]:
    author, home = w.one("user", name=name), w.one("project", name=project)
    return [str(len(w.rows("change", project_id=home["id"], author_id=author["id"])))]


def top_contributor(w: World, project: str) -> list[str]:
    rows = w.rows("change", project_id=w.one("project", name=project)["id"])
    ((user_id, _), *_) = Counter(r["author_id"] for r in rows).most_common(1)
    user = w.one("user", id=user_id)
    return [user["name"], user["email"]]


def issue_people(w: World, title: str, project: str) -> list[str]:
    issue = w.one("issue", title=title, project_id=w.one("project", name=project)["id"])
    return [w.one("user", id=issue[key])["name"] for key in ("author_id", "assignee_id")]


def issue_count(w: World, project: str, label: str) -> list[str]:
    home = w.one("project", name=project)
    return [str(len(w.rows("issue", project_id=home["id"], label=label, is_open=1)))]


def member_role(w: World, name: str, project: str) -> list[str]:
    home, user = w.one("project", name=project), w.one("user", name=name)
    return [w.one("member", project_id=home["id"], user_id=user["id"])["role"]]


def find_post(w: World, title: str, forum: str) -> Row:
    return w.one("post", title=title, forum_id=w.one("forum", name=forum)["id"])


def post_author(w: World, title: str, forum: str) -> list[str]:
    post = find_post(w, title, forum)
    return [w.one("user", id=post["author_id"])["name"], post["created"]]


def extreme_post(w: World, forum: str, words: str) -> list[str]:
    key = "created" if "newest" in words else "score"
    posts = w.rows("post", forum_id=w.one("forum", name=forum)["id"])
    post = sorted(posts, key=lambda r: r[key])[-1]
    return [w.one("user", id=post["author_id"])["name"]]


def comment_count(w: World, title: str, forum: str) -> list[str]:
    rows = w.rows("comment", post_id=find_post(w, title, forum)["id"])
    return [str(sum(r["score"] < 0 for r in rows))]


def commenters(w: World, title: str, forum: str) -> list[str]:
    rows = w.rows("comment", post_id=find_post(w, title, forum)["id"])
    return [w.one("user", id=r["author_id"])["name"] for r in rows]


def subscriber_count(w: World, first: str, second: str) -> list[str]:
    return [str(sum(w.one("forum", name=f)["num_subscribers"] for f in (first, second)))]


def best_comment(w: World, name: str) -> list[str]:
    rows = w.rows("comment", author_id=w.one("user", name=name)["id"])
    post = w.one("post", id=max(rows, key=lambda r: r["score"])["post_id"])
    return [w.one("forum", id=post["forum_id"])["name"]]


# how each template's intent names its parameters
ORACLES: dict[Callable[..., list[str]], str] = {
    product_price: r"does the (.+) cost",
    extreme_product: r"the (cheapest|most expensive) product of the category (\w+)",
    order_total: r"my order (\d+)",
    spent_in_month: r"(?:in|from) (\d{4}-\d\d)(?: to (\d{4}-\d\d))?",
    order_of_product: r"pieces of (.+) did I buy with order (\d+)",
    unhappy_reviewers: r"gave the (.+) one or two",
    bestseller: r"sold best in (\S+),",
    month_sales: r"(.+) in (\d{4}-\d\d)\?",
    customer_of_order: r"of order (\d+)",
    customer_phone: r"What is (.+)'s phone",
    product_stock: r"with SKU (\S+) are",
    waiting_reviews: r"reviews of the (.+) are pending",
    place_phone: r"number of the (.+)\? Answer",
    place_address: r"address of the (.+) and the quarter",
    closing_time: r"does the (.+) close on a (\w+)\?",
    travel_minutes: r"from the (.+) to the (.+) (on foot|by bicycle|by car)\?",
    travel_distance: r"from the (.+) to the (.+)\? Answer",
    nearest_place: r"Which (\w+) is nearest to the (.+), and",
    best_rated: r"Which (\w+) has the (best|worst)",
    open_on_day: r"List all (\w+) that are open on a (\w+)\.",
    closer_of_two: r"closer to the (.+): the (.+) or the (.+)\? ",
    commit_count: r"How many commits did (.+) make to the project (.+)\? ",
    top_contributor: r"commits to (.+)\? Give",
    issue_people: r'the issue "(.+)" of (.+), and',
    issue_count: r'open issues of (.+) have the label "(.+)"',
    member_role: r"role does (.+) have in the project (.+)\? ",
    post_author: r'the post "(.+)" in the forum (\w+),',
    extreme_post: r"in the forum (\w+) (.+)\? ",
    comment_count: r'the post "(.+)" in the forum (\w+) have',
    commenters: r'the post "(.+)" in the forum (\w+)\.',
    subscriber_count: r"the forums (\w+) and (\w+) have",
    best_comment: r"the user (\w+) write",
}
BY_NAME = {function.__name__: (function, pattern) for function, pattern in ORACLES.items()}


def answer_tasks(subset: str) -> Iterator[SiteTask]:
    """Yield the first tasks of every template that asks for an answer, of both splits."""
    counts: Counter[str] = Counter()
    for split in ("test", "train"):
        for task in split_tasks(subset, split):
            counts[task.template] += 1
            is_answer = task.draft.check["reference_answers"] is not None
            if is_answer and counts[task.template] <= MAX_TASKS_PER_TEMPLATE:
                yield task


@pytest.mark.slow
@pytest.mark.parametrize("subset", long_for(SUBSETS, ["CMS", "Maps", "Reddit"]))
def test_answer_equals_a_plain_python_query_of_the_rows(subset: str) -> None:
    seen = set()
    for task in answer_tasks(subset):
        function, pattern = BY_NAME[task.template]
        match = re.search(pattern, task.draft.intent)
        assert match is not None, task.draft.intent
        expected = function(World(DOMAINS[subset].database, task.site_seed), *match.groups())
        ((how, wanted),) = task.draft.check["reference_answers"].items()
        listed = [wanted] if how == "exact_match" else wanted
        assert sorted(listed) == sorted(expected), task.draft.intent
        seen.add(task.template)
    assert len(seen) >= 4
