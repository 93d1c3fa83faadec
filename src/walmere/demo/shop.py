"""The source of the demo: a small shop, with tables that are difficult for logical replication.

    customers     a jsonb profile; ids change when accounts are renumbered
    products      a text key that changes, a jsonb, and a TOASTed manual of some kilobytes, which no update changes
    orders        an enum, a numeric total, a timestamp with time zone
    order_lines   two columns in the key; a foreign key with CASCADE, so one UPDATE or DELETE is several changes
    deliveries    partitioned by region, published as one table; rows move to another partition
    carts         uuid, text[], a numeric without precision; truncated once

The loaded rows depend only on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from walmere.publisher.connect import Connection

PUBLICATION: Final = "shop"
SCHEMA: Final = "public"

KEYS: Final = {
    "carts": ("id",),
    "customers": ("id",),
    "deliveries": ("order_id", "region"),
    "order_lines": ("order_id", "line"),
    "orders": ("id",),
    "products": ("sku",),
}
"""The tables, with their primary keys."""

_CREATE: Final = """
CREATE TYPE order_status AS ENUM ('placed', 'paid', 'packed', 'shipped', 'returned');

CREATE TABLE customers (
    id bigint PRIMARY KEY, email text NOT NULL, name text NOT NULL, profile jsonb NOT NULL,
    joined date NOT NULL, newsletter boolean NOT NULL
);
CREATE TABLE products (
    sku text PRIMARY KEY, title text NOT NULL, price numeric(10, 2) NOT NULL, attributes jsonb NOT NULL,
    weight double precision, manual text NOT NULL
);
ALTER TABLE products ALTER manual SET STORAGE EXTERNAL;
CREATE TABLE orders (
    id bigint PRIMARY KEY, customer bigint NOT NULL, status order_status NOT NULL, total numeric(12, 2) NOT NULL,
    placed_at timestamptz NOT NULL, note text
);
CREATE TABLE order_lines (
    order_id bigint REFERENCES orders ON UPDATE CASCADE ON DELETE CASCADE, line smallint,
    sku text NOT NULL, quantity integer NOT NULL, price numeric(10, 2) NOT NULL,
    PRIMARY KEY (order_id, line)
);
CREATE TABLE deliveries (
    order_id bigint, region text, due timestamp NOT NULL, address jsonb, PRIMARY KEY (order_id, region)
) PARTITION BY LIST (region);
CREATE TABLE deliveries_north PARTITION OF deliveries FOR VALUES IN ('north');
CREATE TABLE deliveries_south PARTITION OF deliveries FOR VALUES IN ('south');
CREATE TABLE deliveries_east PARTITION OF deliveries FOR VALUES IN ('east');
CREATE TABLE carts (id uuid PRIMARY KEY, customer bigint, skus text[] NOT NULL, total numeric NOT NULL);

CREATE PUBLICATION shop FOR ALL TABLES WITH (publish_via_partition_root = true);
"""

_LOAD: Final = """
INSERT INTO customers
SELECT i, 'customer' || i || '@example.com', 'Customer ' || i,
       jsonb_build_object('points', i % 500, 'city', (ARRAY['Mere', 'Lakeside', 'Havn', 'Örebro'])[i % 4 + 1]),
       date '2020-01-01' + i % 2000, i % 3 = 0
FROM generate_series(1, {customers}) i;

INSERT INTO products
SELECT 'P' || lpad(i::text, 5, '0'), 'Product ' || i, i % 9000 / 100.0 + 1,
       jsonb_build_object('stock', i % 70, 'colours', jsonb_build_array('blue', 'green')),
       CASE WHEN i % 10 > 0 THEN i / 7.0 END,
       (SELECT string_agg(md5(i || ' ' || j), '') FROM generate_series(1, 250) j)
FROM generate_series(1, {products}) i;

INSERT INTO orders
SELECT i, i % {customers} + 1, (enum_range(NULL::order_status))[i % 5 + 1], 2 * (i % 90 + 1) + 0.50,
       timestamptz '2026-01-01 00:00:00+00' + i * interval '97.000311 s', CASE WHEN i % 8 = 0 THEN 'ring twice' END
FROM generate_series(1, {orders}) i;

INSERT INTO order_lines
SELECT i, line, 'P' || lpad(((i + line) % {products} + 1)::text, 5, '0'), line, i % 90 + 1 - 0.25 * (line - 1)
FROM generate_series(1, {orders}) i, generate_series(1, 2) line;

INSERT INTO deliveries
SELECT i, (ARRAY['north', 'south', 'east'])[i % 3 + 1], timestamp '2026-02-01 08:00' + i * interval '1 minute',
       CASE WHEN i % 5 > 0 THEN jsonb_build_object('street', 'Lake Road', 'number', i % 300) END
FROM generate_series(1, {orders}) i WHERE i % 2 = 0;

INSERT INTO carts
SELECT md5(i::text)::uuid, i, ARRAY['P00001', 'P' || lpad((i % {products} + 1)::text, 5, '0')], i / 3.0
FROM generate_series(1, {carts}) i;

ANALYZE;
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of rows. An order has two lines, and every second order has a delivery."""

    customers: int
    products: int
    orders: int
    carts: int

    @classmethod
    def of(cls, rows: int) -> Sizes:
        """Sizes for about this many rows in all tables."""
        return cls(rows // 10, max(20, min(1000, rows // 100)), rows // 4, rows // 50)


def create(connection: Connection, sizes: Sizes) -> None:
    """Create the tables and the publication, and load the first rows."""
    connection.execute("SET search_path = public")
    connection.execute(_CREATE.encode())
    connection.execute(_LOAD.format(**{name: getattr(sizes, name) for name in Sizes.__slots__}).encode())


def count(connection: Connection) -> int:
    """Count the rows of all tables."""
    union = " UNION ALL ".join(f"SELECT count(*) FROM {SCHEMA}.{name}" for name in KEYS)  # noqa: S608
    [(rows,)] = connection.execute(f"SELECT sum(count)::bigint FROM ({union}) AS t".encode())  # noqa: S608
    return int(rows)
