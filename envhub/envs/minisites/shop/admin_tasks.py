"""Task templates of the shop's administration."""

from collections.abc import Iterator
from urllib.parse import quote_plus

from envhub.envs.minisites.drafts import (
    SiteTemplates,
    Step,
    TaskDraft,
    TaskWorld,
    button,
    ends_at,
    fill,
    holds,
    link,
    radio,
    reads,
    says,
    says_all,
    seek,
    shows,
    stop,
)
from envhub.envs.minisites.shop.seed import WORDS
from envhub.envs.minisites.site import money

HOST = "http://cms.test"
SALES = "SELECT * FROM sales ORDER BY month"
BESTSELLERS = (
    "SELECT name, sku, sum(quantity) AS sold, sum(cents) AS earned FROM sold_line WHERE "
    "created LIKE :month || '%' GROUP BY product_id ORDER BY sold DESC, earned DESC, name "
    "LIMIT 10"
)
PRODUCTS = "SELECT * FROM product ORDER BY id"
CUSTOMERS = "SELECT * FROM customer ORDER BY id"
BUYERS = (
    "SELECT purchase.id AS purchase_id, number, name, email, customer.id AS customer_id FROM "
    "purchase JOIN customer ON customer.id = customer_id"
)
PENDING = (
    "SELECT review.id AS review_id, nickname, product.id AS product_id, product.name AS "
    "product FROM review JOIN product ON product.id = product_id WHERE status = 'Pending'"
)
TASKS = SiteTemplates(host=HOST, site="shopping_admin", database="shop")


def to_order(number: str) -> tuple[Step, ...]:
    """Return the steps to the page of an order."""
    return (link("Orders"), seek("Search orders", number), link(f"Order {number}"))


def to_product(name: str) -> tuple[Step, ...]:
    """Return the steps to the page of a product."""
    return (link("Products"), seek("Search products", name), link(name))


def to_customer(name: str) -> tuple[Step, ...]:
    """Return the steps to the page of a customer."""
    return (link("Customers"), seek("Search customers", name), link(name))


def to_pending(product: str) -> tuple[Step, ...]:
    """Return the steps to the pending reviews of a product."""
    return (link("Reviews"), link("Pending"), seek("Search reviews", product))


@TASKS.template
def bestseller(world: TaskWorld) -> Iterator[TaskDraft]:
    for month in world.rows(f"SELECT month FROM ({SALES})"):
        best, *others = world.rows(BESTSELLERS, month)
        if others and others[0].sold < best.sold:
            yield TaskDraft(
                f"Which product sold best in {month.month}, and how many pieces of it were sold?",
                says_all(best.name, best.sold),
                [
                    *(link("Reports"), link("Bestsellers"), link(month.month)),
                    stop(f"{best.name}, {best.sold} pieces"),
                ],
            )


@TASKS.template
def month_sales(world: TaskWorld) -> Iterator[TaskDraft]:
    for month in world.rows(SALES):
        for words, answer, form in (
            ("How many orders were placed", month.num_orders, "number"),
            ("How many of the orders were canceled that were placed", month.num_canceled, "number"),
            ("What were the total sales", money(month.total_cents), "amount as printed"),
        ):
            yield TaskDraft(
                f"{words} in {month.month}? Answer with the {form} only.",
                says(answer),
                [link("Reports"), link("Sales"), stop(answer)],
            )


