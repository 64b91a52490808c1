"""Pages of the shop's administration, cms.test."""

import sqlite3

from starlette.responses import Response

from envhub.envs.minisites.seeding import TODAY
from envhub.envs.minisites.site import PageMissing, Site, Visit, whole

CMS = Site("cms", database="shop")
PAGE_ROWS = 20
ORDER_STATES = ("Pending", "Processing", "On Hold", "Complete", "Canceled")
REVIEW_STATES = ("Pending", "Approved", "Rejected")
MAX_PRICE_CENTS = 10_000_000
ORDERS = """
    SELECT purchase.*, customer.name AS customer, customer.email, total_cents, num_units
    FROM purchase JOIN customer ON customer.id = customer_id
    JOIN purchase_total ON purchase_total.purchase_id = purchase.id
"""
REVIEWS = """
    SELECT review.*, product.name AS product FROM review
    JOIN product ON product.id = product_id
"""
CUSTOMERS = """
    SELECT customer.*, count(purchase.id) AS num_orders, coalesce(sum(total_cents), 0) AS spent
    FROM customer LEFT JOIN purchase
    ON purchase.customer_id = customer.id AND purchase.status <> 'Canceled'
    LEFT JOIN purchase_total ON purchase_total.purchase_id = purchase.id
"""
BESTSELLERS = """
    SELECT product.name, product.sku, sum(line.quantity) AS sold,
           sum(line.quantity * line.price_cents) AS earned
    FROM purchase_line AS line JOIN purchase ON purchase.id = line.purchase_id
    JOIN product ON product.id = line.product_id
    WHERE purchase.status <> 'Canceled' AND purchase.created LIKE ? || '%'
    GROUP BY product.id ORDER BY sold DESC, earned DESC, product.name LIMIT 10
"""
SALES = """
    SELECT substr(created, 1, 7) AS month, count(*) AS num_orders, sum(num_units) AS num_units,
           sum(total_cents) AS total_cents, sum(status = 'Canceled') AS num_canceled
    FROM purchase JOIN purchase_total ON purchase_total.purchase_id = purchase.id
    GROUP BY month ORDER BY month
"""


