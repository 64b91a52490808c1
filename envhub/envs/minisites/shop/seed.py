"""Fills the shop's database from a seed."""

import sqlite3
from random import Random

from envhub.envs.minisites.shop.schema import SCHEMA
from envhub.envs.minisites.words import FIRST_NAMES, LAST_NAMES, STREETS, TOWNS

SHOPPER_ID = 1  # who is signed in at the storefront
TODAY = "2024-01-15"
NUM_CUSTOMERS = 40
NUM_PURCHASES = 200
NUM_SHOPPER_PURCHASES = 18
PRODUCTS_PER_CATEGORY = 9
SHIPPING_CENTS = {"Standard": 500, "Express": 1500}

CATEGORIES = {
    "Kitchen": "Kettle|Skillet|Toaster|Cutting Board|Pepper Mill|Salad Bowl|Measuring Cup|"
    "French Press|Stock Pot|Bread Knife|Mixing Bowl",
    "Office": "Desk Lamp|Stapler|Notebook|Fountain Pen|Paper Tray|Desk Organizer|Wall Calendar|"
    "Footrest|Whiteboard|Document Shredder|Pencil Case",
    "Garden": "Watering Can|Trowel|Pruning Shears|Bird Feeder|Garden Hose|Planter|Wheelbarrow|"
    "Leaf Rake|Hedge Trimmer|Rain Gauge|Compost Bin",
    "Sports": "Yoga Mat|Jump Rope|Dumbbell Set|Water Bottle|Tennis Racket|Running Belt|"
    "Swim Goggles|Bike Helmet|Foam Roller|Climbing Harness|Skipping Rope",
    "Electronics": "Bluetooth Speaker|Headphones|Phone Charger|Webcam|Keyboard|Computer Mouse|"
    "Alarm Clock|Power Bank|USB Hub|Microphone|Card Reader",
    "Clothing": "Rain Jacket|Wool Scarf|Baseball Cap|Leather Belt|Hiking Socks|Cardigan|"
    "Fleece Vest|Winter Gloves|Canvas Sneakers|Sun Hat|Tote Bag",
    "Toys": "Wooden Train|Puzzle|Kite|Board Game|Stuffed Bear|Building Blocks|Marble Run|"
    "Doll House|Spinning Top|Card Game|Toy Drum",
    "Bath": "Bath Towel|Soap Dish|Shower Curtain|Toothbrush Holder|Bath Mat|Hand Mirror|"
    "Laundry Basket|Robe|Sponge Set|Hair Dryer|Shower Caddy",
}
BRANDS = ("Arlo", "Brindle", "Corvo", "Dunlin", "Evergrove", "Finch", "Gantry", "Holloway")
COLOURS = ("Amber", "Black", "Coral", "Green", "Ivory", "Navy", "Olive", "Plum", "Silver", "White")
BENEFITS = (
    "made to last for years",
    "easy to clean",
    "light enough to carry everywhere",
    "tested by our own staff",
    "packed without plastic",
    "delivered with spare parts",
)
PRAISE = ("Love it", "Great value", "Exactly as described", "Would buy again", "Works perfectly")
DOUBT = ("It is fine", "Average", "Does the job", "Not bad, not great")
BLAME = ("Disappointed", "Broke after a week", "Not as pictured", "Poor quality", "Sent it back")
BODIES = (
    "I use it nearly every day.",
    "My sister picked it for me.",
    "The parcel came two days late.",
    "It feels sturdy in the hand.",
    "The colour is darker than in the photo.",
    "It was a present for a friend.",
    "I compared four of them before ordering.",
    "Customer service answered within an hour.",
)


def slug_of(name: str) -> str:
    """Returns a name as it stands in addresses."""
    return "-".join(name.lower().replace("&", "and").split())


def fill_shop(db: sqlite3.Connection, seed: int) -> None:
    """Creates the tables and everything in them; equal seeds give equal rows."""
    random = Random(f"shop-{seed}")
    db.executescript("BEGIN;" + SCHEMA)
    _fill_products(db, random)
    _fill_customers(db, random)
    _fill_purchases(db, random)
    _fill_reviews(db, random)
    _fill_marketing(db, random)
    db.execute("COMMIT")


def _fill_products(db: sqlite3.Connection, random: Random) -> None:
    prices: set[int] = set()
    product_id = 0
    for category_id, (category, listed) in enumerate(CATEGORIES.items(), start=1):
        db.execute(
            "INSERT INTO category VALUES (?, ?, ?)", (category_id, category, slug_of(category))
        )
        for noun in random.sample(listed.split("|"), PRODUCTS_PER_CATEGORY):
            product_id += 1
            brand, colour = random.choice(BRANDS), random.choice(COLOURS)
            name = f"{brand} {colour} {noun}"
            cents = _new_price(random, prices)
            first, second = random.sample(BENEFITS, 2)
            text = f"{noun} in {colour.lower()} by {brand}, {first} and {second}."
            sku = f"{brand[:2].upper()}-{1000 + product_id * 7}"
            row = (product_id, sku, name, slug_of(name), category_id, brand, colour, cents)
            stock = random.choice((0, *range(3, 180)))
            db.execute(
                "INSERT INTO product VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)", (*row, stock, text)
            )


