"""What a query plans from a change log, and what it refuses rather than read it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from receiving import receive_all
from walmere.errors import ChangeLogMismatch, TypeMismatch
from walmere.lsn import Lsn
from walmere.source.query import StreamQuery, plan_once, schema_of


@pytest.fixture
def options(database_under_test: Database, tmp_path: Path) -> dict[str, str]:
    """Of a log with one insert into one table."""
    database_under_test.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    receive_all(database_under_test, database_under_test.config(tmp_path))
    database_under_test.execute("INSERT INTO t VALUES (1, 1)")
    receive_all(database_under_test, database_under_test.config(tmp_path))
    return {"directory": str(tmp_path), "table": "t"}


def test_a_checkpoint_that_is_ahead_of_the_log_or_of_another_system_is_refused(options: dict[str, str]) -> None:
    query = StreamQuery(options, schema_of(options))
    first, latest = query.first(), query.latest()
    assert len(query.plan(first, latest)) == 1
    ahead = {**latest, "lsn": str(Lsn(Lsn.parse(latest["lsn"]) + 1000))}
    for start, end in ((ahead, ahead), (latest, ahead)):
        with pytest.raises(ChangeLogMismatch, match=rf"checkpoint at {ahead['lsn']}.*the log ends at {latest['lsn']}"):
            query.plan(start, end)
    other = {**latest, "system": "1"}
    with pytest.raises(ChangeLogMismatch, match="is of system 1, the log of"):
        query.plan(other, other)
    assert query.plan(latest, latest) == []


def test_a_query_may_begin_where_the_log_has_not_come_to_yet(options: dict[str, str]) -> None:
    query = StreamQuery({**options, "startingLsn": "FFFF/0"}, schema_of(options))
    assert query.first() == query.latest()
    assert query.plan(query.first(), query.latest()) == []


@pytest.mark.parametrize(
    ("columns", "goes_on"), [("id, _op", True), ("id, n", False), ("id, _before", False), ("id, _unchanged", False)]
)
def test_a_column_that_changes_its_type_counts_wherever_it_is(
    options: dict[str, str], database_under_test: Database, tmp_path: Path, columns: str, goes_on: bool
) -> None:
    database_under_test.execute("ALTER TABLE t ADD note text", "INSERT INTO t VALUES (2, 2, 'two')")
    receive_all(database_under_test, database_under_test.config(tmp_path))
    options = {**options, "columns": columns}
    query = StreamQuery(options, schema_of(options))
    first = query.latest()
    database_under_test.execute("ALTER TABLE t ALTER n TYPE text", "UPDATE t SET n = 'abc' WHERE id = 1")
    receive_all(database_under_test, database_under_test.config(tmp_path))
    if goes_on:
        assert len(query.plan(first, query.latest())) == 1
    else:
        with pytest.raises(TypeMismatch, match="its columns were altered there: n"):
            query.plan(first, query.latest())


def test_a_read_up_to_an_lsn_has_no_tasks_for_what_lies_behind_it(
    options: dict[str, str], database_under_test: Database, tmp_path: Path
) -> None:
    ending = StreamQuery(options, schema_of(options)).latest()["lsn"]
    for number in range(2, 5):
        database_under_test.execute(f"INSERT INTO t VALUES ({number})")
        receive_all(database_under_test, database_under_test.config(tmp_path))
    schema = schema_of(options)
    [all_of_it], [some] = plan_once(options, schema), plan_once({**options, "endingLsn": ending}, schema)
    assert (len(all_of_it.blocks.refs), len(some.blocks.refs)) == (4, 1)
