"""The storefront, shopping.test: the pages of `store_pages.yaml`, search, cart and forms."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.shop.seed import SHIPPING_CENTS, SHOPPER_ID
from envhub.envs.minisites.site import Site, Visit, literal, whole

SHOPPING = Site("shopping", database="shop", table="shop/store_pages.yaml", own_id=SHOPPER_ID)
PAGE_ROWS = 12
MAX_QUANTITY = 99
BASKET = """
    SELECT product.*, basket.quantity FROM basket JOIN product ON product.id = product_id
    ORDER BY product.name
"""
ADDRESSES = "SELECT * FROM address WHERE customer_id = :own_id ORDER BY id"


def _quantity(visit: Visit) -> int:
    number = whole(visit.text("quantity"))
    return 1 if number is None else max(1, min(number, MAX_QUANTITY))


@SHOPPING.get("/search")
def search(visit: Visit) -> Response:
    words = visit.query.get("q", "")[:200].split()[:8]
    orders = SHOPPING.table["pages"]["/category/{slug}.html"]["orders"]
    fits = [f"(name || ' ' || sku) LIKE :word_{i} ESCAPE '\\'" for i in range(len(words))]
    marks = {f"word_{i}": f"%{literal(word)}%" for i, word in enumerate(words)}
    where, order = " AND ".join(["1", *fits]), orders[visit.choice("sort", tuple(orders))]
    sql = f"SELECT * FROM products WHERE {where} ORDER BY {order} LIMIT {PAGE_ROWS}"
    return visit.page("search.html", products=visit.rows(sql, **marks), words=" ".join(words))


@SHOPPING.post("/product/{slug}/basket")
def add_to_basket(visit: Visit) -> Response:
    found, quantity = visit.find("product"), _quantity(visit)
    back = f"/product/{found['slug']}.html"
    if found["stock"] == 0:
        return visit.go(back, "This product is out of stock.")
    visit.run(
        "INSERT INTO basket VALUES (:product_id, :quantity) ON CONFLICT (product_id)"
        " DO UPDATE SET quantity = min(quantity + excluded.quantity, :most)",
        quantity=quantity,
        most=MAX_QUANTITY,
    )
    return visit.go(back, f"You added {quantity} of {found['name']} to your cart.")


@SHOPPING.post("/product/{slug}/wish")
def add_to_wishes(visit: Visit) -> Response:
    found = visit.find("product")
    visit.run("INSERT OR IGNORE INTO wish VALUES (:product_id)")
    return visit.go(f"/product/{found['slug']}.html", "Saved to your wish list.")


@SHOPPING.post("/product/{slug}/review")
def add_review(visit: Visit) -> Response:
    found, rating = visit.find("product"), whole(visit.text("rating"))
    title, body = visit.text("title"), visit.text("body")
    if rating not in (1, 2, 3, 4, 5) or not title or not body:
        text = "A review needs a rating, a title and a text."
        return visit.go(f"/product/{found['slug']}/review", text)
    written = {"rating": rating, "title": title, "body": body, "created": TODAY}
    author = {"customer_id": SHOPPER_ID, "nickname": visit.find("shopper")["name"].split()[0]}
    visit.insert("review", product_id=found["id"], status="Pending", **author, **written)
    return visit.go("/account/reviews", "Thank you. Your review waits for approval.")


def _total_cents(lines: list[sqlite3.Row]) -> int:
    return sum(line["quantity"] * line["price_cents"] for line in lines)


@SHOPPING.get("/cart")
def cart(visit: Visit) -> Response:
    lines = visit.rows(BASKET)
    return visit.page("cart.html", lines=lines, total_cents=_total_cents(lines))


@SHOPPING.post("/cart/{product_id}/remove")
def remove_from_basket(visit: Visit) -> Response:
    visit.run("DELETE FROM basket WHERE product_id = :product_id")
    return visit.go("/cart", "The product was removed from your cart.")


@SHOPPING.get("/checkout")
def checkout(visit: Visit) -> Response:
    lines = visit.rows(BASKET)
    if not lines:
        return visit.go("/cart", "Your cart is empty.")
    return visit.page(
        "checkout.html",
        lines=lines,
        total_cents=_total_cents(lines),
        addresses=visit.rows(ADDRESSES),
        shipping=SHIPPING_CENTS,
    )


@SHOPPING.post("/checkout")
def place_order(visit: Visit) -> Response:
    lines, addresses = visit.rows(BASKET), {str(row["id"]): row for row in visit.rows(ADDRESSES)}
    shipping, address = visit.text("shipping"), addresses.get(visit.text("address"))
    if not lines or shipping not in SHIPPING_CENTS or address is None:
        return visit.go("/checkout", "Choose an address and a way of shipping.")
    (newest,) = visit.rows("SELECT max(CAST(number AS INTEGER)) AS n FROM purchase")
    number = str(1 + newest["n"])
    purchase_id = visit.insert(
        "purchase",
        number=number,
        customer_id=SHOPPER_ID,
        created=TODAY,
        status="Pending",
        shipping=shipping,
        shipping_cents=SHIPPING_CENTS[shipping],
        address=f"{address['street']}, {address['town']} {address['postcode']}",
    )
    for line in lines:
        of_line = {"quantity": line["quantity"], "price_cents": line["price_cents"]}
        visit.insert("purchase_line", purchase_id=purchase_id, product_id=line["id"], **of_line)
    visit.run("DELETE FROM basket")
    return visit.go(f"/orders/{number}", "Thank you for your order.")


@SHOPPING.post("/orders/{order}/cancel")
def cancel_order(visit: Visit) -> Response:
    found = visit.find("order")
    if found["status"] != "Pending":
        return visit.go(f"/orders/{found['number']}", "Only a pending order can be canceled.")
    visit.run("UPDATE purchase SET status = 'Canceled' WHERE id = :order_id")
    return visit.go(f"/orders/{found['number']}", "Your order was canceled.")


@SHOPPING.post("/account/address")
def add_address(visit: Visit) -> Response:
    street, town, postcode = (visit.text(name) for name in ("street", "town", "postcode"))
    if not (street and town and postcode):
        return visit.go("/account/address", "An address needs a street, a town and a postcode.")
    visit.insert("address", customer_id=SHOPPER_ID, street=street, town=town, postcode=postcode)
    return visit.go("/account", "The address was added.")
