"""The plan of a batch: what it asks, and how often."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from conftest import Database
from mirror import Mirror
from receiving import receive_all
from walmere.subscription.batches import Batches
from walmere.subscription.tables import Tables


def test_spark_is_asked_once_how_many_tasks_it_runs_however_many_tables_a_batch_changes(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    names = [f"t{number}" for number in range(8)]
    database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(*(f"INSERT INTO {name} VALUES (1)" for name in names))
    receive_all(database, mirror.config)
    asked: list[int] = []

    def parallelism() -> int:
        asked.append(2)
        return 2

    directory = mirror.config.subscription.directory
    with closing(Batches(directory, Tables(directory), parallelism, spread=True)) as batches:
        assert batches.plan(batches.log_end)[1]
        _, tasks = batches.plan(batches.log_end)
    assert sorted(job.target.name for task in tasks for job in task) == names
    assert [len(task) for task in tasks] == [4, 4]
    assert asked == [2, 2], "once for each of the two plans"
