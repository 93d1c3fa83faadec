"""Story 35: columns are dropped, masked and cast on their way, the same by the copy and by the stream."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere import Subscription
from walmere.errors import ConfigError, NotMirrored

AS_OURS = CommitProperties(custom_metadata={"walmere.lsn": "0/0"})
KEY = "a key for the tests of masks"
SECTIONS = """
[types]
numeric = "decimal(20,4)"
uuid = "binary"
interval = "struct"
[[table]]
match = "*.*"
columns = { email = "hash", token = "hash", secret = "drop" }
[[table]]
match = "public.customers"
[table.columns]
phone = "redact"
note = "pyarrow.compute:utf8_upper"
born = { mask = "pyarrow.compute:year", type = "bigint" }
score = "null"
n = { type = "bigint" }
[[table]]
match = "public.tickets"
soft_deletes = "deleted_at"
columns = { body = "pyarrow.compute:utf8_upper" }
cluster_by = ["state", "id"]
"""


def hashed(text: str) -> str:
    return hmac.digest(KEY.encode(), text.encode(), "sha256").hex()


def row(mirror: Mirror, table: str, **key: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = read_delta(mirror.delta(table)).to_pylist()
    [one] = [each for each in found if all(each[name] == value for name, value in key.items())]
    return one


def assert_equal(mirror: Mirror, tables: Sequence[str] = ()) -> None:
    proof = Subscription(mirror.file).verify(tables)
    assert proof.equal, proof


@pytest.fixture
def masked(database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    monkeypatch.setenv("WALMERE_HASH_KEY", KEY)
    database18.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, email text, phone text, note text, born date, score int,"
        " secret text, price numeric, n int, u uuid)",
        "ALTER TABLE customers ALTER note SET STORAGE EXTERNAL",
        "INSERT INTO customers SELECT i, 'u' || i || '@example.org', '030 ' || i, repeat('n' || i, 5000),"
        " CASE WHEN i < 9 THEN date '1970-01-01' + 400 * i ELSE 'infinity' END, i, 'secret', i + 0.5, i,"
        " ('00000000-0000-0000-0000-0000000000' || (10 + i))::uuid FROM generate_series(1, 10) i",
        "CREATE TABLE spans (id serial PRIMARY KEY, span interval)",
        "INSERT INTO spans (span) SELECT make_interval(months => m, days => d, secs => s)"
        " FROM unnest('{0,1,-1,11,-25}'::int[]) m, unnest('{0,1,-1,40}'::int[]) d,"
        " unnest('{0,0.000001,-1.5,86400,-7200.25}'::float8[]) s",
        "CREATE TABLE accounts (email text PRIMARY KEY, big text, at date)",
        "ALTER TABLE accounts ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO accounts SELECT 'a' || i, repeat('x', 5000), '2026-01-01' FROM generate_series(1, 10) i",
        "CREATE TABLE visits (email text, secret text, page text)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'a' || i % 3, i::text, 'home' FROM generate_series(1, 30) i",
        "CREATE TABLE tickets (id int PRIMARY KEY, body text, state text)",
        "ALTER TABLE tickets ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO tickets SELECT i, repeat('b' || i, 5000), 'open' FROM generate_series(6, 1, -1) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.file.write_text(mirror.file.read_text() + SECTIONS)
    mirror.run_once()
    return mirror


def test_copy_and_stream_mask_in_the_same_way(masked: Mirror) -> None:
    mirror, database = masked, masked.database
    assert read_delta(mirror.delta("tickets"))["id"].to_pylist() == [1, 2, 3, 4, 5, 6], "sorted by the copy"
    mirror.run_once()
    assert_equal(mirror)
    first = row(mirror, "customers", id=1)
    assert list(first) == ["id", "email", "phone", "note", "born", "score", "price", "n", "u"]
    assert first["email"] == hashed("u1@example.org")
    assert (first["phone"], first["score"], first["born"], first["price"]) == ("***", None, 1971, Decimal("1.5000"))
    assert first["note"] == "N1" * 5000
    assert first["u"] == bytes(15) + b"\x11"
    assert row(mirror, "customers", id=9)["born"] is None, "infinity has no year"

    database.execute(
        "UPDATE customers SET phone = '1', email = 'new@example.org' WHERE id = 1",  # note is TOASTed, and not sent
        "UPDATE customers SET id = 101, score = 7 WHERE id = 2",
        "UPDATE customers SET note = 'short' WHERE id = 3",
        "UPDATE customers SET price = 12345678901234567.5 WHERE id = 4",  # too many digits for the decimal
        "UPDATE customers SET price = 1.00005 WHERE id = 5",
        "DELETE FROM customers WHERE id = 6",
        "INSERT INTO customers (id, email, price) VALUES (200, 'u7@example.org', -0.00010000)",
        "UPDATE accounts SET email = 'b1' WHERE email = 'a1'",
        "UPDATE accounts SET at = 'infinity' WHERE email = 'a2'",
        "DELETE FROM accounts WHERE email = 'a3'",
        "INSERT INTO spans (span) VALUES (NULL), ('178956970 years 7 mons')",
        *(["INSERT INTO spans (span) VALUES ('infinity'), ('-2562047788:00:54.7')"] if database.major >= 17 else []),
        "DELETE FROM visits WHERE ctid IN (SELECT ctid FROM visits WHERE email = 'a1' LIMIT 4)",
        "UPDATE visits SET page = 'out' WHERE email = 'a2' AND secret::int < 10",
        "ALTER TABLE customers ADD token text DEFAULT 'tok'",  # a section has a rule for it
        "INSERT INTO customers (id, token) VALUES (201, 'other')",
        "DELETE FROM tickets WHERE id = 1",
        "BEGIN; UPDATE tickets SET state = 'closed' WHERE id = 2; DELETE FROM tickets WHERE id = 2; COMMIT",
        "DELETE FROM tickets WHERE id = 3",
        "INSERT INTO tickets VALUES (3, 'new', 'open'), (7, 'short', 'open')",
        "DELETE FROM tickets WHERE id = 7",
        "UPDATE tickets SET id = 13 WHERE id = 4",
        "DELETE FROM tickets WHERE id = 13",
        "INSERT INTO tickets VALUES (4, 'again', 'open')",
        "ALTER TABLE tickets ADD note text DEFAULT 'none'",
        "UPDATE tickets SET state = 'late' WHERE id = 5",
    )
    mirror.run_once()
    assert_equal(mirror)
    first = row(mirror, "customers", id=1)
    assert (first["email"], first["note"], first["token"]) == (hashed("new@example.org"), "N1" * 5000, hashed("tok"))
    assert row(mirror, "customers", id=101)["note"] == "N2" * 5000
    assert row(mirror, "customers", id=200)["email"] == row(mirror, "customers", id=7)["email"]
    assert row(mirror, "customers", id=4)["price"] is None
    rejects = read_delta(mirror.delta("customers", "_rejects.public")).to_pylist()
    assert {(each["column"], each["value"]) for each in rejects} == {
        ("price", "12345678901234567.5"),
        ("price", "1.00005"),
    }, "what a function cannot have is not shown there"
    [rejected] = read_delta(mirror.delta("accounts", "_rejects.public")).to_pylist()
    assert rejected["key"] == f'{{"email": "{hashed("a2")}"}}', "a key that is masked is masked there, too"

    tickets = {each["id"]: each for each in read_delta(mirror.delta("tickets")).to_pylist()}
    assert sorted(tickets) == [1, 2, 3, 4, 5, 6, 7, 13]
    assert {number for number, each in tickets.items() if each["deleted_at"] is not None} == {1, 2, 7, 13}
    assert (tickets[1]["body"], tickets[1]["state"]) == ("B1" * 5000, "open"), "from the target"
    assert (tickets[2]["body"], tickets[2]["state"]) == ("B2" * 5000, "closed"), "from the change before"
    assert (tickets[3]["body"], tickets[3]["deleted_at"]) == ("NEW", None), "it was inserted again"
    assert tickets[7]["body"] == "SHORT"
    assert tickets[13]["body"] == "B4" * 5000, "it got another key before"
    assert (tickets[4]["body"], tickets[4]["deleted_at"]) == ("AGAIN", None)
    assert {each["note"] for each in tickets.values()} == {"none"}

    # verify still compares every column: masked ones, cast ones, and the others
    changes = {"email": hashed("else"), "note": "n1", "score": 1, "price": Decimal("1.5001"), "n": 5, "u": bytes(16)}
    opened = mirror.delta("customers")
    rows = read_delta(opened)
    for row_id, (column, value) in zip((3, 5, 7, 8, 9, 10), changes.items(), strict=True):
        rows = with_value(rows, column, row_id, value)
    write_deltalake(opened, rows, mode="overwrite", commit_properties=AS_OURS)
    [verdict] = Subscription(mirror.file).verify(["customers"]).tables
    assert verdict.different == len(changes)
    assert {each.columns for each in verdict.examples} == {(column,) for column in changes}


def with_value(rows: pa.Table, column: str, row_id: int, value: Any) -> pa.Table:
    """The same rows, with another value in one place."""
    place = rows.column_names.index(column)
    pairs = zip(rows["id"].to_pylist(), rows[column].to_pylist(), strict=True)
    values = [value if number == row_id else old for number, old in pairs]
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))


@pytest.mark.long
def test_a_changed_section_copies_the_table_again_and_a_renamed_column_is_not_shown(
    masked: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, database = masked, masked.database
    text = mirror.file.read_text()
    versions = {name: mirror.delta(name).version() for name in ("customers", "accounts", "visits")}
    mirror.file.write_text(text.replace('phone = "redact"', 'phone = "null"'))
    mirror.run_once()
    assert row(mirror, "customers", id=1)["phone"] is None
    assert mirror.delta("accounts").version() == versions["accounts"], "its sections are the same"
    assert_equal(mirror)

    monkeypatch.setenv("WALMERE_HASH_KEY", KEY + "2")
    mirror.run_once()
    assert row(mirror, "customers", id=1)["email"] != hashed("u1@example.org")
    assert_equal(mirror)

    database.execute("ALTER TABLE customers RENAME phone TO tel", "UPDATE customers SET tel = '2' WHERE id = 1")
    with pytest.raises(ConfigError, match="the table has no published column phone"):
        mirror.run_once()
    assert "phone" in row(mirror, "customers", id=1), "the copy from before is still there"
    mirror.file.write_text(text.replace('phone = "redact"\n', ""))
    with pytest.raises(ConfigError, match="column tel was called phone when the table was copied"):
        mirror.run_once()
    mirror.file.write_text(text.replace('phone = "redact"', 'tel = "redact"'))
    mirror.run_once()
    assert row(mirror, "customers", id=1)["tel"] == "***"
    assert_equal(mirror)

    database.execute("ALTER TABLE customers REPLICA IDENTITY FULL", "UPDATE customers SET score = 1 WHERE id = 1")
    mirror.run_once()
    assert_equal(mirror)
    mirror.file.write_text(
        mirror.file.read_text().replace('n = { type = "bigint" }', 'n = "pyarrow.compute:utf8_upper"')
    )
    with pytest.raises(NotMirrored, match="it raised ArrowNotImplementedError"):
        mirror.run_once()
    mirror.file.write_text(text.replace('phone = "redact"', 'tel = "redact"').replace("*.*", "public.[av]*"))
    database.execute("ALTER TABLE accounts RENAME TO logins")
    with pytest.raises(ConfigError, match=r"column email was called public\.accounts\.email when the table was copied"):
        mirror.run_once()
