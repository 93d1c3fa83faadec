"""A table as of a point on Spark is the very table that PyArrow reads: every type, name, file and version of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import SparkRuntimeException
from pyspark.sql import SparkSession
from pyspark.sql.types import TimestampNTZType, TimestampType, VariantType

import walmere
from object_stores import Bucket
from sinks.vectors import delete_rows
from walmere.errors import ConfigError, LakeError
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Net, StagedFile
from walmere.sinks.delta.sink import DeltaSink
from walmere.spark import dataframe
from walmere.spark.session import session
from walmere.types.variant.codec import Variant
from walmere.variant_type import VARIANT

TABLE = TableName("Odd schema", "_ta.ble 🐍")
NAMES = ["a.b", ".x", "[0]", "Cap", "with space", "say \"x\" 'y' `z`", "🐍", "a,;{}()=\t\n"]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        *((name, pa.string()) for name in NAMES),
        ("stamp", pa.timestamp("us")),
        ("zoned", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("amount", pa.decimal128(10, 2)),
        ("exact", pa.decimal128(38, 10)),
        ("bytes", pa.binary()),
        ("list", pa.list_(pa.int32())),
        ("map", pa.map_(pa.string(), pa.string())),
        ("double", pa.float64()),
        ("real", pa.float32()),
        ("bool", pa.bool_()),
        ("small", pa.int16()),
    ]
)


def row(number: int) -> list[Any]:
    """Values at the ends of what a type can hold, and in the hour that daylight saving leaves out."""
    if number % 3 == 2:
        return [number, *([None] * (len(SCHEMA) - 1))]
    first = number % 3 == 0
    return [
        number,
        *(f"{name} {number}" for name in NAMES),
        datetime(1, 1, 1, 1, 2, 3, 4) if first else datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
        datetime(1500, 1, 1, tzinfo=UTC) if first else datetime(2026, 3, 29, 2, 30, tzinfo=UTC),
        date(1, 1, 1) if first else date(9999, 12, 31),
        Decimal("-99999999.99"),
        Decimal("1234567890123456789012345678.0123456789"),
        b"\0\xff",
        [1, None, number],
        [("k", "v"), ("n", None)],
        -0.0 if first else float("inf"),
        1.5,
        first,
        number,
    ]


def rows(*numbers: int) -> pa.Table:
    columns = zip(*map(row, numbers), strict=True)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    """As tests share it; its time zone is one that has daylight saving."""
    found = session("test", "local[2]", {})
    found.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield found
    found.conf.unset("spark.sql.session.timeZone")


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "a=b" / "the {lake} [*]?"))


def put(sink: DeltaSink, content: pa.Table, lsn: int = 1) -> list[StagedFile]:
    sink.create(TABLE, content.schema)
    staged = sink.stage(TABLE, content.to_batches(), content.schema)
    sink.commit(TABLE, staged, Lsn(lsn), OVERWRITE, content.schema)
    return staged


def publish(sink: DeltaSink) -> walmere.Point:
    sink.open_ledger("shop", [Entry(Lsn(1), None, {str(TABLE): sink.version(TABLE)})])
    return walmere.lake(sink.path, storage_options=sink.storage_options).latest()


def assert_same(spark: SparkSession, point: walmere.Point) -> pa.Table:
    expected = point.arrow(TABLE.name).sort_by("id")
    frame = point.dataframe(spark, TABLE.name)
    assert frame.columns == expected.schema.names
    found = frame.toArrow()
    assert [field.type for field in found.schema.remove_metadata()] == [
        found.schema.field(field.name).type if pa.types.is_nested(field.type) else field.type
        for field in expected.schema
    ], "but for what the elements of a list are called"
    assert found.cast(expected.schema).sort_by("id") == expected
    return expected


def test_every_type_and_every_name_comes_out_as_it_is(spark: SparkSession, sink: DeltaSink) -> None:
    put(sink, rows(0, 1, 2, 3))
    point = publish(sink)
    assert len(assert_same(spark, point)) == 4
    frame = point.dataframe(spark, str(TABLE))
    kinds = {field.name: type(field.dataType) for field in frame.schema}
    assert (kinds["stamp"], kinds["zoned"]) == (TimestampNTZType, TimestampType)
    assert not any(field.metadata for field in frame.schema)
    assert frame.filter("`a.b` = 'a.b 1'").count() == 1
    assert "PushedFilters: [IsNotNull(`a.b`), EqualTo(`a.b`,a.b 1)]" in str(
        frame.filter("`a.b` = 'a.b 1'")._jdf.queryExecution().toString()
    )


def test_an_empty_table_has_its_columns(spark: SparkSession, sink: DeltaSink) -> None:
    sink.create(TABLE, SCHEMA)
    assert len(assert_same(spark, publish(sink))) == 0


def test_columns_added_later_are_null_in_older_files_and_decimals_grow(spark: SparkSession, sink: DeltaSink) -> None:
    put(sink, rows(0, 1))
    before = publish(sink)
    wider = SCHEMA.append(pa.field("new.er", pa.timestamp("us")))
    sink.evolve(TABLE, wider, [*SCHEMA.names, pa.scalar(None, pa.timestamp("us"))])
    stamps = pa.array([datetime(2026, 1, 1)], pa.timestamp("us"))  # noqa: DTZ001
    sink.commit(TABLE, sink.stage(TABLE, rows(3).append_column(wider.field("new.er"), stamps).to_batches()), Lsn(2))
    assert assert_same(spark, publish(sink))["new.er"].null_count == 2
    place = SCHEMA.get_field_index("amount")
    grown = wider.set(place, pa.field("amount", pa.decimal128(20, 4)))
    sink.evolve(TABLE, grown, wider.names)
    found = assert_same(spark, publish(sink))
    assert found.schema.field("amount").type == pa.decimal128(20, 4)
    assert found["amount"].to_pylist() == [Decimal("-99999999.9900")] * 3
    assert assert_same(spark, before).schema.names == SCHEMA.names, "an older point has the columns of its time"


@pytest.mark.parametrize("all_marked", [False, True])
def test_rows_that_a_deletion_vector_has_deleted_stay_so(
    spark: SparkSession, sink: DeltaSink, all_marked: bool
) -> None:
    [file] = put(sink, rows(0, 1, 2, 3, 4))
    if not all_marked:
        sink.commit(TABLE, sink.stage(TABLE, rows(10, 11).to_batches()), Lsn(2))
    delete_rows(sink, TABLE, file, 1, 3)
    found = assert_same(spark, publish(sink))
    assert found["id"].to_pylist() == ([0, 2, 4] if all_marked else [0, 2, 4, 10, 11])


@pytest.mark.parametrize(
    "limits",
    [
        {},
        pytest.param({"_MAX_ROWS": 3}, marks=pytest.mark.long),
        pytest.param({"_MAX_FILES": 2}, marks=pytest.mark.long),
        pytest.param({"_LARGE_BYTES": 1}, marks=pytest.mark.long),
        {"_LARGE_BYTES": 1, "_MAX_LARGE": 2},
    ],
)
def test_files_of_the_same_size_are_not_mistaken_and_filters_are_pushed_down(
    spark: SparkSession, sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(dataframe, name, value)
    narrow = pa.schema([("id", pa.int64()), ("_metadata", pa.string())])
    sink.create(TABLE, narrow)
    files = []
    for first in range(0, 60, 6):
        # of two sizes, five files each
        batch = pa.record_batch([pa.array(range(first, first + 6)), ["x" * (first % 12)] * 6], schema=narrow)
        files += sink.stage(TABLE, [batch])
    assert len({file.size for file in files}) < len(files)
    sink.commit(TABLE, files, Lsn(1), OVERWRITE)
    expected = set(range(60))
    for number, file in enumerate(files):
        delete_rows(sink, TABLE, file, *range(number % 6 + 1))
        expected -= set(range(6 * number, 6 * number + number % 6 + 1))
    point = publish(sink)
    frame = point.dataframe(spark, TABLE.name)
    for _ in range(2):
        assert sorted(row.id for row in frame.collect()) == sorted(expected)
    assert assert_same(spark, point).num_rows == frame.count() == len(expected)
    few = frame.where("id between 10 and 20").select("id")
    assert sorted(row.id for row in few.collect()) == sorted(expected & set(range(10, 21)))
    assert "PushedFilters: [IsNotNull(id), GreaterThanOrEqual(id,10)" in str(few._jdf.queryExecution().toString())
    frame.createOrReplaceTempView("marked")
    joined = spark.sql("SELECT count(*) AS n FROM marked a JOIN marked b ON a.id = b.id WHERE a.id > (SELECT 9)")
    assert joined.collect()[0].n == len([key for key in expected if key > 9])
    assert frame.cache().count() == frame.rdd.count() == len(expected)
    frame.unpersist()


def test_a_file_of_another_size_than_in_the_log_is_an_error(spark: SparkSession, sink: DeltaSink) -> None:
    [file] = put(sink, rows(0, 1, 2))
    delete_rows(sink, TABLE, replace(file, size=file.size + 1), 1)
    with pytest.raises(SparkRuntimeException, match="another size than in the table's log"):
        publish(sink).dataframe(spark, TABLE.name).collect()


def test_a_vector_that_is_gone_is_said_to_be(spark: SparkSession, sink: DeltaSink) -> None:
    sink.create(TABLE, SCHEMA)
    sink.commit(TABLE, sink.stage(TABLE, rows(*range(1000)).to_batches()), Lsn(1), OVERWRITE)
    identity = Identity("d", ("id",))
    keys = pa.table([pa.array(range(0, 1000, 3), pa.int64())], names=["id"])
    empty = SCHEMA.empty_table()
    sink.apply(TABLE, Net(False, keys, None, empty, (None,) * len(SCHEMA), None, empty), Lsn(2), identity)
    point = publish(sink)
    assert len(assert_same(spark, point)) == 666
    for vector in Path(sink.location(TABLE), "_dv").iterdir():
        vector.unlink()
    for read in (lambda: point.dataframe(spark, TABLE.name), lambda: point.duckdb(TABLE.name)):
        with pytest.raises(LakeError, match=r"or has been removed(.|\n)*keep_seconds"):
            read()
    with pytest.raises(LakeError, match="or has been removed"):
        point.arrow(TABLE.name)


def test_a_dataframe_stays_as_of_its_point_while_the_table_goes_on(spark: SparkSession, sink: DeltaSink) -> None:
    put(sink, rows(0, 1))
    frame = publish(sink).dataframe(spark, TABLE.name)
    put(sink, rows(2, 3, 4), 2)
    sink.optimize(TABLE)
    sink.vacuum(TABLE)
    assert sorted(found.id for found in frame.select("id").collect()) == [0, 1]


def test_a_lake_by_url_is_read_in_the_same_way(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    sink = DeltaSink(f"file://{tmp_path}/lake")
    put(sink, rows(0, 1, 2))
    assert len(assert_same(spark, publish(sink))) == 3


def test_a_lake_in_an_object_store_is_read_in_the_same_way(
    spark: SparkSession, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataframe, "_PIECE_BYTES", 1)  # a task for each file
    sink = DeltaSink(f"{bucket.url}/lake", storage_options=bucket.options)
    put(sink, rows(*range(10)))
    identity = Identity("d", ("id",))
    nowhere = (None,) * len(SCHEMA)
    keys = rows(3, 4).select(["id"])
    sink.apply(TABLE, Net(False, keys, None, rows(5), nowhere, None, rows(20, 21)), Lsn(2), identity)
    point = publish(sink)
    found = assert_same(spark, point)
    assert sorted(found["id"].to_pylist()) == [0, 1, 2, 5, 6, 7, 8, 9, 20, 21]
    assert walmere.read(spark, sink.path, TABLE.name, storage_options=bucket.options).count() == 10
    wider = pa.schema([*SCHEMA, ("new", pa.string())])
    sink.evolve(TABLE, wider, [*SCHEMA.names, pa.scalar(None, pa.string())])
    assert assert_same(spark, publish(sink))["new"].to_pylist() == [None] * 10
    sink.commit(TABLE, [], Lsn(4), OVERWRITE, SCHEMA)
    assert publish(sink).dataframe(spark, TABLE.name).count() == 0
    assert point.dataframe(spark, TABLE.name).count() == 10, "an older version stays as it was"


def test_a_variant_is_read_by_spark_itself_and_by_tasks(spark: SparkSession, bucket: Bucket, tmp_path: Path) -> None:
    texts = [b'{"a": [1.50, null]}', None, b"null", b'{"b": "x"}']
    doc = Variant("jsonb", VARIANT).cast(pa.array(texts)).values
    documents = pa.RecordBatch.from_arrays([pa.array(range(4), pa.int64()), doc], ["id", "doc"])
    sinks = DeltaSink(str(tmp_path / "lake")), DeltaSink(f"{bucket.url}/variants", storage_options=bucket.options)
    for sink in sinks:
        sink.create(TABLE, documents.schema)
        sink.commit(TABLE, sink.stage(TABLE, [documents]), Lsn(1))
        found = publish(sink).dataframe(spark, TABLE.name)
        assert found.schema["doc"].dataType == VariantType()
        shown = found.selectExpr("to_json(doc)", "variant_get(doc, '$.a[0]', 'string')", "is_variant_null(doc)", "id")
        assert sorted(map(tuple, shown.collect()), key=lambda each: each[-1]) == [
            ('{"a":[1.5,null]}', "1.5", False, 0),
            (None, None, False, 1),
            ("null", None, True, 2),
            ('{"b":"x"}', None, False, 3),
        ]


def test_a_partitioned_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    write_deltalake(sink.location(TABLE), pa.table({"id": [1], "p": ["x"]}), partition_by=["p"])
    with pytest.raises(LakeError, match="partitioned"):
        publish(sink).dataframe(spark, TABLE.name)


def test_read_takes_a_lake_or_the_configuration_of_its_subscription(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    put(sink, rows(0, 1))
    point = publish(sink)
    sink.open_ledger("other", [Entry(Lsn(2), None, {})])
    file = tmp_path / "walmere.toml"
    file.write_text(
        '[source]\ndsn = ""\npublications = ["p"]\nslot = "s"\n[subscription]\nname = "shop"\ndirectory = "state"\n'
    )
    with pytest.raises(ConfigError, match=r"no \[target\]"):
        walmere.read(spark, file, TABLE.name)
    with file.open("a") as end:
        end.write('[target]\npath = "lake"\n')
    for configuration in (file, str(file)):
        assert walmere.read(spark, configuration, TABLE.name, lsn=point.lsn).count() == 2
    with pytest.raises(LakeError, match="several"):
        walmere.read(spark, tmp_path / "lake", TABLE.name)
    with pytest.raises(ConfigError, match="no such file"):
        walmere.read(spark, tmp_path / "nowhere.toml", TABLE.name)
