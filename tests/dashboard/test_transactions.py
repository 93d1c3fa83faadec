"""The last transactions of a real change log: tables and numbers, and never a value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conftest import Database
from receiving import receive_all
from walmere.dashboard import transactions
from walmere.dashboard.transactions import PassingTransactions
from walmere.lsn import Lsn

SECRET = "only the source may know this"


def create(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "CREATE TABLE lines (id int PRIMARY KEY, note text)",
        "CREATE PUBLICATION pub FOR TABLE orders, lines",
        f"SELECT pg_create_logical_replication_slot('{database.slot}', 'pgoutput')",
    )


def test_transactions_are_shown_with_their_tables_and_numbers(database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path)
    create(database18)
    database18.execute(
        f"BEGIN; INSERT INTO orders SELECT n, '{SECRET}' FROM generate_series(1, 3) n; INSERT INTO lines SELECT 1; END",
        f"BEGIN; UPDATE orders SET note = '{SECRET}'; DELETE FROM lines; COMMIT",
        "TRUNCATE orders, lines",
    )
    passing = PassingTransactions(config.changelog)
    passing.read()
    assert not passing.last, "there is no log yet"
    end = receive_all(database18, config)
    passing.read()
    first, second, third = passing.last
    assert dict(first.tables) == {"public.orders": {"inserts": 3}, "public.lines": {"inserts": 1}}
    assert dict(second.tables) == {"public.orders": {"updates": 3}, "public.lines": {"deletes": 1}}
    assert dict(third.tables) == {"public.orders": {"truncates": 1}, "public.lines": {"truncates": 1}}
    assert first.commit_lsn < second.commit_lsn < third.commit_lsn < end
    assert first.xid is not None
    assert passing.changes_until(end) == 10
    assert SECRET not in repr([dataclasses.astuple(each) for each in passing.last])

    database18.execute("INSERT INTO orders VALUES (9)")
    end = receive_all(database18, config)
    passing.read()
    assert dict(passing.last[-1].tables) == {"public.orders": {"inserts": 1}}
    assert passing.changes_until(end) == 11
    assert passing.changes_until(Lsn(1)) is None

    again = PassingTransactions(config.changelog)
    again.read()
    assert list(again.last) == list(passing.last)


def test_a_large_segment_is_one_line_and_is_not_opened(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "MAX_ROWS", 10)
    config = database18.config(tmp_path)
    create(database18)
    database18.execute(*(f"INSERT INTO orders SELECT i FROM generate_series({n}00, {n}09) i" for n in (1, 2, 3)))
    receive_all(database18, config)
    for segment in config.changelog.glob("*.arrow"):
        segment.unlink()
    passing = PassingTransactions(config.changelog)
    passing.read()
    assert sum(each.count for each in passing.last) == 3
    shown = [dict(each.tables) for each in passing.last]
    assert sum(counts["public.orders"]["changes"] for counts in shown) == 30


def test_a_log_that_was_dropped_and_begins_anew_is_read_again(database18: Database, tmp_path: Path) -> None:
    config = database18.config(tmp_path)
    create(database18)
    database18.execute("INSERT INTO orders VALUES (1)")
    receive_all(database18, config)
    passing = PassingTransactions(config.changelog)
    passing.read()
    assert len(passing.last) == 1
    database18.execute(f"SELECT pg_drop_replication_slot('{database18.slot}')")
    config.changelog.rename(tmp_path / "gone")
    passing.read()
    database18.execute(
        f"SELECT pg_create_logical_replication_slot('{database18.slot}', 'pgoutput')", "INSERT INTO lines VALUES (1)"
    )
    receive_all(database18, config)
    passing.read()
    assert [dict(each.tables) for each in passing.last] == [{"public.lines": {"inserts": 1}}]
