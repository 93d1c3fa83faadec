"""Story 34: a subscription mirrors some of the published tables, and puts them elsewhere in the lake."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere import Subscription
from walmere.errors import ConfigError

SECTIONS = """
[[table]]
match = "*.*"
include = false
[[table]]
match = "public.orders"
include = true
namespace = "sales"
name = "all orders"
[[table]]
match = "public.items"
include = true
"""


@pytest.mark.long
def test_tables_are_chosen_and_renamed_and_the_choice_can_be_changed(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text, at date)",
        "CREATE TABLE items (id int PRIMARY KEY, v text)",
        "CREATE TABLE audit (id int PRIMARY KEY, v text)",
        "INSERT INTO orders SELECT i, 'v', CASE i WHEN 7 THEN 'infinity' ELSE '2026-01-01' END::date"
        " FROM generate_series(1, 100) i",
        "INSERT INTO items SELECT i, 'v' FROM generate_series(1, 10) i",
        "INSERT INTO audit SELECT i, 'v' FROM generate_series(1, 10) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    plain = mirror.file.read_text()
    mirror.file.write_text(plain + SECTIONS)
    mirror.run_once()
    subscription = Subscription(mirror.file)
    assert {each.name for each in mirror.tables()} == {"public.items", "sales.all orders"}
    assert not (tmp_path / "lake" / "public" / "audit").exists()
    rejects = read_delta(mirror.delta("all orders", "_rejects.sales"))
    assert rejects.column("value").to_pylist() == ["infinity"]

    database.execute(
        "UPDATE orders SET v = 'w' WHERE id <= 10",
        "DELETE FROM orders WHERE id > 90",
        "ALTER TABLE orders ADD note text DEFAULT 'none'",
        "INSERT INTO orders VALUES (200, 'new', NULL, 'x')",
        "UPDATE audit SET v = 'w'",
    )
    mirror.run_once()
    proof = subscription.verify()
    assert proof.equal, proof
    assert [verdict.name for verdict in proof.tables] == ["public.items", "sales.all orders"]
    assert subscription.lake().latest().arrow("sales.all orders").num_rows == 91
    shown = {each["name"]: each["source_table"] for each in subscription.status()["tables"]}
    assert shown == {"public.items": "public.items", "sales.all orders": "public.orders"}

    # audit is included later; orders goes back to its own name, where it is copied again; items is left as it is
    mirror.file.write_text(plain + '[[table]]\nmatch = "public.items"\ninclude = false\n')
    database.execute("DELETE FROM items", "INSERT INTO audit VALUES (11, 'v')")
    mirror.run_once()
    mirror.assert_equal("audit")
    assert {each.name for each in mirror.tables() if each.published} == {"public.audit", "public.orders"}
    assert len(mirror.rows("items")) == 10
    assert Subscription(mirror.file).verify(["public.orders"]).equal
    assert Subscription(mirror.file).resync(["orders"], wait=False) == [("public", "orders")]

    mirror.file.write_text(plain + '[[table]]\nmatch = "public.*"\nname = "one"\n')
    with pytest.raises(ConfigError, match=r"would both be public\.one in the target"):
        mirror.run_once()
    findings = Subscription(mirror.file).check()
    assert any(each.name == "table_sections" and "would both be" in each.what for each in findings)
