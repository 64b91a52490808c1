"""Fills the shop's database from a seed."""

import sqlite3
from random import Random
from typing import Any

from envhub.envs.minisites.seeding import WORDS as COMMON
from envhub.envs.minisites.seeding import day_of, filling, insert, slug_of
from envhub.tables import read_table

SHOPPER_ID = 1  # Id of the customer who is signed in at the storefront.
NUM_CUSTOMERS = 40
NUM_PURCHASES = 200
NUM_SHOPPER_PURCHASES = 18
PRODUCTS_PER_CATEGORY = 9
SHIPPING_CENTS = {"Standard": 500, "Express": 1500}
WORDS: dict[str, Any] = read_table(__file__, "words.yaml")


def fill_shop(db: sqlite3.Connection, seed: int) -> None:
    """Create and fill the tables; equal seeds give equal rows."""
    with filling(db, __file__, "shop", seed) as random:
        _fill_products(db, random)
        _fill_customers(db, random)
        _fill_purchases(db, random)
        _fill_reviews(db, random)
        _fill_marketing(db, random)


def _fill_products(db: sqlite3.Connection, random: Random) -> None:
    """Add the categories and their products."""
    prices: set[int] = set()
    number = 1000
    for category, nouns in WORDS["categories"].items():
        category_id = insert(db, "category", name=category, slug=slug_of(category))
        for noun in random.sample(nouns, PRODUCTS_PER_CATEGORY):
            number += 7
            brand = random.choice(WORDS["brands"])
            colour = random.choice(WORDS["colours"])
            cents = _new_price(random, prices)
            first, second = random.sample(WORDS["benefits"], 2)
            name = f"{brand} {colour} {noun}"
            insert(
                db,
                "product",
                sku=f"{brand[:2].upper()}-{number}",
                name=name,
                slug=slug_of(name),
                category_id=category_id,
                brand=brand,
                colour=colour,
                price_cents=cents,
                stock=random.choice((0, *range(3, 180))),
                description=f"{noun} in {colour.lower()} by {brand}, {first} and {second}.",
            )


def _new_price(random: Random, taken: set[int]) -> int:
    """Return an unused price, so that the cheapest and the dearest product are unique."""
    while True:
        cents = random.choice((499, 1299, 2499, 4999, 8999, 15999)) + 50 * random.randrange(40)
        if cents not in taken:
            taken.add(cents)
            return cents


def _fill_customers(db: sqlite3.Connection, random: Random) -> None:
    """Add the customers with their addresses."""
    firsts = random.sample(COMMON["first_names"], NUM_CUSTOMERS)
    for number, first in enumerate(firsts, start=1):
        last = random.choice(COMMON["last_names"])
        home = random.choice(COMMON["towns"])
        customer_id = insert(
            db,
            "customer",
            name=f"{first} {last}",
            email=f"{first}.{last}@example.com".lower(),
            phone=f"555-{random.randrange(200, 999)}-{1000 + number * 37 + random.randrange(30)}",
            town=home["town"],
            state=home["state"],
            tier=random.choice(("General", "General", "Wholesale", "VIP")),
            joined=day_of(random, 2022),
        )
        insert(
            db,
            "address",
            customer_id=customer_id,
            street=f"{random.randrange(2, 400)} {random.choice(COMMON['streets'])} Street",
            town=f"{home['town']}, {home['state']}",
            postcode=f"{random.randrange(10000, 99999)}",
        )


def _fill_purchases(db: sqlite3.Connection, random: Random) -> None:
    """Add the orders of the customers."""
    others = NUM_PURCHASES - NUM_SHOPPER_PURCHASES
    customers = [random.randrange(2, NUM_CUSTOMERS + 1) for _ in range(others)]
    customers += [SHOPPER_ID] * NUM_SHOPPER_PURCHASES
    random.shuffle(customers)
    dates = sorted(day_of(random, 2023) for _ in customers)
    prices = dict(db.execute("SELECT id, price_cents FROM product").fetchall())
    addresses = dict(
        db.execute("SELECT customer_id, street || ', ' || town || ' ' || postcode FROM address")
    )
    for index, (customer_id, created) in enumerate(zip(customers, dates, strict=True), start=1):
        number = f"{100000 + index * 3}"
        shipping = random.choice(("Standard", "Standard", "Express"))
        status = _status(random, is_recent=index > NUM_PURCHASES - 60)
        purchase_id = insert(
            db,
            "purchase",
            number=number,
            customer_id=customer_id,
            created=created,
            status=status,
            shipping=shipping,
            shipping_cents=SHIPPING_CENTS[shipping],
            address=addresses[customer_id],
        )
        for product_id in sorted(random.sample(sorted(prices), random.randrange(1, 4))):
            insert(
                db,
                "purchase_line",
                purchase_id=purchase_id,
                product_id=product_id,
                quantity=random.choice((1, 1, 1, 2, 3)),
                price_cents=prices[product_id],
            )


def _status(random: Random, is_recent: bool) -> str:
    """Return a random status of an order."""
    if is_recent:
        return random.choice(("Pending", "Pending", "Processing", "On Hold", "Complete"))
    return random.choice(("Complete",) * 6 + ("Canceled",))


def _fill_reviews(db: sqlite3.Connection, random: Random) -> None:
    """Add the reviews of the products."""
    names = dict(db.execute("SELECT id, name FROM customer").fetchall())
    num_products = PRODUCTS_PER_CATEGORY * len(WORDS["categories"])
    for product_id in range(1, num_products + 1):
        writers = random.sample(range(2, NUM_CUSTOMERS + 1), random.randrange(2, 7))
        for customer_id in writers:
            rating = random.choice((1, 2, 3, 4, 4, 5, 5, 5))
            mood = "blame" if rating < 3 else "doubt" if rating == 3 else "praise"
            status = random.choice(("Approved",) * 6 + ("Pending", "Rejected"))
            first, last = names[customer_id].split()
            insert(
                db,
                "review",
                product_id=product_id,
                customer_id=customer_id,
                nickname=f"{first} {last[0]}.",
                rating=rating,
                title=random.choice(WORDS[mood]),
                body=" ".join(random.sample(WORDS["bodies"], 2)),
                status=status,
                created=day_of(random, 2023),
            )


def _fill_marketing(db: sqlite3.Connection, random: Random) -> None:
    """Add the search terms and the coupons."""
    nouns = [noun.lower() for listed in WORDS["categories"].values() for noun in listed]
    uses = random.sample(range(5, 900), 30)
    for term, num_uses in zip(random.sample(nouns, 30), uses, strict=True):
        num_results = random.randrange(0, 20)
        insert(db, "search_term", term=term, num_results=num_results, num_uses=num_uses)
    for word in random.sample(("SPRING", "SUMMER", "AUTUMN", "WINTER", "HELLO", "AGAIN"), 4):
        percent = random.choice((5, 10, 15, 20, 25))
        num_uses = random.randrange(0, 300)
        insert(db, "coupon", code=f"{word}{percent}", percent=percent, num_uses=num_uses)
