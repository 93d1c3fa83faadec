"""`Subscription.transactions`: the change log as Python objects, without Spark."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from conftest import Database
from processes import eventually, write_config
from receiving import receive_all
from walmere import Lsn, Subscription
from walmere.changelog.changes import Change
from walmere.config import Config
from walmere.errors import ConfigError, SourceUnavailable, UnknownType
from walmere.pgoutput import messages as m


class Shop:
    """A subscription that only receives."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.config: Config = database.config(directory / "s")
        self.subscription = Subscription(write_config(self.config, directory / "walmere.toml"))

    def execute(self, *statements: str) -> None:
        """Execute them, each in its own transaction, and receive them."""
        self.database.execute(*statements)
        receive_all(self.database, self.config)

    def changes(self, *arguments: Any) -> list[Change]:
        return [change for each in self.subscription.transactions(*arguments) for change in each.changes]


@pytest.fixture
def shop(database_under_test: Database, tmp_path: Path) -> Shop:
    database_under_test.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN price AS numeric(8,2)",
        "CREATE TABLE t (id int PRIMARY KEY, doc text, n numeric(5,1), tags text[], raw bytea,"
        " at timestamptz, day date)",
        "ALTER TABLE t ALTER doc SET STORAGE EXTERNAL",
        "CREATE TABLE whole (id int, doc text, p price, m mood)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "ALTER TABLE whole ALTER doc SET STORAGE EXTERNAL",
        "CREATE TABLE bare ()",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    made = Shop(database_under_test, tmp_path)
    made.execute()
    return made


def test_rows_have_python_values(shop: Shop) -> None:
    shop.execute(
        "INSERT INTO t VALUES (1, repeat('x', 9000), 2.5, '{a,NULL}', '\\x00ff', '2026-01-31 12:00+00', '2026-01-31')",
        "INSERT INTO t (id) VALUES (2)",
        "UPDATE t SET n = 3 WHERE id = 1",
        "UPDATE t SET id = 20 WHERE id = 2",
        "DELETE FROM t WHERE id = 20",
    )
    first, second, third, fourth, fifth = shop.changes()
    row = {
        "id": 1,
        "doc": "x" * 9000,
        "n": Decimal("2.5"),
        "tags": ["a", None],
        "raw": b"\x00\xff",
        "at": dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        "day": dt.date(2026, 1, 31),
    }
    empty = dict.fromkeys(row)
    assert [each.kind for each in (first, second, third, fourth, fifth)] == [*["insert"] * 2, *["update"] * 2, "delete"]
    assert (first.table, first.tables, first.new, first.key, first.old) == ("public.t", ("public.t",), row, None, None)
    assert second.new == {**empty, "id": 2}
    # not sent, because it is TOASTed and did not change: neither None nor guessed
    assert third.new == {name: value for name, value in {**row, "n": Decimal("3.0")}.items() if name != "doc"}
    assert third.unchanged == ("doc",)
    assert (fourth.key, fourth.new) == ({"id": 2}, {**empty, "id": 20})
    assert (fifth.key, fifth.old, fifth.new) == ({"id": 20}, None, None)
    assert first.lsn < second.lsn
    assert isinstance(first.message, m.Insert)
    assert first.message.new[2] == b"2.5"
    assert "xxx" not in repr(first)


def test_old_rows_types_that_are_not_built_in_and_what_a_type_cannot_hold(shop: Shop) -> None:
    shop.execute(
        "INSERT INTO whole VALUES (1, repeat('x', 9000), 1.5, 'ok')",
        "UPDATE whole SET m = 'sad'",
        "DELETE FROM whole",
        "INSERT INTO t (id, n, day) VALUES (7, 'NaN', 'infinity')",
        "UPDATE t SET day = '2026-01-31', id = 8",
    )
    insert, update, delete, odd, mended = shop.changes()
    row = {"id": 1, "doc": "x" * 9000, "p": Decimal("1.50"), "m": "ok"}
    assert (insert.new, insert.rejects) == (row, {})
    # the old row has the TOASTed value, so that it is known
    assert (update.old, update.new, update.unchanged) == (row, {**row, "m": "sad"}, ())
    assert (delete.old, delete.key, delete.new) == ({**row, "m": "sad"}, None, None)
    assert odd.new is not None
    assert (odd.new["n"], odd.new["day"], odd.rejects) == (None, None, {"n": "NaN", "day": "infinity"})
    assert (mended.key, mended.rejects) == ({"id": 7}, {"n": "NaN"})


