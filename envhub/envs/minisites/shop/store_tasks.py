"""Task templates of the storefront."""

from collections.abc import Iterator

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
from envhub.envs.minisites.seeding import WORDS as COMMON
from envhub.envs.minisites.shop.seed import WORDS
from envhub.envs.minisites.site import money

HOST = "http://shopping.test"
PRODUCTS = "SELECT * FROM product ORDER BY id"
IN_STOCK = "SELECT * FROM product WHERE stock > 0 ORDER BY id"
OWN_ORDERS = (
    "SELECT purchase.*, total_cents, num_units FROM purchase JOIN purchase_total ON "
    "purchase_total.purchase_id = purchase.id WHERE customer_id = 1 ORDER BY created DESC, "
    "number DESC"
)
OWN_LINES = (
    "SELECT purchase.id AS purchase_id, purchase.number, product.id AS product_id, "
    "product.name, product.slug, line.quantity FROM purchase JOIN purchase_line AS line ON "
    "line.purchase_id = purchase.id JOIN product ON product.id = line.product_id WHERE "
    "purchase.customer_id = 1"
)
TASKS = SiteTemplates(host=HOST, site="shopping", database="shop")


def to_product(name: str) -> tuple[Step, ...]:
    """Return the steps to the page of a product."""
    return (seek("Search products", name), link(name))


def to_order(number: str) -> tuple[Step, ...]:
    """Return the steps to the page of an order."""
    return (link("My Orders"), link(f"Order {number}"))