def _new_price(random: Random, taken: set[int]) -> int:
    """Returns a price that no product has yet: the cheapest and dearest are one product each."""
    while True:
        cents = random.choice((499, 1299, 2499, 4999, 8999, 15999)) + 50 * random.randrange(40)
        if cents not in taken:
            taken.add(cents)
            return cents


def _fill_customers(db: sqlite3.Connection, random: Random) -> None:
    firsts = random.sample(FIRST_NAMES, NUM_CUSTOMERS)
    for customer_id, first in enumerate(firsts, start=1):
        last = random.choice(LAST_NAMES)
        town, state = random.choice(TOWNS)
        email = f"{first}.{last}@example.com".lower()
        phone = f"555-{random.randrange(200, 999)}-{1000 + customer_id * 37 + random.randrange(30)}"
        tier = random.choice(("General", "General", "Wholesale", "VIP"))
        joined = _day(random, 2022)
        row = (customer_id, f"{first} {last}", email, phone, town, state, tier, joined)
        db.execute("INSERT INTO customer VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        street = f"{random.randrange(2, 400)} {random.choice(STREETS)} Street"
        db.execute(
            "INSERT INTO address (customer_id, street, town, postcode) VALUES (?, ?, ?, ?)",
            (customer_id, street, f"{town}, {state}", f"{random.randrange(10000, 99999)}"),
        )


def _day(random: Random, year: int) -> str:
    return f"{year}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}"


def _fill_purchases(db: sqlite3.Connection, random: Random) -> None:
    others = NUM_PURCHASES - NUM_SHOPPER_PURCHASES
    customers = [random.randrange(2, NUM_CUSTOMERS + 1) for _ in range(others)]
    customers += [SHOPPER_ID] * NUM_SHOPPER_PURCHASES
    random.shuffle(customers)
    dates = sorted(_day(random, 2023) for _ in customers)
    prices = dict(db.execute("SELECT id, price_cents FROM product").fetchall())
    addresses = dict(
        db.execute("SELECT customer_id, street || ', ' || town || ' ' || postcode FROM address")
    )
    for index, (customer_id, created) in enumerate(zip(customers, dates, strict=True), start=1):
        number = f"{100000 + index * 3}"
        shipping = random.choice(("Standard", "Standard", "Express"))
        status = _status(random, is_recent=index > NUM_PURCHASES - 60)
        row = (index, number, customer_id, created, status, shipping, SHIPPING_CENTS[shipping])
        db.execute(
            "INSERT INTO purchase VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, addresses[customer_id])
        )
        for product_id in sorted(random.sample(sorted(prices), random.randrange(1, 4))):
            quantity = random.choice((1, 1, 1, 2, 3))
            db.execute(
                "INSERT INTO purchase_line VALUES (?, ?, ?, ?)",
                (index, product_id, quantity, prices[product_id]),
            )


def _status(random: Random, is_recent: bool) -> str:
    if is_recent:
        return random.choice(("Pending", "Pending", "Processing", "On Hold", "Complete"))
    return random.choice(("Complete",) * 6 + ("Canceled",))


def _fill_reviews(db: sqlite3.Connection, random: Random) -> None:
    names = dict(db.execute("SELECT id, name FROM customer").fetchall())
    num_products = PRODUCTS_PER_CATEGORY * len(CATEGORIES)
    for product_id in range(1, num_products + 1):
        writers = random.sample(range(2, NUM_CUSTOMERS + 1), random.randrange(2, 7))
        for customer_id in writers:
            rating = random.choice((1, 2, 3, 4, 4, 5, 5, 5))
            titles = BLAME if rating < 3 else DOUBT if rating == 3 else PRAISE
            status = random.choice(("Approved",) * 6 + ("Pending", "Rejected"))
            first, last = names[customer_id].split()
            db.execute(
                "INSERT INTO review (product_id, customer_id, nickname, rating, title, body,"
                " status, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(product_id, customer_id, f"{first} {last[0]}.", rating),
                    *(random.choice(titles), " ".join(random.sample(BODIES, 2))),
                    *(status, _day(random, 2023)),
                ),
            )


def _fill_marketing(db: sqlite3.Connection, random: Random) -> None:
    nouns = [noun.lower() for listed in CATEGORIES.values() for noun in listed.split("|")]
    uses = random.sample(range(5, 900), 30)
    for term, num_uses in zip(random.sample(nouns, 30), uses, strict=True):
        db.execute(
            "INSERT INTO search_term (term, num_results, num_uses) VALUES (?, ?, ?)",
            (term, random.randrange(0, 20), num_uses),
        )
    for word in random.sample(("SPRING", "SUMMER", "AUTUMN", "WINTER", "HELLO", "AGAIN"), 4):
        percent = random.choice((5, 10, 15, 20, 25))
        row = (f"{word}{percent}", percent, random.randrange(0, 300))
        db.execute("INSERT INTO coupon VALUES (?, ?, ?, 1)", row)
