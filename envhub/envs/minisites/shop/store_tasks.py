"""Task templates of the storefront."""

import sqlite3
from collections.abc import Iterator
from random import Random

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
from envhub.envs.minisites.shop.seed import BODIES, PRAISE, SHIPPING_CENTS, SHOPPER_ID
from envhub.envs.minisites.site import money
from envhub.envs.minisites.words import STREETS, TOWNS

HOST = "http://shopping.test"
IN_STOCK = "SELECT * FROM product WHERE stock > 0 ORDER BY id"
OWN_ORDERS = """
    SELECT purchase.*, total_cents, num_units FROM purchase
    JOIN purchase_total ON purchase_total.purchase_id = purchase.id
    WHERE customer_id = ? ORDER BY created DESC, number DESC
"""


def to_product(name: str) -> tuple[Step, ...]:
    """Returns the way to a product's page."""
    return (seek("Search products", name), link(name))


def product_price(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The price of a product."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        price = money(row["price_cents"])
        yield Draft(
            intent=f"What does the {row['name']} cost? Answer with the printed price.",
            check=says(price),
            path=(*to_product(row["name"]), stop(price)),
        )


def extreme_product(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The cheapest or the dearest product of a category."""
    for category in db.execute("SELECT * FROM category ORDER BY id").fetchall():
        rows = db.execute(
            "SELECT name, price_cents FROM product WHERE category_id = ? ORDER BY price_cents",
            (category["id"],),
        ).fetchall()
        for word, order, found in (
            ("cheapest", "Price: low to high", rows[0]),
            ("most expensive", "Price: high to low", rows[-1]),
        ):
            answer = f"{found['name']}, {money(found['price_cents'])}"
            yield Draft(
                intent=f"Name the {word} product of the category {category['name']} and its price.",
                check=says_all([found["name"], money(found["price_cents"])]),
                path=(link(category["name"]), link(order), stop(answer)),
            )


def order_total(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The status and sum of one of the shopper's orders."""
    for row in db.execute(OWN_ORDERS, (SHOPPER_ID,)).fetchall():
        total = money(row["total_cents"])
        yield Draft(
            intent=f"What are the status and the total of my order {row['number']}?",
            check=says_all([row["status"], total]),
            path=(link("My Orders"), stop(f"{row['status']}, {total}")),
        )


def spent_in_month(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """What the shopper spent in a range of months."""
    orders = db.execute(OWN_ORDERS, (SHOPPER_ID,)).fetchall()
    for first in range(1, 13):
        for last in range(first, min(first + 3, 13)):
            months = {f"2023-{month:02d}" for month in range(first, last + 1)}
            rows = [o for o in orders if o["created"][:7] in months and o["status"] != "Canceled"]
            if not 1 <= len(rows) <= 4:
                continue
            total = money(sum(row["total_cents"] for row in rows))
            span = (
                f"from 2023-{first:02d} to 2023-{last:02d}"
                if last > first
                else f"in 2023-{first:02d}"
            )
            yield Draft(
                intent=f"How much did I spend {span} in all, shipping included and canceled "
                "orders left out? Answer with the amount, such as $12.50.",
                check=says(total),
                path=(link("My Orders"), stop(total)),
            )


def order_of_product(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """What was paid for a product on a given day."""
    rows = db.execute(
        "SELECT product.name, line.quantity, line.price_cents, purchase.number, purchase.address"
        " FROM purchase JOIN purchase_line AS line ON line.purchase_id = purchase.id"
        " JOIN product ON product.id = line.product_id WHERE purchase.customer_id = ?"
        " ORDER BY purchase.id, product.id",
        (SHOPPER_ID,),
    ).fetchall()
    for row in some(random, rows):
        number = str(row["quantity"])
        yield Draft(
            intent=f"How many pieces of {row['name']} did I buy with order {row['number']}? "
            "Answer with the number only.",
            check=says(number),
            path=(link("My Orders"), link(f"Order {row['number']}"), stop(number)),
        )


def unhappy_reviewers(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Who rated a product low."""
    rows = db.execute(
        "SELECT product.id, product.name FROM product JOIN review ON product_id = product.id"
        " AND review.status = 'Approved' GROUP BY product.id"
        " HAVING sum(rating <= 2) BETWEEN 1 AND 3 ORDER BY product.id"
    ).fetchall()
    for row in some(random, rows):
        names = [
            review["nickname"]
            for review in db.execute(
                "SELECT DISTINCT nickname FROM review WHERE product_id = ? AND rating <= 2"
                " AND status = 'Approved' ORDER BY nickname",
                (row["id"],),
            )
        ]
        yield Draft(
            intent=f"Which reviewers gave the {row['name']} one or two stars? List their names.",
            check=says_all(names),
            path=(*to_product(row["name"]), stop(", ".join(names))),
        )


def sorted_category(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A category in a given order."""
    for row in db.execute("SELECT * FROM category ORDER BY id").fetchall():
        for word, label, key in (
            ("from the cheapest to the dearest", "Price: low to high", "price-asc"),
            ("from the dearest to the cheapest", "Price: high to low", "price-desc"),
            ("with the best rated first", "Top rated", "rating"),
        ):
            yield Draft(
                intent=f"Show me the products of the category {row['name']} {word}.",
                check=ends_at(f"{HOST}/category/{row['slug']}.html?sort={key}"),
                path=(link(row["name"]), link(label), stop()),
            )


def page_of_ordered(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """The page of the only product of an order."""
    rows = db.execute(
        "SELECT purchase.number, min(product.name) AS name, min(product.slug) AS slug"
        " FROM purchase JOIN purchase_line AS line ON line.purchase_id = purchase.id"
        " JOIN product ON product.id = line.product_id WHERE purchase.customer_id = ?"
        " GROUP BY purchase.id HAVING count(*) = 1 ORDER BY purchase.id",
        (SHOPPER_ID,),
    ).fetchall()
    for row in rows:
        yield Draft(
            intent=f"Open the shop's page of the product that I bought with order {row['number']}.",
            check=ends_at(f"{HOST}/product/{row['slug']}.html"),
            path=(link("My Orders"), link(f"Order {row['number']}"), link(row["name"]), stop()),
        )


def fill_cart(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """Some pieces of a product in the cart."""
    for row in some(random, db.execute(IN_STOCK).fetchall()):
        number = str(random.randrange(2, 10))
        yield Draft(
            intent=f"Put {number} pieces of {row['name']} into my cart.",
            check=shows(f"{HOST}/cart", f"quantity-{row['slug']}", exact=number),
            path=(
                *to_product(row["name"]),
                fill("Quantity", number),
                button("Add to Cart"),
                stop(),
            ),
        )


def add_wish(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A product on the wish list."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        yield Draft(
            intent=f"Add the {row['name']} to my wish list.",
            check=shows(f"{HOST}/wishlist", "wishes", parts=[row["name"]]),
            path=(*to_product(row["name"]), button("Add to Wish List"), stop()),
        )


def write_review(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A review by the shopper."""
    for row in some(random, db.execute("SELECT * FROM product ORDER BY id").fetchall()):
        stars, title, body = random.randrange(2, 6), random.choice(PRAISE), random.choice(BODIES)
        yield Draft(
            intent=f"Write a review of the {row['name']} with {stars} stars, the title "
            f'"{title}" and the text "{body}"',
            check=shows(
                f"{HOST}/account/reviews",
                "reviews",
                parts=[f"{row['name']}: {stars} of 5 stars", title, body],
            ),
            path=(
                *to_product(row["name"]),
                link("Write a Review"),
                click("radio", f"{stars} stars"),
                fill("Title", title),
                fill("Review", body),
                button("Submit Review"),
                stop(),
            ),
        )


def new_address(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """An address in the shopper's address book."""
    for _ in range(40):
        street = f"{random.randrange(400, 900)} {random.choice(STREETS)} Avenue"
        town = ", ".join(random.choice(TOWNS))
        postcode = str(random.randrange(10000, 99999))
        yield Draft(
            intent=f"Add this address to my account: {street}, {town}, postcode {postcode}.",
            check=shows(f"{HOST}/account", "addresses", parts=[f"{street}, {town} {postcode}"]),
            path=(
                link("My Account"),
                link("Add Address"),
                fill("Street", street),
                fill("Town", town),
                fill("Postcode", postcode),
                button("Save Address"),
                stop(),
            ),
        )


def cancel_order(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A pending order canceled."""
    for row in db.execute(OWN_ORDERS, (SHOPPER_ID,)).fetchall():
        if row["status"] != "Pending":
            continue
        number = row["number"]
        yield Draft(
            intent=f"Cancel my order {number}.",
            check=shows(f"{HOST}/orders/{number}", "status", exact="Canceled"),
            path=(link("My Orders"), link(f"Order {number}"), button("Cancel Order"), stop()),
        )


def buy(db: sqlite3.Connection, random: Random) -> Iterator[Draft]:
    """A whole purchase."""
    newest = db.execute("SELECT max(CAST(number AS INTEGER)) FROM purchase").fetchone()[0]
    for row in some(random, db.execute(IN_STOCK).fetchall()):
        way = random.choice(sorted(SHIPPING_CENTS))
        label = f"{way} ({money(SHIPPING_CENTS[way])})"
        total = money(row["price_cents"] + SHIPPING_CENTS[way])
        page = f"{HOST}/orders/{newest + 1}"
        check = both(
            shows(page, "total", exact=total), shows(page, f"quantity-{row['slug']}", exact="1")
        )
        yield Draft(
            intent=f"Buy one {row['name']} with {way.lower()} shipping to my usual address.",
            check=check,
            path=(
                *to_product(row["name"]),
                button("Add to Cart"),
                link("Cart"),
                link("Proceed to Checkout"),
                click("radio", label),
                button("Place Order"),
                stop(),
            ),
        )


SHOPPING_TEMPLATES = (
    product_price,
    extreme_product,
    order_total,
    spent_in_month,
    order_of_product,
    unhappy_reviewers,
    sorted_category,
    page_of_ordered,
    fill_cart,
    add_wish,
    write_review,
    new_address,
    cancel_order,
    buy,
)