@TASKS.template
def product_price(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        yield TaskDraft(
            f"What does the {product.name} cost? Answer with the printed price.",
            says(money(product.price_cents)),
            [*to_product(product.name), stop(money(product.price_cents))],
        )


@TASKS.template
def extreme_product(world: TaskWorld) -> Iterator[TaskDraft]:
    for category in world.rows(
        "SELECT id AS category_id, name AS category FROM category ORDER BY id"
    ):
        for word, order, direction in (
            ("cheapest", "Price: low to high", "ASC"),
            ("most expensive", "Price: high to low", "DESC"),
        ):
            product = world.first(
                "SELECT name, price_cents FROM product WHERE category_id = :category_id ORDER BY "
                f"price_cents {direction}",
                category,
            )
            yield TaskDraft(
                f"Name the {word} product of the category {category.category} and its price.",
                says_all(product.name, money(product.price_cents)),
                [
                    link(category.category),
                    link(order),
                    stop(f"{product.name}, {money(product.price_cents)}"),
                ],
            )


@TASKS.template
def order_total(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.rows(OWN_ORDERS):
        yield TaskDraft(
            f"What are the status and the total of my order {order.number}?",
            says_all(order.status, money(order.total_cents)),
            [link("My Orders"), stop(f"{order.status}, {money(order.total_cents)}")],
        )


@TASKS.template
def spent_in_month(world: TaskWorld) -> Iterator[TaskDraft]:
    months = [f"2023-{number:02d}" for number in range(1, 13)]
    for index, first in enumerate(months):
        for last in months[index : index + 3]:
            totals = world.column(
                f"SELECT total_cents FROM ({OWN_ORDERS}) WHERE substr(created, 1, 7) "
                "BETWEEN :first AND :last AND status <> 'Canceled'",
                first=first,
                last=last,
            )
            if 1 <= len(totals) <= 4:
                span = f"from {first} to {last}" if first < last else f"in {first}"
                yield TaskDraft(
                    f"How much did I spend {span} in all, shipping included and canceled orders "
                    "left out? Answer with the amount, such as $12.50.",
                    says(money(sum(totals))),
                    [link("My Orders"), stop(money(sum(totals)))],
                )


@TASKS.template
def order_of_product(world: TaskWorld) -> Iterator[TaskDraft]:
    for line in world.some(40, f"SELECT * FROM ({OWN_LINES}) ORDER BY purchase_id, product_id"):
        yield TaskDraft(
            f"How many pieces of {line.name} did I buy with order {line.number}? Answer with "
            "the number only.",
            says(line.quantity),
            [*to_order(line.number), stop(line.quantity)],
        )


@TASKS.template
def unhappy_reviewers(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(
        40,
        "SELECT product.id, product.name FROM product JOIN review ON product_id = "
        "product.id AND review.status = 'Approved' GROUP BY product.id HAVING sum(rating "
        "<= 2) BETWEEN 1 AND 3 ORDER BY product.id",
    ):
        people = world.column(
            "SELECT DISTINCT nickname FROM review WHERE product_id = :id AND rating <= 2 AND "
            "status = 'Approved' ORDER BY nickname",
            product,
        )
        yield TaskDraft(
            f"Which reviewers gave the {product.name} one or two stars? List their names.",
            says_all(*people),
            [*to_product(product.name), stop(", ".join(people))],
        )


@TASKS.template
def sorted_category(world: TaskWorld) -> Iterator[TaskDraft]:
    for category in world.rows("SELECT * FROM category ORDER BY id"):
        for word, label, key in (
            ("from the cheapest to the dearest", "Price: low to high", "price-asc"),
            ("from the dearest to the cheapest", "Price: high to low", "price-desc"),
            ("with the best rated first", "Top rated", "rating"),
        ):
            yield TaskDraft(
                f"Show me the products of the category {category.name} {word}.",
                ends_at(f"{HOST}/category/{category.slug}.html?sort={key}"),
                [link(category.name), link(label), stop()],
            )


@TASKS.template
def page_of_ordered(world: TaskWorld) -> Iterator[TaskDraft]:
    for line in world.rows(
        f"SELECT number, min(name) AS name, min(slug) AS slug FROM ({OWN_LINES}) GROUP BY "
        "purchase_id HAVING count(*) = 1 ORDER BY purchase_id"
    ):
        yield TaskDraft(
            f"Open the shop's page of the product that I bought with order {line.number}.",
            ends_at(f"{HOST}/product/{line.slug}.html"),
            [*to_order(line.number), link(line.name), stop()],
        )


@TASKS.template
def fill_cart(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, IN_STOCK):
        number = world.random.randrange(2, 10)
        yield TaskDraft(
            f"Put {number} pieces of {product.name} into my cart.",
            reads(f"{HOST}/cart", f"quantity-{product.slug}", number),
            [*to_product(product.name), fill("Quantity", number), button("Add to Cart"), stop()],
        )


@TASKS.template
def add_wish(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        yield TaskDraft(
            f"Add the {product.name} to my wish list.",
            holds(f"{HOST}/wishlist", "wishes", product.name),
            [*to_product(product.name), button("Add to Wish List"), stop()],
        )


@TASKS.template
def write_review(world: TaskWorld) -> Iterator[TaskDraft]:
    for product in world.some(40, PRODUCTS):
        stars = world.random.randrange(2, 6)
        title = world.random.choice(WORDS["praise"])
        body = world.random.choice(WORDS["bodies"])
        yield TaskDraft(
            f'Write a review of the {product.name} with {stars} stars, the title "{title}" '
            f'and the text "{body}"',
            holds(
                f"{HOST}/account/reviews",
                "reviews",
                f"{product.name}: {stars} of 5 stars",
                title,
                body,
            ),
            [
                *to_product(product.name),
                link("Write a Review"),
                radio(f"{stars} stars"),
                fill("Title", title),
                fill("Review", body),
                button("Submit Review"),
                stop(),
            ],
        )


@TASKS.template
def new_address(world: TaskWorld) -> Iterator[TaskDraft]:
    for _ in range(40):
        house = world.random.randrange(400, 900)
        street = world.random.choice(COMMON["streets"])
        place = world.random.choice(COMMON["towns"])
        postcode = world.random.randrange(10000, 99999)
        line = f"{house} {street} Avenue"
        yield TaskDraft(
            f"Add this address to my account: {line}, {place['town']}, {place['state']}, "
            f"postcode {postcode}.",
            holds(
                f"{HOST}/account",
                "addresses",
                f"{line}, {place['town']}, {place['state']} {postcode}",
            ),
            [
                link("My Account"),
                link("Add Address"),
                fill("Street", line),
                fill("Town", f"{place['town']}, {place['state']}"),
                fill("Postcode", postcode),
                button("Save Address"),
                stop(),
            ],
        )


@TASKS.template
def cancel_order(world: TaskWorld) -> Iterator[TaskDraft]:
    for order in world.rows(
        f"SELECT * FROM ({OWN_ORDERS}) WHERE status = 'Pending' ORDER BY created DESC, number DESC"
    ):
        yield TaskDraft(
            f"Cancel my order {order.number}.",
            reads(f"{HOST}/orders/{order.number}", "status", "Canceled"),
            [*to_order(order.number), button("Cancel Order"), stop()],
        )


@TASKS.template
def buy(world: TaskWorld) -> Iterator[TaskDraft]:
    number = world.value("SELECT max(CAST(number AS INTEGER)) + 1 AS number FROM purchase")
    for product in world.some(40, IN_STOCK):
        way, cents = world.random.choice(WORDS["tasks"]["shipping"])
        total = world.value("SELECT :price_cents + :cents AS total", product, cents=cents)
        page = f"{HOST}/orders/{number}"
        yield TaskDraft(
            f"Buy one {product.name} with {way.lower()} shipping to my usual address.",
            shows(reads(page, "total", money(total)), reads(page, f"quantity-{product.slug}", "1")),
            [
                *to_product(product.name),
                button("Add to Cart"),
                link("Cart"),
                link("Proceed to Checkout"),
                radio(f"{way} ({money(cents)})"),
                button("Place Order"),
                stop(),
            ],
        )
