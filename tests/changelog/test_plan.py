"""Batches are planned from a log that grows and is trimmed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from receiving import receive_all
from walmere.changelog import plan
from walmere.changelog.plan import Planner, divide, messages
from walmere.config import Config
from walmere.definition import MESSAGES_OID
from walmere.lsn import Lsn


@pytest.fixture
def config(database18: Database, tmp_path: Path) -> Config:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database18.config(tmp_path)
    receive_all(database18, config)
    return config


def ids(planner: Planner, config: Config, oid: int, position: Lsn, end: Lsn) -> int:
    """How many rows a table at this position gets."""
    refs = planner.plan({oid: position}, end).blocks.get(oid, [])
    return sum(batch.num_rows for _, batch in messages(config.changelog, refs))


def kinds(planner: Planner, config: Config, position: Lsn, end: Lsn) -> str:
    """The kinds of messages that the table of logical messages gets."""
    refs = planner.plan({MESSAGES_OID: position}, end).blocks.get(MESSAGES_OID, [])
    return "".join(kind for _, batch in messages(config.changelog, refs) for kind in batch["kind"].to_pylist())


def test_a_batch_goes_to_the_end_or_over_so_many_bytes(database18: Database, config: Config) -> None:
    oid = database18.value("SELECT 't'::regclass::oid::int8")
    planner = Planner(config.changelog)
    start = planner.start_lsn
    assert planner.end_of_batch(start, 1 << 20) == planner.end_of_batch(start, 1)
    middle: list[Lsn] = []
    for first in (1, 101):
        database18.execute(f"INSERT INTO t SELECT generate_series({first}, {first + 99})")
        receive_all(database18, config)
        middle.append(planner.end_of_batch(start, 1 << 20))
    assert start < middle[0] < middle[1]
    assert planner.end_of_batch(start, 1) <= middle[0], "one record is enough bytes"
    assert ids(planner, config, oid, start, middle[0]) == 100
    assert ids(planner, config, oid, start, middle[1]) == 200
    assert ids(planner, config, oid, middle[0], middle[1]) == 100
    # what was forgotten with the last plan is read again for a table that is further back
    assert ids(planner, config, oid, start, middle[1]) == 200
    planner.close()


def test_while_behind_a_batch_waits_for_more_but_not_for_ever(database18: Database, config: Config) -> None:
    time = [0.0]
    commit = float(database18.value("SELECT extract(epoch FROM clock_timestamp())"))
    time[0] = commit + 100
    planner = Planner(config.changelog, clock=lambda: time[0])
    start = planner.end_of_batch(planner.start_lsn, 1 << 20)
    database18.execute("INSERT INTO t VALUES (1)")
    receive_all(database18, config)
    assert planner.end_of_batch(start, 1 << 20) == start, "more may come"
    until = planner.end_lsn
    ends = Planner(config.changelog, until=until, clock=lambda: time[0])
    assert ends.end_of_batch(start, 1 << 20) == until, "the run ends there"
    ends.close()
    ends = Planner(config.changelog, until=Lsn(until + 1), clock=lambda: time[0])
    assert ends.end_of_batch(start, 1 << 20) == start, "the run ends later"
    ends.close()
    assert planner.end_of_batch(start, 1) > start, "it is large enough"
    at_once = Planner(config.changelog, wait_for_more=False, clock=lambda: time[0])
    assert at_once.end_of_batch(start, 1 << 20) > start, "a database does not wait"
    at_once.close()
    time[0] += plan.QUIET_SECONDS * 1.1
    assert planner.end_of_batch(start, 1 << 20) > start, "nothing more has come"
    waiting = time[0]
    for number in range(2, 100):
        time[0] += plan.QUIET_SECONDS / 2
        database18.execute(f"INSERT INTO t VALUES ({number})")
        receive_all(database18, config)
        if planner.end_of_batch(start, 1 << 20) > start:
            break
    assert 0 < time[0] - waiting <= plan.MAX_WAIT_SECONDS + plan.QUIET_SECONDS
    time[0] = commit  # the log is fresh
    database18.execute("INSERT INTO t VALUES (100)")
    end = receive_all(database18, config)
    assert planner.end_of_batch(start, 1 << 20) >= end
    planner.close()


def test_it_goes_on_when_retention_has_replaced_the_manifest(database18: Database, config: Config) -> None:
    oid = database18.value("SELECT 't'::regclass::oid::int8")
    planner = Planner(config.changelog)
    database18.execute("INSERT INTO t VALUES (1)")
    receive_all(database18, config)
    end = planner.end_of_batch(planner.start_lsn, 1 << 20)
    trimming = config.model_copy(update={"subscription": config.subscription.model_copy(update={"keep_seconds": 0})})
    database18.execute("INSERT INTO t VALUES (2), (3)")
    receive_all(database18, trimming)
    later = planner.end_of_batch(end, 1 << 20)
    assert later > end
    assert ids(planner, config, oid, end, later) == 2
    planner.close()


def test_a_message_without_a_transaction_is_in_the_batch_that_ends_at_it_and_in_no_other(
    database18: Database, config: Config
) -> None:
    planner = Planner(config.changelog)
    start = planner.end_of_batch(planner.start_lsn, 1 << 20)
    end = Lsn.parse(database18.value("SELECT pg_logical_emit_message(false, 'prefix', 'content')::text"))
    database18.execute("INSERT INTO t VALUES (1)")
    receive_all(database18, config)
    assert kinds(planner, config, start, end) == "M"
    assert "M" not in kinds(planner, config, end, planner.end_lsn)
    planner.close()


def test_only_inserts_are_divided_among_tasks(database18: Database, config: Config) -> None:
    oid = database18.value("SELECT 't'::regclass::oid::int8")
    planner = Planner(config.changelog)
    start = planner.start_lsn
    for first in (1, 1001, 2001, 3001):
        database18.execute(f"INSERT INTO t SELECT generate_series({first}, {first + 999})")
        receive_all(database18, config)
    refs = planner.plan({oid: start}, planner.end_of_batch(start, 1 << 20)).blocks[oid]
    parts = divide(refs, 2, 1)
    assert [ref for part in parts for ref in part] == refs
    assert [len(part) for part in parts] == [2, 2]
    assert divide(refs, 1, 1) == divide(refs, 2, 1 << 30) == [refs]
    database18.execute("DELETE FROM t WHERE id = 1")
    receive_all(database18, config)
    refs = planner.plan({oid: start}, planner.end_of_batch(start, 1 << 20)).blocks[oid]
    assert divide(refs, 2, 1) == [refs]
    planner.close()


def test_a_batch_ends_where_it_is_cut_also_between_two_transactions_of_one_segment(
    database18: Database, config: Config
) -> None:
    oid = database18.value("SELECT 't'::regclass::oid::int8")
    planner = Planner(config.changelog)
    start = planner.end_of_batch(planner.start_lsn, 1 << 20)
    points: list[Lsn] = []
    for number in range(1, 4):
        database18.execute(f"INSERT INTO t VALUES ({number})")
        points.append(Lsn.parse(database18.value("SELECT pg_current_wal_insert_lsn()::text")))
    receive_all(database18, config)
    asked: list[tuple[Lsn, Lsn]] = []

    def at_the_second(start: Lsn, log_end: Lsn) -> Lsn | None:
        asked.append((start, log_end))
        return points[1] if start < points[1] <= log_end else None

    end = planner.end_of_batch(start, 1 << 20)
    cut = planner.end_of_batch(start, 1 << 20, at_the_second)
    assert asked == [(start, end)]
    assert (cut, planner.end_of_batch(cut, 1 << 20, at_the_second)) == (points[1], end)
    assert ids(planner, config, oid, start, cut) == 2
    assert ids(planner, config, oid, cut, end) == 1, "the rest of the same segment"
    assert ids(planner, config, oid, start, end) == 3
    assert planner.end_of_batch(start, 1 << 20, lambda start, _: start) == start, "it is held"
    planner.close()
