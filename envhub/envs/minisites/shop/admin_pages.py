"""The shop's administration, cms.test: its pages and forms, and more."""

from starlette.responses import Response

from envhub.envs.minisites.site import Site, Visit, parse_number

MAX_PRICE_CENTS = 10_000_000
FINDS = {
    "sales": "SELECT sum(total_cents) AS total, count(*) AS n FROM purchase_total",
    "order": "SELECT * FROM orders WHERE number = :order",
    "product": "SELECT product.*, (SELECT coalesce(sum(quantity), 0) FROM sold_line WHERE "
    "product_id = product.id) AS num_sold FROM product WHERE id = :product_id",
    "customer": "SELECT * FROM customers WHERE id = :customer_id",
    "review": "SELECT * FROM reviews WHERE id = :review_id",
    "verdict": "SELECT lower(:status) AS word WHERE :status <> ''",
}


CMS = Site(
    "cms",
    database="shop",
    finds=FINDS,
    order_states=("Pending", "Processing", "On Hold", "Complete", "Canceled"),
    review_states=("Pending", "Approved", "Rejected"),
)


@CMS.get("/")
def dashboard(visit: Visit) -> Response:
    return visit.page(
        "dashboard.html",
        sales=visit.find("sales"),
        orders=visit.rows("SELECT * FROM orders ORDER BY created DESC, number DESC LIMIT 5"),
        terms=visit.rows("SELECT * FROM search_term ORDER BY num_uses DESC LIMIT 5"),
    )


@CMS.get("/orders")
def orders(visit: Visit) -> Response:
    return visit.page(
        "orders.html",
        status=visit.take(
            "status", ("", "Pending", "Processing", "On Hold", "Complete", "Canceled")
        ),
        **visit.one_page(
            "SELECT * FROM orders WHERE (:status = '' OR status = :status) AND (number || ' "
            "' || customer) LIKE :pattern ESCAPE '\\' ORDER BY number DESC",
            num_shown=20,
        ),
    )


@CMS.get("/orders/{order}")
def order(visit: Visit) -> Response:
    return visit.page(
        "order.html",
        order=visit.find("order"),
        lines=visit.rows("SELECT * FROM lines WHERE purchase_id = :order_id ORDER BY name"),
        notes=visit.rows("SELECT * FROM purchase_note WHERE purchase_id = :order_id ORDER BY id"),
    )


@CMS.get("/products")
def products(visit: Visit) -> Response:
    return visit.page(
        "products.html",
        **visit.one_page(
            "SELECT product.*, category.name AS category FROM product JOIN category ON "
            "category.id = category_id WHERE (product.name || ' ' || sku) LIKE :pattern "
            "ESCAPE '\\' ORDER BY product.id",
            num_shown=20,
        ),
    )


@CMS.get("/products/{product_id}")
def product(visit: Visit) -> Response:
    return visit.page("product.html", product=visit.find("product"))


@CMS.get("/customers")
def customers(visit: Visit) -> Response:
    return visit.page(
        "customers.html",
        **visit.one_page(
            "SELECT * FROM customers WHERE (name || ' ' || email) LIKE :pattern ESCAPE '\\' "
            "ORDER BY name",
            num_shown=20,
        ),
    )


@CMS.get("/customers/{customer_id}")
def customer(visit: Visit) -> Response:
    return visit.page(
        "customer.html",
        customer=visit.find("customer"),
        orders=visit.rows(
            "SELECT * FROM orders WHERE customer_id = :customer_id ORDER BY number DESC"
        ),
    )


@CMS.get("/reviews")
def reviews(visit: Visit) -> Response:
    return visit.page(
        "reviews.html",
        status=visit.take("status", ("", "Pending", "Approved", "Rejected")),
        **visit.one_page(
            "SELECT * FROM reviews WHERE (:status = '' OR status = :status) AND (product || "
            "' ' || nickname || ' ' || title) LIKE :pattern ESCAPE '\\' ORDER BY created "
            "DESC, id",
            num_shown=20,
        ),
    )


@CMS.get("/reviews/{review_id}")
def review(visit: Visit) -> Response:
    return visit.page("review.html", review=visit.find("review"))


@CMS.get("/reports")
def reports(visit: Visit) -> Response:
    return visit.page("reports.html")


@CMS.get("/reports/sales")
def sales(visit: Visit) -> Response:
    return visit.page("sales.html", rows=visit.rows("SELECT * FROM sales ORDER BY month"))


@CMS.get("/reports/terms")
def terms(visit: Visit) -> Response:
    return visit.page(
        "terms.html",
        rows=visit.rows(
            "SELECT * FROM search_term WHERE term LIKE :pattern ESCAPE '\\' ORDER BY num_uses DESC"
        ),
    )


