"""Reading a lake as of a point, without Spark: which point it is, what it has, and what is said if there is none."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import walmere
from object_stores import Bucket
from sinks.vectors import delete_rows
from walmere.errors import ChangeLogVersion, ConfigError, LakeError, NotApplied, PointGone
from walmere.ledger import entry as points
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Net, StagedFile
from walmere.sinks.delta.sink import DeltaSink

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
ORDERS = TableName("public", "orders")
NOON = 1_800_000_000_000_000  # microseconds, some day


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table([pa.array(ids, pa.int64()), pa.array([text] * len(ids))], schema=SCHEMA)


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def put(sink: DeltaSink, table: TableName, content: pa.Table, lsn: int) -> list[StagedFile]:
    sink.create(table, content.schema)
    staged = sink.stage(table, content.to_batches(), content.schema)
    sink.commit(table, staged, Lsn(lsn), OVERWRITE, content.schema)
    return staged


def publish(sink: DeltaSink, *entries: Entry, name: str = "shop") -> walmere.Lake:
    sink.open_ledger(name, entries)
    return walmere.lake(sink.path, storage_options=sink.storage_options)


def three_points(sink: DeltaSink, began: int | None = None) -> walmere.Lake:
    """LSNs 0/10, 0/20 and 0/30, a second apart, with as many rows as their number."""
    entries = []
    for number in (1, 2, 3):
        put(sink, ORDERS, rows(*range(number)), 16 * number)
        time = points.now() if began is None else began + number * 1_000_000
        version = {str(ORDERS): sink.version(ORDERS)}
        entries.append(Entry(Lsn(16 * number), NOON + number * 1_000_000, version, time))
    return publish(sink, *entries)


def test_a_point_has_the_tables_at_its_versions_whatever_came_later(sink: DeltaSink) -> None:
    lake = three_points(sink)
    put(sink, ORDERS, rows(7, 8, 9, 10), 100)  # not part of a point yet
    latest = lake.latest()
    assert (str(latest.lsn), latest.tables) == ("0/30", ("public.orders",))
    assert latest.commit_time == datetime(2027, 1, 15, 8, 0, 3, tzinfo=UTC)
    assert latest.arrow("orders")["id"].to_pylist() == [0, 1, 2]
    assert [len(point.arrow("public.orders")) for point in lake.points()] == [1, 2, 3]
    assert [point.lsn for point in lake.points()] == [16, 32, 48]
    assert latest.version("orders") == sink.version(ORDERS) - 1
    assert latest.path("orders") == sink.location(ORDERS)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("0/10", 16), ("0/11", 16), ("0/1F", 16), ("0/20", 32), (Lsn(47), 32), ("0/30", 48), (None, 48)],
)
def test_an_lsn_gives_the_newest_point_that_is_not_after_it(
    sink: DeltaSink, wanted: str | Lsn | None, expected: int
) -> None:
    assert three_points(sink).at(wanted).lsn == expected


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 16), (1.9, 16), (2.0, 32), (2.999_999, 32), (3.0, 48)])
def test_a_time_gives_the_newest_point_whose_transactions_had_committed(
    sink: DeltaSink, seconds: float, expected: int
) -> None:
    lake = three_points(sink)
    at = points.moment(NOON) + timedelta(seconds=seconds)
    assert lake.at(at=at).lsn == expected
    assert lake.at(at=at.isoformat().replace("+00:00", "Z")).lsn == expected
    assert lake.at(at=at.astimezone().isoformat()).lsn == expected


def test_what_is_not_applied_yet_is_never_answered_with_an_older_state(sink: DeltaSink) -> None:
    lake = three_points(sink)
    with pytest.raises(NotApplied, match=r"LSN 0/31.*\n.*LSN 0/30 of 2027-01-15T08:00:03"):
        lake.at("0/31")
    with pytest.raises(NotApplied, match="applied"):
        lake.at(at="2027-01-15T08:00:03.000001Z")
    # the first one is of a time after which nothing was known to be committed; the next is behind it, by its clock
    behind = [Entry(Lsn(1), None, {}, NOON + 10), Entry(Lsn(2), NOON + 5, {}, NOON + 11)]
    with pytest.raises(NotApplied, match="LSN 0/2 of"):
        publish(sink, *behind).at(at=points.moment(NOON + 8))


def test_what_is_too_old_is_an_error_that_names_the_oldest(sink: DeltaSink) -> None:
    lake = three_points(sink, began=points.now() - 3_601_500_000)  # the second one is just over the hour old
    with pytest.raises(PointGone, match=r"LSN 0/F.*\n.*oldest.*LSN 0/10"):
        lake.at("0/F")
    entries = [Entry(Lsn(n), NOON + n, {}, points.now() - age * 1_000_000) for n, age in ((1, 9000), (2, 5000), (3, 9))]
    lake = publish(sink, *entries)
    assert lake.at("0/2").lsn == 2, "it was the newest until nine seconds ago"
    with pytest.raises(PointGone, match=r"oldest.*LSN 0/2 .*keep_seconds"):
        lake.at("0/1")
    with pytest.raises(PointGone):
        lake.at(at=points.moment(NOON + 1))
    assert [point.lsn for point in lake.points()] == [2, 3]


def test_arguments_that_make_no_sense_are_refused(sink: DeltaSink) -> None:
    lake = three_points(sink)
    for wrong in ("16", "x/y", Lsn(5)):
        with pytest.raises((ConfigError, PointGone)):
            lake.at(wrong)
    for time in ("noon", "2027-01-15T08:00:03", datetime(2027, 1, 1)):  # noqa: DTZ001
        with pytest.raises(ConfigError, match="2026-11-15T12:00:00Z"):
            lake.at(at=time)
    with pytest.raises(ConfigError, match="both"):
        lake.at("0/10", at="2027-01-15T08:00:03Z")


def test_a_name_may_do_without_its_schema_if_that_is_enough(sink: DeltaSink) -> None:
    names = [TableName(*each) for each in (("a", "t"), ("b", "t"), ("b", "u"), ("a", "b.u"), ("b.u", "x"))]
    for number, name in enumerate(names):
        put(sink, name, rows(number), 1)
    point = publish(sink, Entry(Lsn(1), None, {str(name): sink.version(name) for name in names})).latest()
    for text, number in (("a.t", 0), ("b.t", 1), ("u", 2), ("b.u", 2), ('a."b.u"', 3), ('"b.u".x', 4), ("x", 4)):
        assert point.arrow(text)["id"].to_pylist() == [number], text
    with pytest.raises(LakeError, match=r"2 tables.*\n.*a\.t, b\.t"):
        point.arrow("t")


def test_a_table_that_is_being_copied_again_is_said_not_to_be_there(sink: DeltaSink) -> None:
    put(sink, ORDERS, rows(1), 1)
    entries = Entry(Lsn(1), None, {str(ORDERS): 1}), Entry(Lsn(2), None, {})
    lake = publish(sink, *entries)
    with pytest.raises(LakeError, match=r"orders as of LSN 0/2.*\n.*copied"):
        lake.latest().arrow("orders")
    assert len(lake.at("0/1").arrow("orders")) == 1


def test_a_lake_says_whose_it_is_if_it_has_to_be_asked(sink: DeltaSink, tmp_path: Path) -> None:
    for nowhere in (sink.path, f"file://{sink.path}", tmp_path):
        with pytest.raises(LakeError, match=r"no subscription(.|\n)*walmere run"):
            walmere.lake(nowhere)
    publish(sink, Entry(Lsn(1), None, {}))
    assert walmere.lake(Path(sink.path)).subscription == "shop"
    sink.open_ledger("Büro 2", [Entry(Lsn(2), None, {})])
    with pytest.raises(LakeError, match=r"several(.|\n)*Büro 2, shop"):
        walmere.lake(sink.path)
    assert walmere.lake(sink.path, "Büro 2").latest().lsn == 2
    with pytest.raises(LakeError, match=r"no subscription boo(.|\n)*Büro 2, shop"):
        walmere.lake(sink.path, "boo")


def test_a_lake_that_is_reached_by_url_is_read_in_the_same_way(sink: DeltaSink) -> None:
    three_points(sink)
    lake = walmere.lake(f"file://{sink.path}")
    assert [len(point.arrow("orders")) for point in lake.points()] == [1, 2, 3]
    assert len(lake.latest().arrow("orders")) == 3


def test_a_lake_in_an_object_store_is_read_in_the_same_way(bucket: Bucket) -> None:
    sink = DeltaSink(f"{bucket.url}/the/lake", storage_options=bucket.options)
    lake = three_points(sink)
    assert [len(point.arrow("orders")) for point in lake.points()] == [1, 2, 3]
    none = SCHEMA.empty_table()
    deleted = Net(False, rows(1).select(["id"]), None, none, (None, None), None, none)
    sink.apply(ORDERS, deleted, Lsn(64), Identity("d", ("id",)))
    entries = [Entry(point.lsn, None, {str(ORDERS): point.version("orders")}) for point in lake.points()]
    lake = publish(sink, *entries, Entry(Lsn(64), None, {str(ORDERS): sink.version(ORDERS)}))
    connection = duckdb.connect()
    for lsn, ids in (("0/10", [0]), ("0/30", [0, 1, 2]), ("0/40", [0, 2])):
        point = lake.at(lsn)
        assert point.arrow("orders")["id"].to_pylist() == ids
        assert [found[0] for found in point.duckdb("orders", connection).order("id").fetchall()] == ids
        assert point.dataset("orders").to_table(filter=pc.field("id") > 0)["id"].to_pylist() == [i for i in ids if i]
        assert pickle.loads(pickle.dumps(point.dataset("orders"))).count_rows() == len(ids)
    with pytest.raises(ConfigError, match="secret_access_key is a secret"):
        walmere.lake(sink.path, storage_options={**bucket.options, "secret_access_key": "x"})
    with pytest.raises(LakeError, match="no subscription"):
        walmere.lake(f"{bucket.url}/elsewhere", storage_options=bucket.options)


def test_another_version_of_the_format_is_refused(sink: DeltaSink) -> None:
    lake = three_points(sink)
    for name, read in (("latest.json", lake.latest), ("ledger.jsonl", lake.points)):
        file = Path(sink.path, "_walmere/shop", name)
        file.write_text(file.read_text().replace('"version": 1', '"version": 2').replace('"version":1', '"version":2'))
        with pytest.raises(ChangeLogVersion, match="format version 2"):
            read()


def test_a_version_whose_files_are_gone_is_said_to_be(sink: DeltaSink) -> None:
    lake = three_points(sink)
    point = lake.at("0/10")
    sink.open(ORDERS).vacuum(0, dry_run=False, enforce_retention_duration=False)  # as another program may do it
    with pytest.raises(LakeError, match=r"or has been removed(.|\n)*keep_seconds"):
        point.arrow("orders")
    with pytest.raises(LakeError, match="at version 99"):
        publish(sink, Entry(Lsn(1), None, {str(ORDERS): 99})).latest().arrow("orders")


def test_readers_of_an_older_point_do_not_notice_a_vacuum(sink: DeltaSink) -> None:
    lake = three_points(sink)
    for number in range(4, 40):
        put(sink, ORDERS, rows(number), 16 * number)
        sink.optimize(ORDERS)
        sink.vacuum(ORDERS)
        assert [len(point.arrow("orders")) for point in lake.points()] == [1, 2, 3]


def test_columns_added_later_are_null_in_older_files_and_odd_names_are_names(sink: DeltaSink) -> None:
    names = ["a.b", ".x", "[0]", "Cap", "with space", "say \"x\" 'y' `z`", "🐍", "a,;{}()=\t\n"]
    schema = pa.schema([(name, pa.string()) for name in names])
    table = TableName("Odd schema", "ta.ble 🐍")
    put(sink, table, pa.table([[name] for name in names], schema=schema), 1)
    wider = schema.append(pa.field("new.er", pa.decimal128(20, 2)))
    sink.evolve(table, wider, [*names, pa.scalar(None, pa.decimal128(20, 2))])
    more = pa.table([[None]] * len(names) + [[Decimal("1.25")]], schema=wider)
    sink.commit(table, sink.stage(table, more.to_batches()), Lsn(2))
    point = publish(sink, Entry(Lsn(2), None, {str(table): sink.version(table)})).latest()
    expected = [dict(zip(wider.names, [*names, None], strict=True)), dict.fromkeys(names) | {"new.er": Decimal("1.25")}]
    for found in (point.arrow(table.name), point.duckdb(table.name).to_arrow_table()):
        assert found.schema.names == wider.names
        assert sorted(found.to_pylist(), key=lambda row: row["new.er"] is not None) == expected


@pytest.mark.parametrize("all_marked", [False, True])
def test_rows_that_a_deletion_vector_has_deleted_stay_so(sink: DeltaSink, all_marked: bool) -> None:
    [file] = put(sink, ORDERS, rows(1, 2, 3, 4), 1)
    if not all_marked:
        sink.commit(ORDERS, sink.stage(ORDERS, rows(5, 6).to_batches()), Lsn(2))
    version = delete_rows(sink, ORDERS, file, 1, 2)
    point = publish(sink, Entry(Lsn(2), None, {str(ORDERS): version})).latest()
    expected = [1, 4] if all_marked else [1, 4, 5, 6]
    assert sorted(point.arrow("orders")["id"].to_pylist()) == expected
    assert point.dataset("orders").schema.names == SCHEMA.names
    assert point.duckdb("orders").aggregate("sum(id)").fetchall() == [(sum(expected),)]


def test_duckdb_relations_of_one_point_are_joined_on_a_connection_of_choice(sink: DeltaSink) -> None:
    point = three_points(sink).at("0/20")
    with duckdb.connect() as connection:
        orders = point.duckdb("orders", connection)
        others = point.duckdb("orders", connection).filter("id > 0")
        assert orders.set_alias("a").join(others.set_alias("b"), "a.id = b.id").aggregate("count(*)").fetchall() == [
            (1,)
        ]


def test_importing_walmere_is_light_and_reading_needs_no_spark() -> None:
    program = """
import sys, walmere
assert not {"pyarrow", "deltalake", "pyspark", "pydantic", "duckdb"} & set(sys.modules)
assert walmere.lake and walmere.read and walmere.Lake and walmere.Point
assert "pyspark" not in sys.modules and "duckdb" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_all_that_is_said_to_be_public_is_there() -> None:
    assert all(getattr(walmere, name) is not None for name in walmere.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        walmere.nothing  # noqa: B018
