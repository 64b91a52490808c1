"""Task templates of the shop's administration."""

import sqlite3
from collections.abc import Iterator
from random import Random
from urllib.parse import quote_plus

from envhub.envs.minisites.drafts import (
    Draft,
    Step,
    both,
    button,
    click,
    ends_at,
    fill,
    link,
    says,
    says_all,
    seek,
    shows,
    some,
    stop,
)
from envhub.envs.minisites.shop.admin_pages import BESTSELLERS, ORDER_STATES, SALES
from envhub.envs.minisites.site import money

HOST = "http://cms.test"
NOTES = (
    "The parcel was handed to the carrier.",
    "The customer asked for a gift wrap.",
    "The warehouse has to count the stock first.",
    "The address was confirmed by phone.",
    "A replacement is on its way.",
)
COUPON_WORDS = ("BLOOM", "CLOUD", "EMBER", "FROST", "MAPLE", "NORTH", "PEARL", "ROBIN", "TULIP")
OPEN_ORDERS = (
    "SELECT * FROM purchase WHERE status IN ('Pending', 'Processing', 'On Hold') ORDER BY id"
)


def to_order(number: str) -> tuple[Step, ...]:
    """Returns the way to an order's page."""
    return (link("Orders"), seek("Search orders", number), link(f"Order {number}"))


def to_product(name: str) -> tuple[Step, ...]:
    """Returns the way to a product's page."""
    return (link("Products"), seek("Search products", name), link(name))


def to_customer(name: str) -> tuple[Step, ...]:
    """Returns the way to a customer's page."""
    return (link("Customers"), seek("Search customers", name), link(name))


