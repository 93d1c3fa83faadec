"""The history of a table says what each commit did: operation, rows, range of LSNs, engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from sinks.histories import Change, typed
from walmere import __version__
from walmere.apply.fold import fold
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))
WHOLE = Identity("f", ())


@pytest.fixture(params=[True, False])
def sink(tmp_path: Path, request: pytest.FixtureRequest) -> DeltaSink:
    found = DeltaSink(str(tmp_path / "lake"), deletion_vectors=request.param)
    found.create(TABLE, SCHEMA)
    copy(found, 10, range(20))
    return found


def copy(sink: DeltaSink, lsn: int, ids: range) -> None:
    rows = pa.table([pa.array(ids, pa.int64()), pa.array(["x"] * len(ids))], schema=SCHEMA)
    sink.commit(TABLE, sink.stage(TABLE, rows.to_batches()), Lsn(lsn), OVERWRITE)


def apply(sink: DeltaSink, lsn: int, *changes: Change, identity: Identity = BY_ID) -> None:
    sink.apply(TABLE, fold(typed(changes, SCHEMA), identity), Lsn(lsn), identity)


def insert(key: int) -> Change:
    return Change("I", (key, "x"))


def update(key: int) -> Change:
    return Change("U", (key, "new"))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), ord("K"))


def last(sink: DeltaSink) -> dict[str, Any]:
    [found] = DeltaTable(sink.location(TABLE)).history(1)
    assert found["engineInfo"] == f"walmere/{__version__}"
    return found


def rows(found: dict[str, Any]) -> tuple[int, ...]:
    assert found["operation"] in {"APPLY", "COPY"}
    metrics = found["operationMetrics"]
    assert set(metrics) == {"numRowsInserted", "numRowsUpdated", "numRowsDeleted"}
    return tuple(int(metrics[f"numRows{what}"]) for what in ("Inserted", "Updated", "Deleted"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([update(1), update(2), delete(3), insert(100)], (1, 2, 1)),
        ([insert(100), insert(101)], (2, 0, 0)),
        ([delete(1), delete(2)], (0, 0, 2)),
        ([insert(100), update(100)], (1, 0, 0)),
        ([update(1), delete(1)], (0, 0, 1)),
        ([delete(999)], (0, 0, 0)),  # the target does not have it
        ([update(999)], (1, 0, 0)),
        ([Change("U", (100, "moved"), (5, None), ord("K"))], (1, 0, 1)),  # another key is another row
        ([Change("T"), insert(1), insert(2)], (2, 0, 20)),
        ([insert(100), Change("T")], (0, 0, 20)),
    ],
)
def test_a_batch_has_its_rows_and_its_range_of_lsns(
    sink: DeltaSink, changes: list[Change], expected: tuple[int, ...]
) -> None:
    apply(sink, 0x16_B374D848, *changes)
    found = last(sink)
    assert (found["operation"], rows(found)) == ("APPLY", expected)
    truncate = {"truncate": "true"} if any(change.kind == "T" for change in changes) else {}
    assert found["operationParameters"] == {"fromLsn": "0/A", "toLsn": "16/B374D848", **truncate}
    assert (found["walmere.lsn_before"], found["walmere.lsn"]) == ("0/A", "16/B374D848")


def test_a_batch_in_parts_has_the_rows_of_all_of_them(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    sink.create(TABLE, SCHEMA)
    copy(sink, 10, range(20))
    parts = [[update(1), delete(3)], [insert(100)], [update(2), insert(101)]]
    found = [sink.stage_changes(TABLE, fold(typed(part, SCHEMA), BY_ID), BY_ID) for part in parts]
    sink.commit_changes(TABLE, found, Lsn(20))
    assert rows(last(sink)) == (2, 2, 1)


def test_rows_without_a_key_are_deleted_and_inserted(sink: DeltaSink) -> None:
    apply(sink, 20, insert(1), identity=WHOLE)
    apply(sink, 30, Change("U", (1, "new"), (1, "x"), ord("O")), identity=WHOLE)
    assert rows(last(sink)) == (1, 0, 1)
    assert sink.count(TABLE) == 21


def test_a_copy_has_the_rows_that_it_replaces(sink: DeltaSink) -> None:
    assert (last(sink)["operation"], rows(last(sink))) == ("COPY", (20, 0, 0))
    assert last(sink)["operationParameters"] == {"toLsn": "0/A"}
    apply(sink, 20, delete(1))
    copy(sink, 30, range(5))
    assert (last(sink)["operation"], rows(last(sink))) == ("COPY", (5, 0, 19))
    assert last(sink)["operationParameters"] == {"fromLsn": "0/14", "toLsn": "0/1E"}


def test_ddl_and_owners_have_operations_of_their_own(sink: DeltaSink) -> None:
    assert [each["operation"] for each in DeltaTable(sink.location(TABLE)).history()] == ["COPY", "CREATE TABLE"]
    wider = SCHEMA.append(pa.field("Größe", pa.int32()))
    sink.evolve(TABLE, wider, [*SCHEMA.names, pa.scalar(None, pa.int32())])
    assert (last(sink)["operation"], last(sink)["operationParameters"]) == ("ADD COLUMNS", {"columns": '["Größe"]'})
    sink.evolve(TABLE, SCHEMA, SCHEMA.names)
    assert last(sink)["operation"] == "REPLACE COLUMNS"
    assert last(sink)["operationParameters"] == {"columns": '["id", "text"]'}
    sink.owned_by(Owner("shop", "1", 2)).claim(TABLE)
    assert last(sink)["operation"] == "CLAIM"


def test_upkeep_has_files_bytes_and_purged_rows(sink: DeltaSink) -> None:
    for number in range(10):
        apply(sink, 20 + number, insert(100 + number))
    apply(sink, 40, delete(1), delete(100), update(2))
    before = sink.extent(TABLE)
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0.01))
    after, found = sink.extent(TABLE), last(sink)
    assert before is not None
    assert after is not None
    assert found["operation"] == "OPTIMIZE"
    metrics = {name: int(value) for name, value in found["operationMetrics"].items()}
    assert metrics["numRemovedFiles"] - metrics["numAddedFiles"] == before.files - after.files > 0
    assert metrics["numRemovedBytes"] - metrics["numAddedBytes"] == before.bytes - after.bytes
    assert metrics["numRowsPurged"] == before.deleted - after.deleted == before.deleted


def test_the_change_feed_has_the_changed_rows_and_upkeep_is_not_in_it(tmp_path: Path) -> None:
    """As `deltalake` reads it; a story has Spark."""
    sink = DeltaSink(str(tmp_path / "lake"))
    sink.create(TABLE, SCHEMA)
    copy(sink, 10, range(2000))
    DeltaTable(sink.location(TABLE)).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    features = set(DeltaTable(sink.location(TABLE)).protocol().writer_features or ())
    assert features >= {"changeDataFeed", "deletionVectors"}
    first = sink.version(TABLE) + 1
    apply(sink, 20, update(1), delete(2), insert(5000))
    apply(sink, 30, *[delete(key) for key in range(100, 2000, 3)])
    assert sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0.01)) is not None
    apply(sink, 40, update(1))

    found = pa.table(DeltaTable(sink.location(TABLE)).load_cdf(starting_version=first).read_all())
    changes = zip(*(found[name].to_pylist() for name in ("_commit_version", "_change_type", "id", "text")), strict=True)
    assert sorted(changes) == [
        (first, "delete", 1, "x"),
        (first, "delete", 2, "x"),
        (first, "insert", 1, "new"),
        (first, "insert", 5000, "x"),
        *[(first + 1, "delete", key, "x") for key in range(100, 2000, 3)],
        (first + 3, "delete", 1, "new"),
        (first + 3, "insert", 1, "new"),
    ]
    assert set(DeltaTable(sink.location(TABLE)).protocol().writer_features or ()) == features
