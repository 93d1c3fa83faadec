"""Files with timestamps as INT96, as Spark's OPTIMIZE writes them by default: all readers return the same times."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import walmere
from sinks.histories import Change, K, typed
from walmere.apply.fold import fold
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.log.names import log_file
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
ZONED = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("id", pa.int64()), ("at", ZONED), ("many", pa.list_(ZONED))])
BY_ID = Identity("d", ("id",))
TIMES = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(1600, 5, 5, tzinfo=UTC),
    datetime(2026, 7, 1, 12, 0, 0, 123456, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
]


def rows(first: int) -> pa.Table:
    ids = range(first, first + len(TIMES))
    return pa.table([pa.array(ids), pa.array(TIMES, ZONED), pa.array([[each] for each in TIMES])], SCHEMA)


def optimize_as_spark_does(sink: DeltaSink) -> None:
    """Replace the files of the table by one that has the timestamps as INT96."""
    found, now = sink.current(TABLE), int(time.time() * 1000)
    path = Path(sink.location(TABLE), "part-00000-0123-c000.snappy.parquet")
    parts = [batch for piece in sink.scan(TABLE, found.version).pieces for batch in sink.read(piece)]
    pq.write_table(pa.Table.from_batches(parts), path, use_deprecated_int96_timestamps=True, store_schema=False)
    assert pq.read_metadata(path).schema.column(1).physical_type == "INT96"
    common: dict[str, Any] = {"dataChange": False, "partitionValues": {}}
    lines: list[dict[str, Any]] = [{"commitInfo": {"operation": "OPTIMIZE"}}]
    lines += [{"remove": {"path": name, "deletionTimestamp": now, **common}} for name in found.adds]
    lines += [{"add": {"path": path.name, "size": path.stat().st_size, "modificationTime": now, **common}}]
    Path(sink.location(TABLE), log_file(found.version + 1)).write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_times_of_a_file_with_int96_are_the_same_for_all_readers_and_after_upkeep(tmp_path: Path, zone: str) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))
    sink.create(TABLE, SCHEMA)
    sink.commit(TABLE, sink.stage(TABLE, rows(0).to_batches()), Lsn(100), OVERWRITE)
    optimize_as_spark_does(sink)
    sink.commit(TABLE, sink.stage(TABLE, rows(4).to_batches()), Lsn(200))
    connection = duckdb.connect()
    connection.execute(f"SET TimeZone = '{zone}'")
    expected = pa.concat_tables([rows(0), rows(4)]).to_pylist()

    def check() -> None:
        version = sink.version(TABLE)
        sink.open_ledger("shop", [Entry(Lsn(300), None, {str(TABLE): version})])
        point = walmere.lake(sink.path).latest()
        scanned = [batch for piece in sink.scan(TABLE, version).pieces for batch in sink.read(piece)]
        by_duckdb = point.duckdb("t", connection).to_arrow_table().cast(SCHEMA)
        for found in (pa.Table.from_batches(scanned), point.arrow("t"), by_duckdb):
            assert found.sort_by("id").to_pylist() == expected

    check()
    deleted = fold(typed([Change("D", None, (2, None, None), K)], SCHEMA), BY_ID)
    sink.apply(TABLE, deleted, Lsn(300), BY_ID)
    expected = [each for each in expected if each["id"] != 2]
    check()
    planned = sink.plan_upkeep(TABLE, BY_ID, Upkeep(deleted_share=0))
    sink.replace_files(TABLE, [sink.rewrite_files(work) for work in planned])
    assert not any("snappy" in file.name for file in sink.current(TABLE).files)
    check()