def bestseller(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The best selling product of a month, where there is only one."""
    for month, *_ in db.execute(SALES).fetchall():
        rows = db.execute(BESTSELLERS, (month,)).fetchall()
        if len(rows) < 2 or rows[0]["sold"] == rows[1]["sold"]:
            continue
        name, sold = rows[0]["name"], str(rows[0]["sold"])
        yield Draft(
            intent=f"Which product sold best in {month}, and how many pieces of it were sold?",
            check=says_all([name, sold]),
            path=(
                link("Reports"),
                link("Bestsellers"),
                link(month),
                stop(f"{name}, {sold} pieces"),
            ),
        )


def month_sales(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Orders or income of a month."""
    for row in db.execute(SALES).fetchall():
        for words, answer in (
            ("How many orders were placed", str(row["num_orders"])),
            ("How many of the orders were canceled that were placed", str(row["num_canceled"])),
            ("What were the total sales", money(row["total_cents"])),
        ):
            form = "amount as printed" if answer.startswith("$") else "number"
            yield Draft(
                intent=f"{words} in {row['month']}? Answer with the {form} only.",
                check=says(answer),
                path=(link("Reports"), link("Sales"), stop(answer)),
            )


def customer_of_order(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who placed an order."""
    rows = db.execute(
        "SELECT number, name, email FROM purchase JOIN customer ON customer.id = customer_id"
        " ORDER BY purchase.id"
    ).fetchall()
    for row in some(random, rows):
        yield Draft(
            intent=f"Give the name and the email address of the customer of order {row['number']}.",
            check=says_all([row["name"], row["email"]]),
            path=(*to_order(row["number"]), stop(f"{row['name']}, {row['email']}")),
        )


def customer_phone(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A customer's phone number."""
    for row in some(random, db.execute("SELECT * FROM customer ORDER BY id").fetchall()):
        yield Draft(
            intent=f"What is {row['name']}'s phone number? Answer with the number only.",
            check=says(row["phone"]),
            path=(*to_customer(row["name"]), stop(row["phone"])),
        )


def product_stock(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """How many pieces of a product are left."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        answer = str(row["stock"])
        yield Draft(
            intent=f"How many pieces of the product with SKU {row['sku']} are in stock? "
            "Answer with the number only.",
            check=says(answer),
            path=(link("Products"), seek("Search products", row["sku"]), stop(answer)),
        )


def waiting_reviews(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who waits for the approval of a review."""
    rows = db.execute(
        "SELECT product.name, group_concat(nickname, '|') AS names FROM review"
        " JOIN product ON product.id = product_id WHERE status = 'Pending'"
        " GROUP BY product.id ORDER BY product.id"
    ).fetchall()
    for row in some(random, rows):
        names = sorted(row["names"].split("|"))
        yield Draft(
            intent=f"Whose reviews of the {row['name']} are pending? List all nicknames.",
            check=says_all(names),
            path=(
                link("Reviews"),
                link("Pending"),
                seek("Search reviews", row["name"]),
                stop(", ".join(names)),
            ),
        )


def orders_by_status(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The orders of a customer, or of one status."""
    for status in ORDER_STATES:
        yield Draft(
            intent=f'Show me all orders with the status "{status}".',
            check=ends_at(f"{HOST}/orders?status={quote_plus(status)}"),
            path=(link("Orders"), link(status), stop()),
        )
    for month, *_ in db.execute(SALES).fetchall():
        yield Draft(
            intent=f"Show me the report of the bestsellers of {month}.",
            check=ends_at(f"{HOST}/reports/bestsellers?month={month}"),
            path=(link("Reports"), link("Bestsellers"), link(month), stop()),
        )


def open_customer(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of an order's customer."""
    rows = db.execute(
        "SELECT number, name, customer.id FROM purchase JOIN customer"
        " ON customer.id = customer_id ORDER BY purchase.id"
    ).fetchall()
    for row in some(random, rows):
        # a path is matched as a part: the page of customer 1 must not be that of customer 11
        if row["id"] < 10:
            continue
        yield Draft(
            intent=f"Open the customer page of whoever placed order {row['number']}.",
            check=ends_at(f"{HOST}/customers/{row['id']}"),
            path=(*to_order(row["number"]), link(row["name"]), stop()),
        )


def set_price(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Another price for a product."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        cents = row["price_cents"] + random.choice((-100, 150, 200, 325))
        yield Draft(
            intent=f"Change the price of the {row['name']} to {money(cents)}.",
            check=shows(f"{HOST}/products/{row['id']}", "price", exact=money(cents)),
            path=(
                *to_product(row["name"]),
                fill("Price", f"{cents / 100:.2f}"),
                button("Save Product"),
                stop(),
            ),
        )


def disable_product(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A product taken out of the shop."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        yield Draft(
            intent=f"Disable the product {row['name']}, so that the shop no longer offers it.",
            check=shows(f"{HOST}/products/{row['id']}", "status", exact="Disabled"),
            path=(
                *to_product(row["name"]),
                click("radio", "Disabled"),
                button("Save Product"),
                stop(),
            ),
        )


def moderate_review(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A pending review approved or rejected."""
    rows = db.execute(
        "SELECT review.id, nickname, product.name FROM review"
        " JOIN product ON product.id = product_id WHERE status = 'Pending' ORDER BY review.id"
    ).fetchall()
    for row in some(random, rows):
        verb, state = random.choice((("Approve", "Approved"), ("Reject", "Rejected")))
        yield Draft(
            intent=f"{verb} the pending review of the {row['name']} by {row['nickname']}",
            check=shows(f"{HOST}/reviews/{row['id']}", "status", exact=state),
            path=(
                link("Reviews"),
                link("Pending"),
                seek("Search reviews", row["name"]),
                link(f"Review {row['id']}"),
                button(f"{verb} Review"),
                stop(),
            ),
        )


def move_order(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """An open order completed, held or canceled."""
    for row in some(random, db.execute(OPEN_ORDERS).fetchall()):
        words, label, state = random.choice(
            (
                ("Mark {} as complete.", "Complete Order", "Complete"),
                ("Cancel {}.", "Cancel Order", "Canceled"),
            )
        )
        number = row["number"]
        yield Draft(
            intent=words.format(f"order {number}"),
            check=shows(f"{HOST}/orders/{number}", "status", exact=state),
            path=(*to_order(number), button(label), stop()),
        )


def comment_order(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A comment on an order."""
    rows = db.execute("SELECT number FROM purchase ORDER BY id").fetchall()
    for row in some(random, rows):
        note, number = random.choice(NOTES), row["number"]
        yield Draft(
            intent=f'Add this comment to order {number}: "{note}"',
            check=shows(f"{HOST}/orders/{number}", "notes", parts=[note]),
            path=(*to_order(number), fill("New comment", note), button("Add Comment"), stop()),
        )


def new_coupon(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A new coupon."""
    for _ in range(30):
        percent = random.randrange(5, 60)
        code = f"{random.choice(COUPON_WORDS)}{percent}"
        yield Draft(
            intent=f"Create the coupon {code}, which takes {percent} percent off.",
            check=shows(f"{HOST}/coupons", "coupons", parts=[f"{code}: {percent} percent off"]),
            path=(
                link("Coupons"),
                link("New Coupon"),
                fill("Code", code),
                fill("Percent off", str(percent)),
                button("Save Coupon"),
                stop(),
            ),
        )


def promote_customer(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A customer moved to another group."""
    for row in some(random, db.execute("SELECT * FROM customer ORDER BY id").fetchall()):
        tier = random.choice([t for t in ("General", "Wholesale", "VIP") if t != row["tier"]])
        page = f"{HOST}/customers/{row['id']}"
        yield Draft(
            intent=f"Move the customer {row['name']} to the group {tier}.",
            check=both(shows(page, "tier", exact=tier), shows(page, "phone", exact=row["phone"])),
            path=(
                *to_customer(row["name"]),
                click("radio", tier),
                button("Save Customer"),
                stop(),
            ),
        )


CMS_TEMPLATES = (
    bestseller,
    month_sales,
    customer_of_order,
    customer_phone,
    product_stock,
    waiting_reviews,
    orders_by_status,
    open_customer,
    set_price,
    disable_product,
    moderate_review,
    move_order,
    comment_order,
    new_coupon,
    promote_customer,
)
