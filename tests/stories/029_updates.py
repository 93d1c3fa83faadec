"""Story 29: an update costs what it changes. Old rows are marked in deletion vectors; upkeep rewrites files later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import DeltaProtocolError

from conftest import Database
from mirror import Mirror
from processes import eventually
from receiving import receive_all
from walmere import lake
from walmere.subscription.status import status


def commits(mirror: Mirror, table: str) -> list[dict[str, Any]]:
    """The history of a table, oldest first."""
    return list(reversed(mirror.delta(table).history()))


def data_files(mirror: Mirror, table: str) -> set[str]:
    return {uri.rpartition("/")[2] for uri in mirror.delta(table).file_uris()}


def test_an_update_of_some_rows_rewrites_no_file(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n int, note text)",
        "INSERT INTO t SELECT i, 0, md5(i::text) FROM generate_series(1, 100000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    copied = data_files(mirror, "t")
    database18.execute(
        "UPDATE t SET n = 1 WHERE id % 1000 = 7",
        "DELETE FROM t WHERE id % 1000 = 8",
        "INSERT INTO t SELECT i, 2, NULL FROM generate_series(200001, 200050) i",
    )
    mirror.run_once()
    mirror.assert_equal("t")
    assert copied < data_files(mirror, "t")
    [*_, last] = commits(mirror, "t")
    assert last["operation"] == "APPLY"
    metrics = {name: int(value) for name, value in last["operationMetrics"].items()}
    assert metrics == {"numRowsInserted": 50, "numRowsUpdated": 100, "numRowsDeleted": 100}
    assert last["engineInfo"].startswith("walmere/")
    assert last["walmere.lsn_before"] < last["walmere.lsn"]
    with pytest.raises(DeltaProtocolError):
        mirror.delta("t").to_pyarrow_table()


@pytest.mark.long
def test_a_large_batch_is_divided_by_key_unless_a_key_changes(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n int, note text)",
        "INSERT INTO t SELECT i, 0, (SELECT string_agg(md5((i * j)::text), '') FROM generate_series(1, 4) j)"
        " FROM generate_series(1, 150000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    database18.execute(
        "UPDATE t SET n = n + 1",
        "DELETE FROM t WHERE id % 10 = 3",
        "INSERT INTO t SELECT i, 0, 'new' FROM generate_series(200001, 201000) i",
        "UPDATE t SET note = 'newer' WHERE id BETWEEN 200500 AND 200600",
    )
    receive_all(database18, mirror.config)  # otherwise, batches begin before all of it is there
    mirror.run_once()
    mirror.assert_equal("t")
    [applied] = [each["version"] for each in commits(mirror, "t") if each["operation"] == "APPLY"]
    log = Path(mirror.delta("t").table_uri.removeprefix("file://"), "_delta_log", f"{applied:020d}.json")
    added = [json.loads(line)["add"] for line in log.read_text().splitlines() if line.startswith('{"add"')]
    assert len([each for each in added if "deletionVector" not in each]) >= 2, "each task has written a file"
    database18.execute("UPDATE t SET n = n + 1", "UPDATE t SET id = -id WHERE id % 7 = 1")
    mirror.run_once()
    mirror.assert_equal("t")
    database18.execute("UPDATE t SET n = n + 1", "TRUNCATE t", "INSERT INTO t VALUES (1, 1, 'one')")
    mirror.run_once()
    mirror.assert_equal("t")


def test_upkeep_rewrites_files_while_changes_arrive_and_points_stay_readable(
    database18: Database, tmp_path: Path
) -> None:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n int, note text)",
        "INSERT INTO t SELECT i, 0, md5(i::text) FROM generate_series(1, 20000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.set("maintenance", deleted_share=0.01)
    with mirror.following():
        mirror.becomes_equal("t")
        number = 0

        def optimized() -> bool:
            nonlocal number
            number += 1
            database18.execute(f"UPDATE t SET n = {number} WHERE id % 50 = {number % 50}")
            return any(each["operation"] == "OPTIMIZE" for each in commits(mirror, "t"))

        eventually(optimized, 60, every=0.2)
        database18.execute("UPDATE t SET n = -1 WHERE id <= 100")
        mirror.becomes_equal("t")
        mirror.becomes(lambda: status(mirror.config)["tables"][0]["written_bytes_per_hour"] is not None)
    points = lake(tmp_path / "lake").points()
    assert len(points) > 2
    assert {len(point.arrow("t")) for point in points} == {20000}
    mirror.run_once()
    mirror.assert_equal("t")


@pytest.mark.long
def test_a_table_is_switched_to_rewriting_and_back_in_place(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n int, at timestamp)",
        "INSERT INTO t SELECT i, 0, now() FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.run_once()
    text = mirror.file.read_text()
    for number, vectors in enumerate((True, False, True, False), 1):
        mirror.file.write_text(text)
        mirror.set("target", deletion_vectors=vectors)
        database18.execute(f"UPDATE t SET n = {number} WHERE id % 10 = {number}")
        mirror.run_once()
        mirror.assert_equal("t")
        assert ("deletionVectors" in (mirror.delta("t").protocol().reader_features or ())) is vectors
    assert mirror.delta("t").to_pyarrow_table().num_rows == 1000, "readers without vectors can read it again"
    assert len([each for each in commits(mirror, "t") if each["operation"] == "COPY"]) == 1


def test_without_vectors_batches_wait_when_they_rewrite_too_much(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n int, note text)",
        "INSERT INTO t SELECT i, 0, md5(i::text) FROM generate_series(1, 50000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.set("target", deletion_vectors=False, max_rewrite_bytes_per_hour=1 << 20)
    with mirror.following():
        mirror.becomes_equal("t")
        number = 0

        def waits() -> bool:
            nonlocal number
            number += 1
            database18.execute(f"UPDATE t SET n = {number} WHERE id % 1000 = 1")
            return status(mirror.config)["next_batch"] is not None

        eventually(waits, 60, every=0.2)
        before = mirror.delta("t").version()
        database18.execute("UPDATE t SET n = -1 WHERE id = 5")
        eventually(lambda: status(mirror.config)["behind"] == ["public.t"], 30)
        assert mirror.delta("t").version() <= before + 1, "at most the batch that had begun"
        assert json.dumps(status(mirror.config))
    mirror.run_once()  # a run with an end does not wait
    mirror.assert_equal("t")
