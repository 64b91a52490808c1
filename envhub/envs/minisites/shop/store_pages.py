"""The storefront, shopping.test: its pages, search, cart and orders."""

import sqlite3
from typing import Any

from starlette.responses import Response

from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.shop.seed import SHIPPING_CENTS, SHOPPER_ID
from envhub.envs.minisites.site import Site, Visit, literal

FINDS = {
    "shopper": "SELECT * FROM customer WHERE id = :own_id",
    "category": "SELECT * FROM category WHERE slug = :slug",
    "product": "SELECT * FROM products WHERE slug = :slug",
    "order": "SELECT * FROM orders WHERE customer_id = :own_id AND number = :order",
    "basket": "SELECT max(1, min(coalesce(:quantity, 1), 99)) AS quantity",
}
ORDERS = {
    "name": "name",
    "price-asc": "price_cents, name",
    "price-desc": "price_cents DESC, name",
    "rating": "rating DESC, num_reviews DESC, name",
}


def _frame(visit: Visit) -> dict[str, Any]:
    """Return the values that all pages show."""
    return {
        "shopper": visit.find("shopper"),
        "categories": visit.rows("SELECT name, slug FROM category ORDER BY name"),
    }


SHOPPING = Site("shopping", database="shop", finds=FINDS, frame=_frame, own_id=SHOPPER_ID)


@SHOPPING.get("/")
def home(visit: Visit) -> Response:
    return visit.page(
        "home.html",
        products=visit.rows(
            "SELECT * FROM products ORDER BY rating DESC, num_reviews DESC, name LIMIT 8"
        ),
    )


@SHOPPING.get("/category/{slug}.html")
def category(visit: Visit) -> Response:
    sort = visit.take("sort", tuple(ORDERS))
    return visit.page(
        "category.html",
        sort=sort,
        category=visit.find("category"),
        products=visit.rows(
            f"SELECT * FROM products WHERE category_id = :category_id ORDER BY {ORDERS[sort]}"
        ),
    )


@SHOPPING.get("/product/{slug}.html")
def product(visit: Visit) -> Response:
    return visit.page(
        "product.html",
        product=visit.find("product"),
        reviews=visit.rows(
            "SELECT * FROM review WHERE product_id = :product_id AND status = 'Approved' "
            "ORDER BY created DESC, id"
        ),
    )


@SHOPPING.get("/product/{slug}/review")
def review(visit: Visit) -> Response:
    return visit.page("review.html", product=visit.find("product"))


@SHOPPING.get("/orders")
def orders(visit: Visit) -> Response:
    return visit.page(
        "orders.html",
        orders=visit.rows(
            "SELECT * FROM orders WHERE customer_id = :own_id ORDER BY created DESC, number DESC"
        ),
    )


@SHOPPING.get("/orders/{order}")
def order(visit: Visit) -> Response:
    return visit.page(
        "order.html",
        order=visit.find("order"),
        lines=visit.rows("SELECT * FROM lines WHERE purchase_id = :order_id ORDER BY name"),
    )


@SHOPPING.get("/wishlist")
def wishlist(visit: Visit) -> Response:
    return visit.page(
        "wishlist.html",
        products=visit.rows(
            "SELECT * FROM products WHERE id IN (SELECT product_id FROM wish) ORDER BY name"
        ),
    )


@SHOPPING.get("/account")
def account(visit: Visit) -> Response:
    return visit.page(
        "account.html",
        addresses=visit.rows("SELECT * FROM address WHERE customer_id = :own_id ORDER BY id"),
    )


@SHOPPING.get("/account/address")
def address(visit: Visit) -> Response:
    return visit.page("address.html")


@SHOPPING.get("/account/reviews")
def own_reviews(visit: Visit) -> Response:
    return visit.page(
        "own_reviews.html",
        reviews=visit.rows("SELECT * FROM reviews WHERE customer_id = :own_id ORDER BY id DESC"),
    )


@SHOPPING.post("/product/{slug}/basket")
def add_to_basket(visit: Visit) -> Response:
    visit.whole("quantity")
    visit.find("product")
    visit.find("basket")
    if not visit.holds(":product_stock <> 0"):
        return visit.go("/product/{product_slug}.html", "This product is out of stock.")
    visit.run(
        "INSERT INTO basket VALUES (:product_id, :basket_quantity) ON CONFLICT "
        "(product_id) DO UPDATE SET quantity = min(quantity + excluded.quantity, 99)"
    )
    return visit.go(
        "/product/{product_slug}.html",
        "You added {basket_quantity} of {product_name} to your cart.",
    )


@SHOPPING.post("/product/{slug}/wish")
def add_wish(visit: Visit) -> Response:
    visit.find("product")
    visit.run("INSERT OR IGNORE INTO wish VALUES (:product_id)")
    return visit.go("/product/{product_slug}.html", "Saved to your wish list.")


@SHOPPING.post("/product/{slug}/review")
def add_review(visit: Visit) -> Response:
    visit.whole("rating")
    visit.field("title")
    visit.field("body")
    visit.find("product")
    visit.find("shopper")
    if not visit.holds(":rating BETWEEN 1 AND 5 AND :title <> '' AND :body <> ''"):
        return visit.go(
            "/product/{product_slug}/review", "A review needs a rating, a title and a text."
        )
    visit.run(
        "INSERT INTO review (product_id, customer_id, nickname, rating, title, body, "
        "status, created) VALUES (:product_id, :own_id, substr(:shopper_name, 1, "
        "instr(:shopper_name, ' ') - 1), :rating, :title, :body, 'Pending', :today)"
    )
    return visit.go("/account/reviews", "Thank you. Your review waits for approval.")


@SHOPPING.post("/cart/{product_id}/remove")
def remove_from_basket(visit: Visit) -> Response:
    visit.run("DELETE FROM basket WHERE product_id = :product_id")
    return visit.go("/cart", "The product was removed from your cart.")


@SHOPPING.post("/orders/{order}/cancel")
def cancel_order(visit: Visit) -> Response:
    visit.find("order")
    if not visit.holds(":order_status = 'Pending'"):
        return visit.go("/orders/{order_number}", "Only a pending order can be canceled.")
    visit.run("UPDATE purchase SET status = 'Canceled' WHERE id = :order_id")
    return visit.go("/orders/{order_number}", "Your order was canceled.")


@SHOPPING.post("/account/address")
def add_address(visit: Visit) -> Response:
    visit.field("street")
    visit.field("town")
    visit.field("postcode")
    if not visit.holds(":street <> '' AND :town <> '' AND :postcode <> ''"):
        return visit.go("/account/address", "An address needs a street, a town and a postcode.")
    visit.run(
        "INSERT INTO address (customer_id, street, town, postcode) VALUES (:own_id, "
        ":street, :town, :postcode)"
    )
    return visit.go("/account", "The address was added.")


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
    orders = ORDERS
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