def _paged(visit: Visit, rows: list[sqlite3.Row]) -> dict[str, object]:
    """Return the template's values for one page of a long table."""
    num_pages = max(1, -(-len(rows) // PAGE_ROWS))
    number = max(1, min(visit.number("page", 1), num_pages))
    listed = rows[(number - 1) * PAGE_ROWS : number * PAGE_ROWS]
    return {"rows": listed, "num_rows": len(rows), "page": number, "num_pages": num_pages}


@CMS.get("/")
def dashboard(visit: Visit) -> Response:
    sales = visit.one("SELECT sum(total_cents) AS total, count(*) AS n FROM purchase_total")
    newest = visit.rows(ORDERS + " ORDER BY created DESC, number DESC LIMIT 5")
    terms = visit.rows("SELECT * FROM search_term ORDER BY num_uses DESC LIMIT 5")
    return visit.page("dashboard.html", sales=sales, orders=newest, terms=terms)


@CMS.get("/orders")
def orders(visit: Visit) -> Response:
    status = visit.choice("status", ("", *ORDER_STATES))
    rows = visit.rows(
        ORDERS + " WHERE (? = '' OR status = ?)"
        " AND (number || ' ' || customer.name) LIKE ? ESCAPE '\\' ORDER BY number DESC",
        *(status, status, visit.pattern()),
    )
    return visit.page("orders.html", states=ORDER_STATES, status=status, **_paged(visit, rows))


def _order(visit: Visit) -> sqlite3.Row:
    return visit.one(ORDERS + " WHERE number = ?", visit.params["number"])


@CMS.get("/orders/{number}")
def order(visit: Visit) -> Response:
    found = _order(visit)
    lines = visit.rows(
        "SELECT product.id, product.name, product.sku, line.quantity, line.price_cents"
        " FROM purchase_line AS line JOIN product ON product.id = product_id"
        " WHERE purchase_id = ? ORDER BY product.name",
        found["id"],
    )
    notes = visit.rows("SELECT * FROM purchase_note WHERE purchase_id = ? ORDER BY id", found["id"])
    return visit.page("order.html", order=found, lines=lines, notes=notes)


@CMS.post("/orders/{number}/status")
def move_order(visit: Visit) -> Response:
    found, status = _order(visit), visit.text("status")
    back = f"/orders/{found['number']}"
    if status not in ORDER_STATES or found["status"] in ("Complete", "Canceled"):
        return visit.go(back, "This order cannot be changed in this way.")
    visit.run("UPDATE purchase SET status = ? WHERE id = ?", status, found["id"])
    return visit.go(back, f"The order's status is now {status}.")


@CMS.post("/orders/{number}/notes")
def add_note(visit: Visit) -> Response:
    found, body = _order(visit), visit.text("body")
    if not body:
        return visit.go(f"/orders/{found['number']}", "A comment needs a text.")
    visit.insert("purchase_note", purchase_id=found["id"], created=TODAY, body=body)
    return visit.go(f"/orders/{found['number']}", "The comment was added.")


@CMS.get("/products")
def products(visit: Visit) -> Response:
    rows = visit.rows(
        "SELECT product.*, category.name AS category FROM product"
        " JOIN category ON category.id = category_id"
        " WHERE (product.name || ' ' || sku) LIKE ? ESCAPE '\\' ORDER BY product.id",
        visit.pattern(),
    )
    return visit.page("products.html", **_paged(visit, rows))


def _product(visit: Visit) -> sqlite3.Row:
    return visit.one("SELECT * FROM product WHERE id = ?", visit.number("product_id", 0))


@CMS.get("/products/{product_id}")
def product(visit: Visit) -> Response:
    found = _product(visit)
    sold = visit.one(
        "SELECT coalesce(sum(quantity), 0) AS n FROM purchase_line JOIN purchase"
        " ON purchase.id = purchase_id WHERE product_id = ? AND status <> 'Canceled'",
        found["id"],
    )["n"]
    return visit.page("product.html", product=found, num_sold=sold)


@CMS.post("/products/{product_id}")
def edit_product(visit: Visit) -> Response:
    found, cents = _product(visit), _cents(visit.text("price"))
    back, stock = f"/products/{found['id']}", whole(visit.text("stock"))
    name, taken = visit.text("name"), False
    if name != found["name"]:
        taken = bool(visit.rows("SELECT 1 FROM product WHERE name = ?", name))
    if cents is None or stock is None or not name or taken:
        return visit.go(back, "The product needs a name of its own, a price and a stock.")
    visit.run(
        "UPDATE product SET name = ?, price_cents = ?, stock = ?, description = ?, is_enabled = ?"
        " WHERE id = ?",
        *(name, cents, stock, visit.text("description")),
        *(int(visit.text("status") == "enabled"), found["id"]),
    )
    return visit.go(back, "You saved the product.")


def _cents(text: str) -> int | None:
    """Return an amount such as `12.50` or `$12` in cents; None when it is none."""
    units, dot, rest = text.removeprefix("$").partition(".")
    amount, cents = whole(units), whole(rest.ljust(2, "0")) if dot else 0
    if amount is None or cents is None or len(rest) > 2 or amount * 100 > MAX_PRICE_CENTS:
        return None
    return amount * 100 + cents


@CMS.get("/customers")
def customers(visit: Visit) -> Response:
    rows = visit.rows(
        CUSTOMERS + " WHERE (customer.name || ' ' || email) LIKE ? ESCAPE '\\'"
        " GROUP BY customer.id ORDER BY customer.name",
        visit.pattern(),
    )
    return visit.page("customers.html", **_paged(visit, rows))


@CMS.get("/customers/{customer_id}")
def customer(visit: Visit) -> Response:
    key = visit.number("customer_id", 0)
    found = visit.one(CUSTOMERS + " WHERE customer.id = ? GROUP BY customer.id", key)
    listed = visit.rows(ORDERS + " WHERE customer_id = ? ORDER BY number DESC", key)
    return visit.page("customer.html", customer=found, orders=listed)


@CMS.post("/customers/{customer_id}")
def edit_customer(visit: Visit) -> Response:
    key, tier, phone = visit.number("customer_id", 0), visit.text("tier"), visit.text("phone")
    if tier not in ("General", "Wholesale", "VIP") or not phone:
        return visit.go(f"/customers/{key}", "A customer needs a group and a phone number.")
    visit.run("UPDATE customer SET tier = ?, phone = ? WHERE id = ?", tier, phone, key)
    return visit.go(f"/customers/{key}", "You saved the customer.")


@CMS.get("/reviews")
def reviews(visit: Visit) -> Response:
    status = visit.choice("status", ("", *REVIEW_STATES))
    rows = visit.rows(
        REVIEWS + " WHERE (? = '' OR status = ?)"
        " AND (product.name || ' ' || nickname || ' ' || title) LIKE ? ESCAPE '\\'"
        " ORDER BY created DESC, review.id",
        *(status, status, visit.pattern()),
    )
    return visit.page("reviews.html", states=REVIEW_STATES, status=status, **_paged(visit, rows))


@CMS.get("/reviews/{review_id}")
def review(visit: Visit) -> Response:
    found = visit.one(REVIEWS + " WHERE review.id = ?", visit.number("review_id", 0))
    return visit.page("review.html", review=found)


@CMS.post("/reviews/{review_id}/status")
def moderate(visit: Visit) -> Response:
    found = visit.one(REVIEWS + " WHERE review.id = ?", visit.number("review_id", 0))
    status = visit.text("status")
    if status not in REVIEW_STATES:
        raise PageMissing(visit.path)
    visit.run("UPDATE review SET status = ? WHERE id = ?", status, found["id"])
    return visit.go(f"/reviews/{found['id']}", f"The review is now {status.lower()}.")


@CMS.get("/reports")
def reports(visit: Visit) -> Response:
    return visit.page("reports.html")


@CMS.get("/reports/bestsellers")
def bestsellers(visit: Visit) -> Response:
    months = [row["month"] for row in visit.rows(SALES)]
    month = visit.choice("month", ("", *months))
    rows = visit.rows(BESTSELLERS, month)
    return visit.page("bestsellers.html", months=months, month=month, rows=rows)


@CMS.get("/reports/sales")
def sales(visit: Visit) -> Response:
    return visit.page("sales.html", rows=visit.rows(SALES))


@CMS.get("/reports/terms")
def terms(visit: Visit) -> Response:
    rows = visit.rows(
        "SELECT * FROM search_term WHERE term LIKE ? ESCAPE '\\' ORDER BY num_uses DESC",
        visit.pattern(),
    )
    return visit.page("terms.html", rows=rows)


@CMS.get("/coupons")
def coupons(visit: Visit) -> Response:
    return visit.page("coupons.html", rows=visit.rows("SELECT * FROM coupon ORDER BY code"))


@CMS.get("/coupons/new")
def coupon_form(visit: Visit) -> Response:
    return visit.page("coupon.html")


@CMS.post("/coupons/new")
def add_coupon(visit: Visit) -> Response:
    code, percent = visit.text("code")[:20].upper(), whole(visit.text("percent"))
    is_taken = bool(visit.rows("SELECT 1 FROM coupon WHERE code = ?", code))
    if not code.isalnum() or not code.isascii() or percent not in range(1, 101) or is_taken:
        text = "A coupon needs a new code of letters and digits, and a percentage of 1 to 100."
        return visit.go("/coupons/new", text)
    visit.insert("coupon", code=code, percent=percent, num_uses=0)
    return visit.go("/coupons", "You saved the coupon.")
