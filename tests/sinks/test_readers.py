"""Every reader on the machine returns the same rows of a table with deletion vectors, and none that is deleted.

A reader that cannot read them must refuse the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

import walmere
from delta_rows import read_delta
from sinks.histories import Change, typed
from walmere.apply.fold import fold
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.files import parquet
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.sink import DeltaSink
from walmere.spark.session import session

TABLE = TableName("public", "t")
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("zoned", pa.timestamp("us", "UTC")),
        ("stamp", pa.timestamp("us")),
        ("day", pa.date32()),
        ("bytes", pa.binary()),
        ("list", pa.list_(pa.int32())),
        ("double", pa.float64()),
        ("bool", pa.bool_()),
    ]
)
BY_ID = Identity("d", ("id",))
ROWS = 3000
FILES = 3

Row = tuple[Any, ...]


def row(key: int, change: int = 0) -> Row:
    if key % 11 == 5:
        return (key, f"{change}", *([None] * (len(SCHEMA) - 2)))
    moment = datetime(2026, 3, 29, tzinfo=UTC) + timedelta(minutes=key)
    return (
        key,
        f"{change}",
        Decimal(key * 7) / 100,
        moment,
        moment.replace(tzinfo=None),
        date(1500, 1, 1) + timedelta(days=key),
        b"\0" * (key % 3),
        [key, None, change],
        key / 3,
        key % 2 == 0,
    )


def table(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


@dataclass(frozen=True)
class Lake:
    """A table, and the rows that each of its versions has."""

    sink: DeltaSink
    versions: dict[str, int]  # by what it is
    rows: dict[int, dict[int, Row]]  # by version and id

    @property
    def location(self) -> str:
        return self.sink.location(TABLE)

    def point(self, version: int) -> walmere.Point:
        return walmere.lake(self.sink.path).at(Lsn(1000 + version))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    path = tmp_path_factory.mktemp("readers")
    sink = DeltaSink(str(path / "lake"), index=str(path / "index"), properties={"delta.checkpointInterval": "7"})
    now = {key: row(key) for key in range(ROWS)}
    versions: dict[str, int] = {}
    rows: dict[int, dict[int, Row]] = {}
    sink.create(TABLE, SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROW_GROUP_ROWS", 256)
        size = ROWS // FILES
        parts = [table([now[key] for key in range(at, at + size)]) for at in range(0, ROWS, size)]
        staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=BY_ID)]
        version = sink.commit(TABLE, staged, Lsn(100), OVERWRITE)
        number = 0

        def keep(what: str) -> None:
            versions[what] = version
            rows[version] = dict(now)

        def apply(changed: range, deleted: range) -> None:
            nonlocal version, number
            number += 1
            changes = [Change("U", row(key, number)) for key in changed]
            changes += [Change("D", None, (key, *([None] * (len(SCHEMA) - 1))), ord("K")) for key in deleted]
            version = sink.apply(TABLE, fold(typed(changes, SCHEMA), BY_ID), Lsn(100 + number), BY_ID)
            now.update({key: row(key, number) for key in changed})
            for key in deleted:
                now.pop(key, None)

        keep("copied")
        apply(range(10, 12), range(12, 14))
        keep("inline vectors")
        apply(range(5, ROWS, 7), range(3, ROWS, 13))
        keep("vectors in a file")
        for change in range(6):
            apply(range(change, ROWS, 500), range(0))
        keep("after a checkpoint")
        kept = sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0.05))
        assert kept is not None
        version = kept
        keep("after upkeep")
        apply(range(700, 710), range(720, 730))
        keep("newest")
    entries = [Entry(Lsn(1000 + each), None, {str(TABLE): each}) for each in sorted(versions.values())]
    sink.open_ledger("shop", entries)
    return Lake(sink, versions, rows)


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("test", "local[2]", {})


def by_duckdb_delta(lake: Lake, version: int) -> pa.Table:
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        try:
            connection.load_extension("delta")
        except duckdb.Error:
            pytest.skip("DuckDB's Delta extension is not installed")
        if version != max(lake.versions.values()):
            pytest.skip("only the newest version")
        return connection.sql(f"FROM delta_scan('{lake.location}')").to_arrow_table()


def by_batches(lake: Lake, version: int) -> pa.Table:
    return pa.Table.from_batches(lake.point(version).dataset("t").to_batches(batch_size=100), SCHEMA)


def by_verify(lake: Lake, version: int) -> pa.Table:
    scan = lake.sink.scan(TABLE, version, 2)
    read = pa.Table.from_batches([batch for piece in scan.pieces for batch in lake.sink.read(piece)], SCHEMA)
    assert read.num_rows == scan.rows
    return read


READERS: dict[str, Callable[[Lake, int], pa.Table]] = {
    "deltalake": lambda lake, version: read_delta(lake.sink.open(TABLE, version)),
    "walmere.arrow": lambda lake, version: lake.point(version).arrow("t"),
    "walmere.dataset": by_batches,
    "walmere.duckdb": lambda lake, version: lake.point(version).duckdb("t", duckdb.connect()).to_arrow_table(),
    "duckdb delta": by_duckdb_delta,
    "polars": lambda lake, version: pl.read_delta(lake.location, version=version).to_arrow(),
    "polars lazy": lambda lake, version: pl.scan_delta(lake.location, version=version).collect().to_arrow(),
    "verify": by_verify,
}
VERSIONS = ["copied", "inline vectors", "vectors in a file", "after a checkpoint", "after upkeep", "newest"]


def assert_same(found: pa.Table, expected: dict[int, Row]) -> None:
    assert found.schema.names == SCHEMA.names
    found = pa.Table.from_arrays([found[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA)
    assert found.sort_by("id") == table([expected[key] for key in sorted(expected)])


def test_the_table_has_vectors_of_both_kinds_and_a_checkpoint(lake: Lake) -> None:
    kinds = {
        what: {file.vector and file.vector.storage for file in replay.at(lake.sink.directory(TABLE), version).files}
        for what, version in lake.versions.items()
    }
    assert kinds["copied"] == {None}
    assert kinds["inline vectors"] == {None, "i"}
    assert "u" in kinds["vectors in a file"]
    assert "i" in kinds["newest"]
    assert list(Path(lake.location, "_delta_log").glob("*.checkpoint.parquet"))
    assert list(lake.versions) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_returns_the_rows_that_are_not_deleted(lake: Lake, reader: str, version: str) -> None:
    number = lake.versions[version]
    assert_same(READERS[reader](lake, number), lake.rows[number])


@pytest.mark.parametrize("version", VERSIONS)
def test_spark_without_a_jar_returns_the_rows_that_are_not_deleted(
    lake: Lake, spark: SparkSession, version: str
) -> None:
    number = lake.versions[version]
    frame = walmere.read(spark, lake.sink.path, "t", lsn=Lsn(1000 + number))
    for _ in range(2):
        assert_same(frame.toArrow(), lake.rows[number])


@pytest.mark.parametrize("version", VERSIONS)
def test_filters_and_counts_leave_out_deleted_rows_too(lake: Lake, spark: SparkSession, version: str) -> None:
    number = lake.versions[version]
    point, rows = lake.point(number), lake.rows[number]
    expected = sorted((key, found[1]) for key, found in rows.items() if key < 30 and found[1] in "01")
    condition = (pc.field("id") < 30) & pc.field("text").isin(["0", "1"])
    arrow = point.dataset("t").to_table(columns=["id", "text"], filter=condition)
    assert sorted(zip(*arrow.to_pydict().values(), strict=True)) == expected
    assert point.dataset("t").count_rows() == len(rows)
    relation = point.duckdb("t", duckdb.connect())
    where = "id < 30 AND text IN ('0', '1')"
    assert sorted(relation.filter(where).project("id, text").fetchall()) == expected
    assert relation.aggregate("count(*)").fetchall() == [(len(rows),)]
    frame = point.dataframe(spark, "t")
    assert sorted(tuple(each) for each in frame.where(where).select("id", "text").collect()) == expected
    assert frame.count() == len(rows)
    lazy = pl.scan_delta(lake.location, version=number)
    few = lazy.filter((pl.col("id") < 30) & pl.col("text").is_in(["0", "1"])).select("id", "text").collect()
    assert sorted(few.rows()) == expected


@pytest.mark.parametrize("version", [each for each in VERSIONS if each != "copied"])
def test_readers_that_cannot_read_vectors_refuse(lake: Lake, version: str) -> None:
    opened = DeltaTable(lake.location, version=lake.versions[version])
    ways: list[Callable[[], Any]] = [
        opened.to_pyarrow_table,
        opened.to_pyarrow_dataset,
        opened.to_pandas,
        lambda: pl.read_delta(opened, use_pyarrow=True),
    ]
    for read in ways:
        with pytest.raises(DeltaError, match="deletionVectors"):
            read()


def test_what_counts_or_reads_deleted_rows_is_in_the_docs(lake: Lake) -> None:
    rows = len(lake.rows[lake.versions["newest"]])
    assert len(pd.read_parquet(lake.location)) > rows
    assert DeltaTable(lake.location).count() > rows, "deltalake counts right now: change the docs"
    docs = (Path(__file__).parents[2] / "docs" / "guides" / "read.md").read_text()
    assert "pandas.read_parquet" in docs
    assert "DeltaTable.count()" in docs
