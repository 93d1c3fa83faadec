"""Orders by domain of the customer's employer: joined by hashed addresses."""

import duckdb

import walmere

point = walmere.lake("lake").latest()
connection = duckdb.connect()
point.duckdb("crm.customers", connection).create_view("customers")
point.duckdb("public.orders", connection).create_view("orders")
connection.sql(
    "SELECT work_email AS employer, birthday AS born, income, count(*) AS orders, sum(amount) AS amount"
    " FROM customers JOIN orders USING (email) GROUP BY ALL ORDER BY employer"
).show()