@CMS.get("/coupons")
def coupons(visit: Visit) -> Response:
    return visit.page("coupons.html", rows=visit.rows("SELECT * FROM coupon ORDER BY code"))


@CMS.get("/coupons/new")
def coupon(visit: Visit) -> Response:
    return visit.page("coupon.html")


@CMS.post("/orders/{order}/status")
def move_order(visit: Visit) -> Response:
    visit.entry("status", of="order_states")
    visit.find("order")
    if not visit.holds(":status <> '' AND :order_status NOT IN ('Complete', 'Canceled')"):
        return visit.go("/orders/{order_number}", "This order cannot be changed in this way.")
    visit.run("UPDATE purchase SET status = :status WHERE id = :order_id")
    return visit.go("/orders/{order_number}", "The order's status is now {status}.")


@CMS.post("/orders/{order}/notes")
def add_note(visit: Visit) -> Response:
    visit.field("body")
    visit.find("order")
    if not visit.holds(":body <> ''"):
        return visit.go("/orders/{order_number}", "A comment needs a text.")
    visit.run(
        "INSERT INTO purchase_note (purchase_id, created, body) VALUES (:order_id, :today, :body)"
    )
    return visit.go("/orders/{order_number}", "The comment was added.")


@CMS.post("/customers/{customer_id}")
def edit_customer(visit: Visit) -> Response:
    visit.field("tier")
    visit.field("phone")
    if not visit.holds(":tier IN ('General', 'Wholesale', 'VIP') AND :phone <> ''"):
        return visit.go("/customers/{customer_id}", "A customer needs a group and a phone number.")
    visit.run("UPDATE customer SET tier = :tier, phone = :phone WHERE id = :customer_id")
    return visit.go("/customers/{customer_id}", "You saved the customer.")


@CMS.post("/reviews/{review_id}/status")
def judge_review(visit: Visit) -> Response:
    visit.entry("status", of="review_states")
    visit.find("review")
    visit.find("verdict")
    visit.run("UPDATE review SET status = :status WHERE id = :review_id")
    return visit.go("/reviews/{review_id}", "The review is now {verdict_word}.")


@CMS.post("/products/{product_id}")
def edit_product(visit: Visit) -> Response:
    """Change a product by the form, or return to its page with the reason."""
    product = visit.find("product")
    cents = _cents(visit.text("price"))
    back = f"/products/{product['id']}"
    stock = parse_number(visit.text("stock"))
    name = visit.text("name")
    taken = False
    if name != product["name"]:
        taken = bool(visit.rows("SELECT 1 FROM product WHERE name = :name", name=name))
    if cents is None or stock is None or not name or taken:
        return visit.go(back, "The product needs a name of its own, a price and a stock.")
    visit.run(
        "UPDATE product SET name = :name, price_cents = :cents, stock = :stock,"
        " description = :description, is_enabled = :is_enabled WHERE id = :product_id",
        name=name,
        cents=cents,
        stock=stock,
        description=visit.text("description"),
        is_enabled=int(visit.text("status") == "enabled"),
    )
    return visit.go(back, "You saved the product.")


def _cents(text: str) -> int | None:
    """Return an amount such as `12.50` or `$12` in cents; None if it is malformed."""
    units, dot, rest = text.removeprefix("$").partition(".")
    amount = parse_number(units)
    cents = parse_number(rest.ljust(2, "0")) if dot else 0
    if amount is None or cents is None or len(rest) > 2 or amount * 100 > MAX_PRICE_CENTS:
        return None
    return amount * 100 + cents


@CMS.get("/reports/bestsellers")
def bestsellers(visit: Visit) -> Response:
    """Return the page of the most sold products, of one month or of all."""
    months = [row["month"] for row in visit.rows("SELECT month FROM sales")]
    month = visit.choice("month", ("", *months))
    rows = visit.rows(
        "SELECT name, sku, sum(quantity) AS sold, sum(cents) AS earned FROM sold_line"
        " WHERE created LIKE :month || '%' GROUP BY product_id"
        " ORDER BY sold DESC, earned DESC, name LIMIT 10",
        month=month,
    )
    return visit.page("bestsellers.html", months=months, month=month, rows=rows)


@CMS.post("/coupons/new")
def add_coupon(visit: Visit) -> Response:
    """Add a coupon of the form, or return to the form with the reason."""
    code = visit.text("code")[:20].upper()
    percent = parse_number(visit.text("percent"))
    is_taken = bool(visit.rows("SELECT 1 FROM coupon WHERE code = :code", code=code))
    if not code.isalnum() or not code.isascii() or percent not in range(1, 101) or is_taken:
        text = "A coupon needs a new code of letters and digits, and a percentage of 1 to 100."
        return visit.go("/coupons/new", text)
    visit.insert("coupon", code=code, percent=percent, num_uses=0)
    return visit.go("/coupons", "You saved the coupon.")
