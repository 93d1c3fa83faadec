"""The lag of a table is the age of its oldest commit that the log has and the table has not; of nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Database
from receiving import logged, receive_all
from walmere.changelog.reader import Reader
from walmere.changelog.search import ManifestSearch
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.subscription.lag import oldest_missing
from walmere.subscription.state import Phase, TableState


def missing(config: Config, *tables: TableState) -> dict[str, int | None]:
    with ManifestSearch(config.changelog) as log:
        found = oldest_missing(config.changelog, log, tables)
    return {name.removeprefix("public."): each.commit_time for name, each in found.items()}


@pytest.fixture
def config(database_under_test: Database, tmp_path: Path) -> Config:
    database_under_test.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "CREATE TABLE c (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR TABLE a, b, c",
    )
    made = database_under_test.config(tmp_path)
    # so that all of it is one segment
    made = made.model_copy(update={"subscription": made.subscription.model_copy(update={"segment_seconds": 1.0})})
    receive_all(database_under_test, made)
    return made


def table(database: Database, name: str, position: Lsn) -> TableState:
    oid = database.value(f"SELECT '{name}'::regclass::oid")
    return TableState(TableName("public", name), oid, Phase.READY, applied_lsn=position)


def test_the_first_commit_after_the_position_counts_in_the_middle_of_a_segment_too(
    database_under_test: Database, config: Config
) -> None:
    database = database_under_test
    for statement in ("INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1)", "INSERT INTO a VALUES (2)"):
        database.execute(statement, "SELECT pg_sleep(0.05)")
    database.execute("SELECT pg_logical_emit_message(true, 'note', 'hello')")
    end = receive_all(database, config)
    first, second, third, message = [each.commit_lsn for each in logged(config)]
    with ManifestSearch(config.changelog) as log:
        [whole] = log.records_after(Lsn(0), {database.value("SELECT 'a'::regclass::oid")})
        assert log.end_lsn == end
    times = commit_times(config)
    assert whole.commit_time == times[message], "it has the time of its last transaction"

    def at(position: Lsn) -> dict[str, int | None]:
        return missing(config, *(table(database, name, position) for name in "abc"))

    assert at(first) == {"a": times[first], "b": times[second]}
    assert at(second) == {"a": times[third], "b": times[second]}
    assert at(third) == {"a": times[third]}
    assert at(message) == {}, "what no table has counts for none"
    assert missing(config, TableState(TableName("public", "messages"), 0, Phase.READY, applied_lsn=first)) == {
        "messages": times[message]
    }, "but it is a row of the table of messages"
    uncopied = replace(table(database, "a", first), phase=Phase.INIT)
    assert missing(config, uncopied) == {}, "nothing is known of it"


def test_a_large_transaction_counts_from_its_commit_and_without_what_was_rolled_back(
    database_under_test: Database, config: Config
) -> None:
    database = database_under_test
    database.execute("ALTER SYSTEM SET logical_decoding_work_mem = '64kB'", "SELECT pg_reload_conf()")
    try:
        position = receive_all(database, config)
        with database.connection.transaction():
            database.execute("INSERT INTO a SELECT generate_series(1, 5000)", "SAVEPOINT s")
            database.execute("INSERT INTO b SELECT generate_series(1, 5000)", "ROLLBACK TO s")
        receive_all(database, config)
    finally:
        database.execute("ALTER SYSTEM RESET logical_decoding_work_mem", "SELECT pg_reload_conf()")
    [committed] = commit_times(config).values()
    assert missing(config, *(table(database, name, position) for name in "ab")) == {"a": committed}


def commit_times(config: Config) -> dict[Lsn, int]:
    with Reader(config.changelog) as reader:
        return {each.commit_lsn: round(each.commit_time.timestamp() * 1e6) for each in reader.transactions()}
