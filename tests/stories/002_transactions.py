"""Story 2: transactions that do not fit: large, streamed while in progress, prepared, or all of these at once."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from conftest import Database
from receiving import changes, files, logged, named_files, receive_all, summary
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Transaction
from walmere.config import Config

BIG = 3000  # rows of about 100 bytes: more than the 64 kB after which the server streams here


@pytest.fixture
def streaming(database: Database, tmp_path: Path) -> Config:
    """A table whose larger transactions are streamed; small segments, so that one transaction has several."""
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    config = database.config(tmp_path)
    config = config.model_copy(
        update={"subscription": config.subscription.model_copy(update={"segment_bytes": 1 << 16})}
    )
    receive_all(database, config)
    return config


def insert(connection: psycopg.Connection[tuple[object, ...]], first: int, count: int = BIG) -> None:
    connection.execute(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 3) FROM generate_series(%s::int, %s::int) i",
        [first, first + count - 1],
    )


def ids(config: Config) -> list[int]:
    return [int(change[2]["id"]) for change in changes(config)]


def by_reference(config: Config) -> list[Transaction]:
    with Manifest(config.changelog) as manifest:
        return [entry for entry in manifest.entries() if isinstance(entry, Transaction)]


def test_a_streamed_transaction_is_published_by_reference(database: Database, streaming: Config) -> None:
    insert(database.connection, 0)
    receive_all(database, streaming)
    assert ids(streaming) == list(range(BIG))
    [transaction] = by_reference(streaming)
    assert len(transaction.segments) > 1
    assert all(segment.streamed for segment in transaction.segments)


def test_streams_that_alternate_are_told_apart_and_ordered_by_commit(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn) as first, psycopg.connect(database.dsn) as second:
        insert(first, 0)
        insert(second, 100_000)
        insert(first, 10_000)
        insert(database.connection, 500_000, 3)
        second.commit()
        insert(database.connection, 600_000, 2)
        first.commit()
    receive_all(database, streaming)
    of = [sorted({int(c[2]["id"]) // 10_000 for c in transaction.changes}) for transaction in logged(streaming)]
    assert of == [[50], [10], [60], [0, 1]]
    assert len(ids(streaming)) == len(set(ids(streaming))) == 3 * BIG + 5


def test_a_streamed_transaction_that_rolls_back_leaves_nothing(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn) as other:
        insert(other, 0)
        other.rollback()
    insert(database.connection, 100_000, 1)
    receive_all(database, streaming)
    assert ids(streaming) == [100_000]
    assert files(streaming) == named_files(streaming)


def test_subtransactions_that_roll_back_inside_a_stream_are_left_out(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn) as other:
        insert(other, 0)
        other.execute("SAVEPOINT a")
        insert(other, 10_000)
        other.execute("SAVEPOINT b")
        insert(other, 20_000)
        other.execute("RELEASE SAVEPOINT b")
        other.execute("ROLLBACK TO SAVEPOINT a")
        insert(other, 30_000)
        other.execute("SAVEPOINT c")
        insert(other, 40_000)
        other.commit()
    receive_all(database, streaming)
    assert sorted({i // 10_000 for i in ids(streaming)}) == [0, 3, 4]
    assert len(ids(streaming)) == 3 * BIG


def test_a_rolled_back_alter_table_inside_a_stream_does_not_leak(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn) as other:
        insert(other, 0)
        other.execute("SAVEPOINT a")
        other.execute("ALTER TABLE t RENAME v TO w")
        insert(other, 10_000)
        other.execute("ROLLBACK TO SAVEPOINT a")
        insert(other, 20_000)
        other.commit()
    receive_all(database, streaming)
    assert {tuple(change[2]) for change in changes(streaming, table="t")} == {("id", "v")}
    assert len(ids(streaming)) == 2 * BIG


def test_truncate_and_messages_inside_a_stream_keep_their_place(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn) as other:
        insert(other, 0)
        other.execute("TRUNCATE t")
        other.execute("SELECT pg_logical_emit_message(true, 'm', 'inside')")
        insert(other, 10_000)
        other.commit()
    receive_all(database, streaming)
    kinds = [change[0] for change in changes(streaming)]
    assert kinds == ["I"] * BIG + ["T", "M"] + ["I"] * BIG


def test_without_streaming_a_large_transaction_is_spooled_and_published_by_reference(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.changelog.assembly.SPOOL_BYTES", 1 << 16)
    monkeypatch.setattr("walmere.subscription.receiver.FEED_BYTES", 1 << 16)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path, streaming=False)
    receive_all(database, config)
    insert(database.connection, 0)
    insert(database.connection, 10_000, 1)
    receive_all(database, config)
    assert ids(config) == [*range(BIG), 10_000]
    [transaction] = by_reference(config)
    assert not any(segment.streamed for segment in transaction.segments)


@pytest.mark.since(15, "two-phase commits in pgoutput")
@pytest.mark.parametrize("count", [5, BIG], ids=["small", "streamed"])
def test_a_prepared_transaction_counts_from_its_commit_prepared(database: Database, tmp_path: Path, count: int) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    config = database.config(tmp_path, two_phase=True)
    receive_all(database, config)
    gid = f"it's {database.name}"
    quoted = gid.replace("'", "''")
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute("BEGIN")
        insert(other, 0, count)
        other.execute("SAVEPOINT s")
        insert(other, 100_000, count)
        other.execute("ROLLBACK TO s")
        other.execute(f"PREPARE TRANSACTION '{quoted}'")
    insert(database.connection, 500_000, 1)
    receive_all(database, config)
    assert ids(config) == [500_000]
    assert list(summary(config).prepared) == [gid]
    database.execute(f"COMMIT PREPARED '{quoted}'")
    receive_all(database, config)  # another process, in effect: the log remembers what was prepared
    assert ids(config) == [500_000, *range(count)]
    assert summary(config).prepared == {}
    assert files(config) == named_files(config)


@pytest.mark.since(15, "two-phase commits in pgoutput")
@pytest.mark.parametrize("count", [5, BIG], ids=["small", "streamed"])
def test_a_rolled_back_prepared_transaction_leaves_nothing(database: Database, tmp_path: Path, count: int) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    config = database.config(tmp_path, two_phase=True)
    receive_all(database, config)
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute("BEGIN")
        insert(other, 0, count)
        other.execute(f"PREPARE TRANSACTION '{database.name}'")
    receive_all(database, config)
    assert len(files(config)) == 1
    database.execute(f"ROLLBACK PREPARED '{database.name}'")
    receive_all(database, config)
    assert ids(config) == []
    assert files(config) == set()


def test_without_two_phase_a_prepared_transaction_comes_with_its_commit(database: Database, streaming: Config) -> None:
    with psycopg.connect(database.dsn, autocommit=True) as other:
        other.execute("BEGIN")
        insert(other, 0)
        other.execute(f"PREPARE TRANSACTION '{database.name}'")
    receive_all(database, streaming)
    assert ids(streaming) == []
    database.execute(f"COMMIT PREPARED '{database.name}'")
    receive_all(database, streaming)
    assert ids(streaming) == list(range(BIG))


def test_a_value_larger_than_a_segment_passes_through(database: Database, streaming: Config) -> None:
    database.execute("INSERT INTO t SELECT 1, string_agg(md5(i::text), '') FROM generate_series(1, 200000) i")
    receive_all(database, streaming)
    [(_, _, row)] = changes(streaming)
    assert row["v"] == database.value("SELECT v FROM t")
