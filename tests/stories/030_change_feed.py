"""Story 30: Spark with the jar of Delta beside the mirror: its change data feed, history, DELETE and OPTIMIZE."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.delta_spark import DeltaSpark, delta_spark

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere.config import DeltaTarget
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import Upkeep
from walmere.sinks.delta.sink import DeltaSink

pytestmark = pytest.mark.long

TABLE = TableName("public", "t")
ROWS = 5000


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeltaSpark]:
    with delta_spark(tmp_path_factory.mktemp("delta_spark")) as found:
        yield found


@pytest.fixture
def mirror(database18: Database, tmp_path: Path) -> Mirror:
    database18.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, at timestamptz)",
        "INSERT INTO t SELECT i, 'copied', timestamptz '2026-01-01' + i * interval '1 h'"
        f" FROM generate_series(1, {ROWS}) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database18, tmp_path)
    mirror.set("maintenance", bytes_per_hour=0)  # it is done where a test says so
    mirror.run_once()
    return mirror


def sink_of(mirror: Mirror) -> DeltaSink:
    assert isinstance(mirror.config.target, DeltaTarget)
    return DeltaSink(str(mirror.config.target.path))


def path_of(mirror: Mirror) -> str:
    return sink_of(mirror).location(TABLE)


def feed(spark: DeltaSpark, mirror: Mirror, first: int) -> list[tuple[int, str, int, str]]:
    """All changes of a version and later ones: version, kind, id, v."""
    rows = spark.load(path_of(mirror), readChangeFeed="true", startingVersion=str(first)).rows
    return sorted((row["_commit_version"], row["_change_type"], row["id"], row["v"]) for row in rows)


def apply(mirror: Mirror, *statements: str) -> int:
    """Run statements at the source, apply them, and return the version of the batch."""
    mirror.database.execute(*statements)
    mirror.run_once()
    mirror.assert_equal("t")
    [last] = mirror.delta("t").history(1)
    assert last["operation"] == "APPLY"
    return int(last["version"])


def snapshot_lsn(mirror: Mirror) -> Lsn:
    [state] = mirror.tables()
    return state.snapshot_lsn


def protocol(mirror: Mirror) -> dict[str, Any]:
    found = mirror.delta("t").protocol()
    return {"reader": set(found.reader_features or ()), "writer": set(found.writer_features or ())}


def test_the_change_feed_of_a_batch_has_the_changed_rows_and_no_others(spark: DeltaSpark, mirror: Mirror) -> None:
    spark.sql(f"ALTER TABLE delta.`{path_of(mirror)}` SET TBLPROPERTIES (delta.enableChangeDataFeed = true)")
    before = protocol(mirror)
    assert "changeDataFeed" in before["writer"]
    first = apply(
        mirror,
        "UPDATE t SET v = 'updated' WHERE id IN (7, 8)",
        "DELETE FROM t WHERE id = 9",
        f"INSERT INTO t VALUES ({ROWS + 1}, 'inserted', now())",
    )
    changes = [
        *[(first, "delete", key, "copied") for key in (7, 8, 9)],
        *[(first, "insert", key, "updated") for key in (7, 8)],
        (first, "insert", ROWS + 1, "inserted"),
    ]
    assert feed(spark, mirror, first) == changes
    second = apply(mirror, "UPDATE t SET v = 'again' WHERE id IN (8, 10)")  # a vector grows, and a small file gets one
    changes += [
        (second, "delete", 8, "updated"),
        (second, "delete", 10, "copied"),
        *[(second, "insert", key, "again") for key in (8, 10)],
    ]
    assert feed(spark, mirror, first) == changes
    # more deletes than fit into the log: the vector is a file
    third = apply(mirror, f"DELETE FROM t WHERE id > 1000 AND id <= {ROWS} AND id % 7 = 0")
    gone = [key for key in range(1001, ROWS + 1) if key % 7 == 0]
    changes += [(third, "delete", key, "copied") for key in gone]
    assert feed(spark, mirror, first) == changes

    upkeep = sink_of(mirror).optimize(TABLE, limits=Upkeep(deleted_share=0.0001))
    assert upkeep is not None
    assert upkeep > third
    assert feed(spark, mirror, first) == changes, "upkeep does not change rows"
    last = apply(mirror, "UPDATE t SET v = 'last' WHERE id = 1")
    assert feed(spark, mirror, upkeep) == [(last, "delete", 1, "copied"), (last, "insert", 1, "last")]
    mirror.database.execute("TRUNCATE t", "INSERT INTO t VALUES (1, 'new', now())")
    expected = read_delta(mirror.delta("t")).num_rows
    truncated = apply(mirror)
    kinds = [kind for _, kind, _, _ in feed(spark, mirror, truncated)]
    assert (kinds.count("delete"), kinds.count("insert"), len(kinds)) == (expected, 1, expected + 1)
    assert protocol(mirror) == before


def test_sparks_history_shows_rows_and_lsns(spark: DeltaSpark, mirror: Mirror) -> None:
    apply(mirror, "UPDATE t SET v = 'x' WHERE id <= 3", "DELETE FROM t WHERE id = 4")
    sink_of(mirror).optimize(TABLE, limits=Upkeep(deleted_share=0.0001))
    upkeep, applied, copied = spark.sql(f"DESCRIBE HISTORY delta.`{path_of(mirror)}` LIMIT 3").rows
    assert [each["operation"] for each in (upkeep, applied, copied)] == ["OPTIMIZE", "APPLY", "COPY"]
    assert copied["operationMetrics"]["numRowsInserted"] == str(ROWS)
    metrics = applied["operationMetrics"]
    assert metrics == {"numRowsInserted": "0", "numRowsUpdated": "3", "numRowsDeleted": "1"}
    since, until = (applied["operationParameters"][each].strip('"') for each in ("fromLsn", "toLsn"))
    assert Lsn.parse(since) == snapshot_lsn(mirror) < Lsn.parse(until) == sink_of(mirror).applied(TABLE)
    assert applied["engineInfo"].startswith("walmere/")
    assert upkeep["operationMetrics"]["numRowsPurged"] == "4"


def test_what_spark_writes_to_the_table_works_and_a_change_of_rows_is_noticed(
    spark: DeltaSpark, mirror: Mirror, caplog: pytest.LogCaptureFixture
) -> None:
    path, sink = path_of(mirror), sink_of(mirror)
    version = apply(mirror, "UPDATE t SET v = 'x' WHERE id % 100 = 1", "DELETE FROM t WHERE id = 4")
    copied = snapshot_lsn(mirror)

    spark.sql(f"OPTIMIZE delta.`{path}`")
    [optimized] = mirror.delta("t").history(1)
    assert (optimized["operation"], optimized["engineInfo"].partition("/")[0]) == ("OPTIMIZE", "Apache-Spark")
    assert sink.changed_by_others(TABLE, version, sink.version(TABLE)) is None
    mirror.assert_equal("t")
    version = apply(mirror, "UPDATE t SET v = 'y' WHERE id % 100 = 2", "DELETE FROM t WHERE id = 5")
    assert snapshot_lsn(mirror) == copied, "it was not copied again"

    spark.sql(f"DELETE FROM delta.`{path}` WHERE id % 10 = 3")
    assert sink.changed_by_others(TABLE, version, sink.version(TABLE)) == f"version {version + 1}, DELETE"
    expected = sorted(row["id"] for row in spark.sql(f"SELECT id FROM delta.`{path}`").rows)
    assert len(expected) < mirror.database.value("SELECT count(*) FROM t")
    assert sorted(read_delta(mirror.delta("t"))["id"].to_pylist()) == expected
    scan = sink.scan(TABLE, sink.version(TABLE))
    assert (
        sorted(key for piece in scan.pieces for batch in sink.read(piece, ["id"]) for key in batch["id"].to_pylist())
        == expected
    )

    mirror.database.execute("INSERT INTO t VALUES (0, 'new', now())")
    mirror.run_once()
    mirror.assert_equal("t")
    assert snapshot_lsn(mirror) > copied, "it was copied again"
    assert "DELETE" in caplog.text
