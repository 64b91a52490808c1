"""The storefront, shopping.test: the pages of `store_pages.yaml`, search, cart and orders."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.shop.seed import SHIPPING_CENTS, SHOPPER_ID
from envhub.envs.minisites.site import Site, Visit, literal

SHOPPING = Site("shopping", database="shop", table="shop/store_pages.yaml", own_id=SHOPPER_ID)
PAGE_ROWS = 12
BASKET = """
    SELECT product.*, basket.quantity FROM basket JOIN product ON product.id = product_id
    ORDER BY product.name
"""
ADDRESSES = "SELECT * FROM address WHERE customer_id = :own_id ORDER BY id"


@SHOPPING.get("/search")
def search(visit: Visit) -> Response:
    """Return the page of the products that contain all search words."""
    words = visit.query.get("q", "")[:200].split()[:8]
    orders = SHOPPING.table["pages"]["/category/{slug}.html"]["orders"]
    fits = [f"(name || ' ' || sku) LIKE :word_{i} ESCAPE '\\'" for i in range(len(words))]
    marks = {f"word_{i}": f"%{literal(word)}%" for i, word in enumerate(words)}
    where = " AND ".join(["1", *fits])
    order = orders[visit.choice("sort", tuple(orders))]
    sql = f"SELECT * FROM products WHERE {where} ORDER BY {order} LIMIT {PAGE_ROWS}"
    return visit.page("search.html", products=visit.rows(sql, **marks), words=" ".join(words))


def _total_cents(lines: list[sqlite3.Row]) -> int:
    """Return the price of all lines of the cart."""
    return sum(line["quantity"] * line["price_cents"] for line in lines)


@SHOPPING.get("/cart")
def cart(visit: Visit) -> Response:
    """Return the page of the cart."""
    lines = visit.rows(BASKET)
    return visit.page("cart.html", lines=lines, total_cents=_total_cents(lines))


@SHOPPING.get("/checkout")
def checkout(visit: Visit) -> Response:
    """Return the page of the checkout, or the cart if it is empty."""
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
    """Order the content of the cart, or return to the checkout with the reason."""
    lines = visit.rows(BASKET)
    addresses = {str(row["id"]): row for row in visit.rows(ADDRESSES)}
    shipping = visit.text("shipping")
    address = addresses.get(visit.text("address"))
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
