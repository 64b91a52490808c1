"""Pages of the storefront, shopping.test."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.shop.seed import SHIPPING_CENTS, SHOPPER_ID
from envhub.envs.minisites.site import PageMissing, Site, Visit, literal, whole

SHOPPING = Site("shopping", database="shop")
PAGE_ROWS = 12
MAX_QUANTITY = 99
ORDERINGS = {
    "name": "product.name",
    "price-asc": "product.price_cents, product.name",
    "price-desc": "product.price_cents DESC, product.name",
    "rating": "rating DESC, num_reviews DESC, product.name",
}
PRODUCTS = """
    SELECT product.*, category.name AS category, category.slug AS category_slug,
           count(review.id) AS num_reviews, coalesce(avg(review.rating), 0) AS rating
    FROM product JOIN category ON category.id = product.category_id
    LEFT JOIN review ON review.product_id = product.id AND review.status = 'Approved'
    WHERE product.is_enabled = 1 {where} GROUP BY product.id ORDER BY {order}
"""
ORDERS = """
    SELECT purchase.*, total_cents, num_units FROM purchase
    JOIN purchase_total ON purchase_total.purchase_id = purchase.id
    WHERE purchase.customer_id = ?
"""
LINES = """
    SELECT product.*, line.quantity, line.price_cents AS paid_cents FROM purchase_line AS line
    JOIN product ON product.id = line.product_id WHERE line.purchase_id = ? ORDER BY product.name