@TASKS.template
def customer_of_order(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.some(40, f"SELECT * FROM ({BUYERS}) ORDER BY purchase_id"):
        yield TaskDraft(
            f"Give the name and the email address of the customer of order {order.number}.",
            says_all(order.name, order.email),
            [*to_order(order.number), stop(f"{order.name}, {order.email}")],
        )


@TASKS.template
def customer_phone(world: TaskWorld) -> Iterator[TaskDraft]:
    for customer in world.some(40, CUSTOMERS):
        yield TaskDraft(
            f"What is {customer.name}'s phone number? Answer with the number only.",
            says(customer.phone),
            [*to_customer(customer.name), stop(customer.phone)],
        )


@TASKS.template
def product_stock(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        yield TaskDraft(
            f"How many pieces of the product with SKU {product.sku} are in stock? Answer with "
            "the number only.",
            says(product.stock),
            [link("Products"), seek("Search products", product.sku), stop(product.stock)],
        )


@TASKS.template
def waiting_reviews(world: TaskWorld) -> Iterator[TaskDraft]:
    for review in world.some(
        40, f"SELECT DISTINCT product_id, product FROM ({PENDING}) ORDER BY product_id"
    ):
        people = world.column(
            f"SELECT nickname FROM ({PENDING}) WHERE product_id = :product_id ORDER BY nickname",
            review,
        )
        yield TaskDraft(
            f"Whose reviews of the {review.product} are pending? List all nicknames.",
            says_all(*people),
            [*to_pending(review.product), stop(", ".join(people))],
        )


@TASKS.template
def orders_by_status(world: TaskWorld) -> Iterator[TaskDraft]:
    for status in WORDS["tasks"]["states"]:
        yield TaskDraft(
            f'Show me all orders with the status "{status}".',
            ends_at(f"{HOST}/orders?status={quote_plus(status)}"),
            [link("Orders"), link(status), stop()],
        )
    for month in world.rows(f"SELECT month FROM ({SALES})"):
        yield TaskDraft(
            f"Show me the report of the bestsellers of {month.month}.",
            ends_at(f"{HOST}/reports/bestsellers?month={month.month}"),
            [link("Reports"), link("Bestsellers"), link(month.month), stop()],
        )


@TASKS.template
def open_customer(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.some(40, f"SELECT * FROM ({BUYERS}) ORDER BY purchase_id"):
        # Paths match by inclusion: the path of customer 1 is also a part of that of customer 11.
        if order.customer_id >= 10:
            yield TaskDraft(
                f"Open the customer page of whoever placed order {order.number}.",
                ends_at(f"{HOST}/customers/{order.customer_id}"),
                [*to_order(order.number), link(order.name), stop()],
            )


@TASKS.template
def set_price(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        change = world.random.choice(WORDS["tasks"]["changes"])
        cents = product.price_cents + change
        yield TaskDraft(
            f"Change the price of the {product.name} to {money(cents)}.",
            reads(f"{HOST}/products/{product.id}", "price", money(cents)),
            [
                *to_product(product.name),
                fill("Price", f"{cents / 100:.2f}"),
                button("Save Product"),
                stop(),
            ],
        )


@TASKS.template
def disable_product(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        yield TaskDraft(
            f"Disable the product {product.name}, so that the shop no longer offers it.",
            reads(f"{HOST}/products/{product.id}", "status", "Disabled"),
            [*to_product(product.name), radio("Disabled"), button("Save Product"), stop()],
        )


@TASKS.template
def moderate_review(world: TaskWorld) -> Iterator[TaskDraft]:
    for review in world.some(40, f"SELECT * FROM ({PENDING}) ORDER BY review_id"):
        verb, state = world.random.choice(WORDS["tasks"]["verdicts"])
        yield TaskDraft(
            f"{verb} the pending review of the {review.product} by {review.nickname}",
            reads(f"{HOST}/reviews/{review.review_id}", "status", state),
            [
                *to_pending(review.product),
                link(f"Review {review.review_id}"),
                button(f"{verb} Review"),
                stop(),
            ],
        )


@TASKS.template
def move_order(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.some(
        40,
        "SELECT * FROM purchase WHERE status IN ('Pending', 'Processing', 'On Hold') ORDER BY id",
    ):
        words, label, state = world.random.choice(WORDS["tasks"]["moves"])
        yield TaskDraft(
            words.format(number=order.number),
            reads(f"{HOST}/orders/{order.number}", "status", state),
            [*to_order(order.number), button(label), stop()],
        )


@TASKS.template
def comment_order(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.some(40, "SELECT number FROM purchase ORDER BY id"):
        note = world.random.choice(WORDS["tasks"]["notes"])
        yield TaskDraft(
            f'Add this comment to order {order.number}: "{note}"',
            holds(f"{HOST}/orders/{order.number}", "notes", note),
            [*to_order(order.number), fill("New comment", note), button("Add Comment"), stop()],
        )


@TASKS.template
def new_coupon(world: TaskWorld) -> Iterator[TaskDraft]:
    for _ in range(30):
        percent = world.random.randrange(5, 60)
        word = world.random.choice(WORDS["tasks"]["coupon_words"])
        yield TaskDraft(
            f"Create the coupon {word}{percent}, which takes {percent} percent off.",
            holds(f"{HOST}/coupons", "coupons", f"{word}{percent}: {percent} percent off"),
            [
                link("Coupons"),
                link("New Coupon"),
                fill("Code", f"{word}{percent}"),
                fill("Percent off", percent),
                button("Save Coupon"),
                stop(),
            ],
        )


@TASKS.template
def promote_customer(world: TaskWorld) -> Iterator[TaskDraft]:
    for customer in world.some(40, CUSTOMERS):
        others = [tier for tier in ("General", "Wholesale", "VIP") if tier != customer.tier]
        other = world.random.choice(others)
        page = f"{HOST}/customers/{customer.id}"
        yield TaskDraft(
            f"Move the customer {customer.name} to the group {other}.",
            shows(reads(page, "tier", other), reads(page, "phone", customer.phone)),
            [*to_customer(customer.name), radio(other), button("Save Customer"), stop()],
        )
