-- Tables of the shop, shared by the storefront and the administration.
CREATE TABLE category (id INTEGER PRIMARY KEY, name TEXT NOT NULL, slug TEXT UNIQUE NOT NULL);
CREATE TABLE product (
    id INTEGER PRIMARY KEY, sku TEXT UNIQUE NOT NULL, name TEXT UNIQUE NOT NULL,
    slug TEXT UNIQUE NOT NULL, category_id INTEGER NOT NULL REFERENCES category (id),
    brand TEXT NOT NULL, colour TEXT NOT NULL, price_cents INTEGER NOT NULL,
    stock INTEGER NOT NULL, description TEXT NOT NULL, is_enabled INTEGER NOT NULL DEFAULT 1);
CREATE TABLE customer (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, email TEXT UNIQUE NOT NULL,
    phone TEXT NOT NULL, town TEXT NOT NULL, state TEXT NOT NULL, tier TEXT NOT NULL,
    joined TEXT NOT NULL);
CREATE TABLE address (
    id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customer (id),
    street TEXT NOT NULL, town TEXT NOT NULL, postcode TEXT NOT NULL);
CREATE TABLE purchase (
    id INTEGER PRIMARY KEY, number TEXT UNIQUE NOT NULL,
    customer_id INTEGER NOT NULL REFERENCES customer (id), created TEXT NOT NULL,
    status TEXT NOT NULL, shipping TEXT NOT NULL, shipping_cents INTEGER NOT NULL,
    address TEXT NOT NULL);
CREATE TABLE purchase_line (
    purchase_id INTEGER NOT NULL REFERENCES purchase (id),
    product_id INTEGER NOT NULL REFERENCES product (id),
    quantity INTEGER NOT NULL, price_cents INTEGER NOT NULL,
    PRIMARY KEY (purchase_id, product_id));
CREATE TABLE purchase_note (
    id INTEGER PRIMARY KEY, purchase_id INTEGER NOT NULL REFERENCES purchase (id),
    created TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE review (
    id INTEGER PRIMARY KEY, product_id INTEGER NOT NULL REFERENCES product (id),
    customer_id INTEGER NOT NULL REFERENCES customer (id), nickname TEXT NOT NULL,
    rating INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, status TEXT NOT NULL,
    created TEXT NOT NULL);
CREATE TABLE basket (product_id INTEGER PRIMARY KEY, quantity INTEGER NOT NULL);
CREATE TABLE wish (product_id INTEGER PRIMARY KEY);
CREATE TABLE search_term (
    id INTEGER PRIMARY KEY, term TEXT UNIQUE NOT NULL, num_results INTEGER NOT NULL,
    num_uses INTEGER NOT NULL);
CREATE TABLE coupon (
    code TEXT PRIMARY KEY, percent INTEGER NOT NULL, num_uses INTEGER NOT NULL,
    is_active INTEGER NOT NULL DEFAULT 1);
CREATE VIEW purchase_total AS
    SELECT purchase.id AS purchase_id,
           purchase.shipping_cents + sum(line.quantity * line.price_cents) AS total_cents,
           sum(line.quantity) AS num_units
    FROM purchase JOIN purchase_line AS line ON line.purchase_id = purchase.id
    GROUP BY purchase.id;
CREATE VIEW products AS
    SELECT product.*, category.name AS category, category.slug AS category_slug,
           count(review.id) AS num_reviews, coalesce(avg(review.rating), 0) AS rating
    FROM product JOIN category ON category.id = product.category_id
    LEFT JOIN review ON review.product_id = product.id AND review.status = 'Approved'
    WHERE product.is_enabled = 1 GROUP BY product.id;
CREATE VIEW lines AS
    SELECT line.purchase_id, product.id, product.name, product.sku, product.slug,
           line.quantity, line.price_cents
    FROM purchase_line AS line JOIN product ON product.id = line.product_id;
CREATE VIEW orders AS
    SELECT purchase.*, customer.name AS customer, customer.email, total_cents, num_units
    FROM purchase JOIN customer ON customer.id = customer_id
    JOIN purchase_total ON purchase_total.purchase_id = purchase.id;
CREATE VIEW reviews AS
    SELECT review.*, product.name AS product, product.slug FROM review
    JOIN product ON product.id = product_id;
CREATE VIEW customers AS
    SELECT customer.*, count(purchase.id) AS num_orders, coalesce(sum(total_cents), 0) AS spent
    FROM customer LEFT JOIN purchase
    ON purchase.customer_id = customer.id AND purchase.status <> 'Canceled'
    LEFT JOIN purchase_total ON purchase_total.purchase_id = purchase.id
    GROUP BY customer.id;
CREATE VIEW sales AS
    SELECT substr(created, 1, 7) AS month, count(*) AS num_orders, sum(num_units) AS num_units,
           sum(total_cents) AS total_cents, sum(status = 'Canceled') AS num_canceled
    FROM purchase JOIN purchase_total ON purchase_total.purchase_id = purchase.id
    GROUP BY month ORDER BY month;
CREATE VIEW sold_line AS
    SELECT product.id AS product_id, product.name, product.sku, line.quantity,
           line.quantity * line.price_cents AS cents, purchase.created
    FROM purchase_line AS line JOIN purchase ON purchase.id = line.purchase_id
    JOIN product ON product.id = line.product_id WHERE purchase.status <> 'Canceled';