"""


def products(visit: Visit, where: str, *args: object, order: str = "name") -> list[sqlite3.Row]:
    """Return the enabled products; `where` and the orderings are constants of this file."""
    return visit.rows(PRODUCTS.format(where=where, order=ORDERINGS[order]), *args)


def _page(visit: Visit, template: str, **values: object) -> Response:
    categories = visit.rows("SELECT name, slug FROM category ORDER BY name")
    shopper = visit.one("SELECT * FROM customer WHERE id = ?", SHOPPER_ID)
    return visit.page(template, categories=categories, shopper=shopper, **values)


def _product(visit: Visit) -> sqlite3.Row:
    found = products(visit, "AND product.slug = ?", visit.params["slug"])
    if not found:
        raise PageMissing(visit.path)
    return found[0]


def _quantity(visit: Visit) -> int:
    number = whole(visit.text("quantity"))
    return 1 if number is None else max(1, min(number, MAX_QUANTITY))


@SHOPPING.get("/")
def home(visit: Visit) -> Response:
    return _page(visit, "home.html", products=products(visit, "", order="rating")[:8])


@SHOPPING.get("/category/{slug}.html")
def category(visit: Visit) -> Response:
    found = visit.one("SELECT * FROM category WHERE slug = ?", visit.params["slug"])
    order = visit.choice("sort", tuple(ORDERINGS))
    listed = products(visit, "AND category.id = ?", found["id"], order=order)
    return _page(visit, "category.html", category=found, products=listed, order=order)


@SHOPPING.get("/search")
def search(visit: Visit) -> Response:
    words = visit.query.get("q", "")[:200].split()[:8]
    order = visit.choice("sort", tuple(ORDERINGS))
    where = " AND (product.name || ' ' || product.sku) LIKE ? ESCAPE '\\'" * len(words)
    marks = [f"%{literal(word)}%" for word in words]
    listed = products(visit, where, *marks, order=order)[:PAGE_ROWS]
    return _page(visit, "search.html", products=listed, order=order, words=" ".join(words))


@SHOPPING.get("/product/{slug}.html")
def product(visit: Visit) -> Response:
    found = _product(visit)
    reviews = visit.rows(
        "SELECT * FROM review WHERE product_id = ? AND status = 'Approved'"
        " ORDER BY created DESC, id",
        found["id"],
    )
    return _page(visit, "product.html", product=found, reviews=reviews)


@SHOPPING.post("/product/{slug}/basket")
def add_to_basket(visit: Visit) -> Response:
    found, quantity = _product(visit), _quantity(visit)
    back = f"/product/{found['slug']}.html"
    if found["stock"] == 0:
        return visit.go(back, "This product is out of stock.")
    visit.run(
        "INSERT INTO basket VALUES (?, ?) ON CONFLICT (product_id)"
        " DO UPDATE SET quantity = min(quantity + excluded.quantity, ?)",
        *(found["id"], quantity, MAX_QUANTITY),
    )
    return visit.go(back, f"You added {quantity} of {found['name']} to your cart.")


@SHOPPING.post("/product/{slug}/wish")
def add_to_wishes(visit: Visit) -> Response:
    found = _product(visit)
    visit.run("INSERT OR IGNORE INTO wish VALUES (?)", found["id"])
    return visit.go(f"/product/{found['slug']}.html", "Saved to your wish list.")


@SHOPPING.get("/product/{slug}/review")
def review_form(visit: Visit) -> Response:
    return _page(visit, "review.html", product=_product(visit))


@SHOPPING.post("/product/{slug}/review")
def add_review(visit: Visit) -> Response:
    found, rating = _product(visit), whole(visit.text("rating"))
    title, body = visit.text("title"), visit.text("body")
    if rating not in (1, 2, 3, 4, 5) or not title or not body:
        text = "A review needs a rating, a title and a text."
        return visit.go(f"/product/{found['slug']}/review", text)
    shopper = visit.one("SELECT name FROM customer WHERE id = ?", SHOPPER_ID)["name"]
    visit.insert(
        "review",
        product_id=found["id"],
        customer_id=SHOPPER_ID,
        nickname=shopper.split()[0],
        rating=rating,
        title=title,
        body=body,
        status="Pending",
        created=TODAY,
    )
    return visit.go("/account/reviews", "Thank you. Your review waits for approval.")


@SHOPPING.get("/cart")
def cart(visit: Visit) -> Response:
    lines = _basket(visit)
    total = sum(line["quantity"] * line["price_cents"] for line in lines)
    return _page(visit, "cart.html", lines=lines, total_cents=total)


def _basket(visit: Visit) -> list[sqlite3.Row]:
    return visit.rows(
        "SELECT product.*, basket.quantity FROM basket JOIN product ON product.id = product_id"
        " ORDER BY product.name"
    )


@SHOPPING.post("/cart/{product_id}/remove")
def remove_from_basket(visit: Visit) -> Response:
    visit.run("DELETE FROM basket WHERE product_id = ?", visit.number("product_id", 0))
    return visit.go("/cart", "The product was removed from your cart.")


@SHOPPING.get("/checkout")
def checkout(visit: Visit) -> Response:
    lines = _basket(visit)
    if not lines:
        return visit.go("/cart", "Your cart is empty.")
    total = sum(line["quantity"] * line["price_cents"] for line in lines)
    return _page(
        visit,
        "checkout.html",
        lines=lines,
        total_cents=total,
        addresses=_addresses(visit),
        shipping=SHIPPING_CENTS,
    )


def _addresses(visit: Visit) -> list[sqlite3.Row]:
    return visit.rows("SELECT * FROM address WHERE customer_id = ? ORDER BY id", SHOPPER_ID)


@SHOPPING.post("/checkout")
def place_order(visit: Visit) -> Response:
    lines, addresses = _basket(visit), {str(row["id"]): row for row in _addresses(visit)}
    shipping, address = visit.text("shipping"), addresses.get(visit.text("address"))
    if not lines or shipping not in SHIPPING_CENTS or address is None:
        return visit.go("/checkout", "Choose an address and a way of shipping.")
    number = str(1 + visit.one("SELECT max(CAST(number AS INTEGER)) AS n FROM purchase")["n"])
    place = f"{address['street']}, {address['town']} {address['postcode']}"
    purchase_id = visit.insert(
        "purchase",
        number=number,
        customer_id=SHOPPER_ID,
        created=TODAY,
        status="Pending",
        shipping=shipping,
        shipping_cents=SHIPPING_CENTS[shipping],
        address=place,
    )
    for line in lines:
        of_line = {"quantity": line["quantity"], "price_cents": line["price_cents"]}
        visit.insert("purchase_line", purchase_id=purchase_id, product_id=line["id"], **of_line)
    visit.run("DELETE FROM basket")
    return visit.go(f"/orders/{number}", "Thank you for your order.")


@SHOPPING.get("/orders")
def orders(visit: Visit) -> Response:
    listed = visit.rows(ORDERS + " ORDER BY created DESC, number DESC", SHOPPER_ID)
    return _page(visit, "orders.html", orders=listed)


@SHOPPING.get("/orders/{number}")
def order(visit: Visit) -> Response:
    found = visit.one(ORDERS + " AND number = ?", SHOPPER_ID, visit.params["number"])
    return _page(visit, "order.html", order=found, lines=visit.rows(LINES, found["id"]))


@SHOPPING.post("/orders/{number}/cancel")
def cancel_order(visit: Visit) -> Response:
    found = visit.one(ORDERS + " AND number = ?", SHOPPER_ID, visit.params["number"])
    if found["status"] != "Pending":
        return visit.go(f"/orders/{found['number']}", "Only a pending order can be canceled.")
    visit.run("UPDATE purchase SET status = 'Canceled' WHERE id = ?", found["id"])
    return visit.go(f"/orders/{found['number']}", "Your order was canceled.")


@SHOPPING.get("/wishlist")
def wishlist(visit: Visit) -> Response:
    listed = products(visit, "AND product.id IN (SELECT product_id FROM wish)")
    return _page(visit, "wishlist.html", products=listed)


@SHOPPING.get("/account")
def account(visit: Visit) -> Response:
    return _page(visit, "account.html", addresses=_addresses(visit))


@SHOPPING.get("/account/address")
def address_form(visit: Visit) -> Response:
    return _page(visit, "address.html")


@SHOPPING.post("/account/address")
def add_address(visit: Visit) -> Response:
    street, town, postcode = (visit.text(name) for name in ("street", "town", "postcode"))
    if not (street and town and postcode):
        return visit.go("/account/address", "An address needs a street, a town and a postcode.")
    visit.insert("address", customer_id=SHOPPER_ID, street=street, town=town, postcode=postcode)
    return visit.go("/account", "The address was added.")


@SHOPPING.get("/account/reviews")
def own_reviews(visit: Visit) -> Response:
    reviews = visit.rows(
        "SELECT review.*, product.name AS product, product.slug FROM review"
        " JOIN product ON product.id = product_id WHERE customer_id = ? ORDER BY review.id DESC",
        SHOPPER_ID,
    )
    return _page(visit, "own_reviews.html", reviews=reviews)
