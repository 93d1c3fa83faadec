"""Query a mirrored database with DuckDB, as of one LSN and as of now.

It runs on a PostgreSQL server of its own (`pip install -c constraints.txt '.[demo]'` in a clone; Spark needs Java 17):

    python examples/duckdb_at_an_lsn.py

It prints

    before: 2 countries
    DE  2000 4503000.00
    FR  1000 2249250.00
    after: 3 countries
    DE  2000 4503000.00
    FR  1000 2249250.00
    IT     1      99.90
"""

import tempfile
from pathlib import Path

import duckdb
import psycopg

import walmere
from walmere.testing.server import embedded

REVENUE = """
    SELECT country, count(*) AS orders, sum(amount) AS amount
    FROM orders JOIN customers ON customers.id = customer GROUP BY country ORDER BY country
"""


def show(title: str, point: walmere.Point) -> None:
    """All tables of a point are as of the same LSN: a join never sees half of a transaction."""
    # the names of the variables are the names of the tables in the query
    orders, customers = point.duckdb("orders"), point.duckdb("customers")  # noqa: F841
    rows = duckdb.sql(REVENUE).fetchall()
    print(f"{title}: {len(rows)} countries")
    for country, count, amount in rows:
        print(f"{country} {count:5} {amount:10}")


with (
    tempfile.TemporaryDirectory() as place,
    embedded() as server,
    psycopg.connect(server.dsn(), autocommit=True) as shop,
):
    shop.execute("CREATE TABLE customers (id int PRIMARY KEY, country text NOT NULL)")
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, customer int REFERENCES customers, amount numeric(10,2))")
    shop.execute("INSERT INTO customers VALUES (1, 'DE'), (2, 'FR'), (3, 'DE')")
    shop.execute("INSERT INTO orders SELECT i, 1 + i % 3, i * 1.5 FROM generate_series(1, 3000) i")
    shop.execute("CREATE PUBLICATION shop FOR TABLE customers, orders")

    file = Path(place, "walmere.toml")
    file.write_text(f"""
[source]
dsn = "{server.dsn()}"
publications = ["shop"]
slot = "walmere_shop"
[subscription]
name = "shop"
directory = "{place}/shop"
[target]
path = "{place}/lake"
""")
    subscription = walmere.Subscription(file)
    subscription.run(once=True)
    before = subscription.lake().latest().lsn

    with shop.transaction():
        shop.execute("INSERT INTO customers VALUES (4, 'IT')")
        shop.execute("INSERT INTO orders VALUES (5000, 4, 99.90)")
    subscription.run(once=True)

    # neither the source nor a subscription has to run from here on
    lake = walmere.lake(f"{place}/lake")
    show("before", lake.at(before))
    show("after", lake.latest())