def test_truncates_messages_and_tables_without_columns(shop: Shop) -> None:
    shop.execute(
        "INSERT INTO bare DEFAULT VALUES",
        "TRUNCATE t, whole RESTART IDENTITY",
        "SELECT pg_logical_emit_message(true, 'note', 'hello')",
    )
    bare, truncate, message = shop.changes()
    assert (bare.table, bare.new, bare.rejects) == ("public.bare", {}, {})
    assert (truncate.kind, truncate.table, set(truncate.tables)) == ("truncate", None, {"public.t", "public.whole"})
    assert (truncate.new, truncate.old, truncate.key, truncate.unchanged, truncate.rejects) == (
        None,
        None,
        None,
        (),
        {},
    )
    assert isinstance(truncate.message, m.Truncate)
    assert truncate.message.restart_identity
    assert isinstance(message.message, m.LogicalMessage)
    assert (message.kind, message.tables, message.message.content) == ("message", (), b"hello")


def test_a_large_transaction_of_several_tables_keeps_its_order(shop: Shop) -> None:
    shop.execute(
        "DO $$ BEGIN FOR i IN 1..3000 LOOP INSERT INTO t (id) VALUES (i); INSERT INTO whole (id) VALUES (-i);"
        " END LOOP; END $$"
    )
    [transaction] = shop.subscription.transactions()
    found = [(change.table, change.new and change.new["id"]) for change in transaction.changes]
    assert found == [each for i in range(1, 3001) for each in (("public.t", i), ("public.whole", -i))]


def test_an_lsn_may_be_text(shop: Shop) -> None:
    shop.execute("INSERT INTO t (id) VALUES (1)", "INSERT INTO t (id) VALUES (2)")
    _, last = shop.subscription.transactions("0/0")
    assert len(shop.changes("0/0", "t")) == 2
    assert [change.new and change.new["id"] for change in shop.changes(str(last.commit_lsn))] == [2]
    assert Lsn("16/B374D848") == Lsn.parse("16/B374D848")
    subscription = shop.subscription
    for call in (subscription.transactions, subscription.receive, subscription.run):
        with pytest.raises(ConfigError, match="'soon' is not an LSN"):
            call("soon")
    assert subscription.receive("0/1") >= last.commit_lsn


def test_follow_waits_for_more_until_it_is_stopped(shop: Shop) -> None:
    subscription = shop.subscription
    seen: list[Any] = []

    def follow() -> None:
        for each in subscription.transactions(table="t", follow=True):
            seen.extend(change.new and change.new["id"] for change in each.changes)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for number in (1, 2):
            shop.execute(f"INSERT INTO t (id) VALUES ({number})")
            eventually(lambda: len(seen) == number)  # noqa: B023
    finally:
        subscription.stop()
        thread.join(10)
    assert not thread.is_alive()
    assert seen == [1, 2]
    # what comes next is not stopped, too
    assert subscription.receive(once=True)
    assert len(shop.changes("0/0", "t", False)) == 2


def test_only_values_need_the_types_of_their_columns(shop: Shop, tmp_path: Path) -> None:
    shop.execute("INSERT INTO whole (id, m) VALUES (1, 'ok')")
    dsn = shop.database.dsn.replace(f":{shop.database.server.port}", ":1")
    elsewhere = shop.database.config(shop.config.subscription.directory, dsn=dsn)
    subscription = Subscription(write_config(elsewhere, tmp_path / "elsewhere.toml"))
    [transaction] = subscription.transactions()
    [change] = transaction.changes
    assert isinstance(change.message, m.Insert)
    assert change.message.new[3] == b"ok"
    with pytest.raises(SourceUnavailable):
        change.new  # noqa: B018
    shop.database.execute("DROP TABLE whole", "DROP TYPE mood")
    [gone] = shop.changes()
    with pytest.raises(UnknownType, match="not built in"):
        gone.new  # noqa: B018


def test_it_imports_no_spark() -> None:
    program = "import sys, walmere.changelog.reader, walmere.subscription.logged_types; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "walmere.changelog.changes" in loaded
    assert not {"pyspark", "deltalake", "duckdb"} & set(loaded)
