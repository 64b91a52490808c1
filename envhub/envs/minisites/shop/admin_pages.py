"""The shop's administration, cms.test: the pages and forms of `admin_pages.yaml`, and more."""

from starlette.responses import Response

from envhub.envs.minisites.site import Site, Visit, parse_number

MAX_PRICE_CENTS = 10_000_000
CMS = Site(
    "cms",
    database="shop",
    table="shop/admin_pages.yaml",
    order_states=("Pending", "Processing", "On Hold", "Complete", "Canceled"),
    review_states=("Pending", "Approved", "Rejected"),
)


@CMS.post("/products/{product_id}")
def edit_product(visit: Visit) -> Response:
    """Change a product by the form, or return to its page with the reason."""
    found = visit.find("product")
    cents = _cents(visit.text("price"))
    back = f"/products/{found['id']}"
    stock = parse_number(visit.text("stock"))
    name = visit.text("name")
    taken = False
    if name != found["name"]:
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
