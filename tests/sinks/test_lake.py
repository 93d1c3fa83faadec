"""What every lake does besides `test_behaviour`: columns that follow the source, old versions, missing rows."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from sinks.conftest import Target
from sinks.histories import (
    SCHEMA,
    TRUNCATE,
    UNCHANGED,
    Change,
    Row,
    delete,
    insert,
    row,
    rows_of,
    same_rows,
    typed,
    update,
)
from sinks.subjects import BY_ID, table_of
from walmere.apply.fold import fold
from walmere.errors import SinkMismatch
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import APPEND, OVERWRITE, LakeSink, Upkeep

TABLE = TableName("public", "orders")


def begin(sink: LakeSink, *rows: Row, lsn: int = 100) -> None:
    """As after the copy of a table, made by two tasks."""
    sink.create(TABLE, SCHEMA)
    half = len(rows) // 2
    staged = [file for part in (rows[:half], rows[half:]) for file in sink.stage(TABLE, table_of(*part).to_batches())]
    sink.commit(TABLE, staged, Lsn(lsn), OVERWRITE)


def tidy(sink: LakeSink, table: TableName) -> None:
    """All upkeep that a table can need."""
    planned = sink.plan_upkeep(table, BY_ID, Upkeep(deleted_share=0))
    sink.replace_files(table, [sink.rewrite_files(work) for work in planned])
    sink.vacuum(table)


def do(sink: LakeSink, *changes: Change, lsn: int = 200, identity: Identity = BY_ID) -> int:
    return sink.apply(TABLE, fold(typed(changes), identity), Lsn(lsn), identity)


def expect(target: Target, *rows: Row, lsn: int = 200) -> None:
    found = rows_of(target.read(TABLE))
    assert same_rows(found, rows), found
    assert target.sink.applied(TABLE) == Lsn(lsn)


def test_a_new_table_has_the_columns_in_order_no_rows_and_no_lsn(target: Target) -> None:
    assert target.sink.applied(TABLE) is None
    version = target.sink.create(TABLE, SCHEMA)
    assert target.sink.version(TABLE) == version
    assert target.sink.applied(TABLE) is None
    found = target.read(TABLE)
    assert found.schema.names == SCHEMA.names
    assert [field.type for field in found.schema] == [field.type for field in SCHEMA]
    assert all(field.nullable for field in found.schema)
    assert len(found) == 0


def test_a_table_that_is_there_is_left_as_it_is(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    assert target.again().create(TABLE, SCHEMA) == version
    expect(target, row(1), lsn=100)


def test_rows_with_other_columns_are_refused(sink: LakeSink) -> None:
    sink.create(TABLE, SCHEMA)
    with pytest.raises(SinkMismatch, match="columns"):
        sink.stage(TABLE, table_of(row(1)).drop_columns(["id"]).to_batches())


def test_a_copy_made_again_may_have_other_columns_and_readers_see_the_old_until_it_is_whole(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    other = pa.table({"new": ["a", "b", "c"], "id": pa.array([1, 2, 3], pa.int32())})
    target.sink.create(TABLE, other.schema)
    staged = target.sink.stage(TABLE, other.to_batches(), other.schema)
    expect(target, row(1), row(2), lsn=100)
    target.sink.commit(TABLE, staged, Lsn(300), OVERWRITE, other.schema)
    assert target.read(TABLE).sort_by("id") == other
    assert target.sink.applied(TABLE) == Lsn(300)
    target.sink.commit(TABLE, target.sink.stage(TABLE, other.to_batches()), Lsn(301))
    assert len(target.read(TABLE)) == 6


def test_a_table_evolves_and_keeps_its_rows_and_lsn(target: Target) -> None:
    before = SCHEMA.names
    begin(target.sink, row(1), row(2), row(3), row(4))
    number = pa.scalar(None, pa.int64())
    added = SCHEMA.append(pa.field("n", pa.int64()))
    target.sink.evolve(TABLE, added, [*before, number])
    assert [(r["id"], r["n"]) for r in target.read(TABLE).sort_by("id").to_pylist()] == [
        (k, None) for k in (1, 2, 3, 4)
    ]
    version = target.sink.version(TABLE)
    assert target.again().evolve(TABLE, added, [*before, number]) == version, "it has these columns already"
    filled = added.append(pa.field("t", pa.string()))
    target.sink.evolve(TABLE, filled, [*before, "n", pa.scalar("x", pa.string())])
    found = target.read(TABLE)
    assert found["t"].to_pylist() == ["x"] * 4
    assert same_rows(rows_of(found.select(before)), [row(1), row(2), row(3), row(4)])
    # renamed, dropped, and one of the dropped one's name is new
    renamed = pa.schema([("key", pa.int64()), ("n", pa.string())])
    target.sink.evolve(TABLE, renamed, ["id", pa.scalar(None, pa.string())])
    assert target.read(TABLE).sort_by("key").to_pylist() == [{"key": k, "n": None} for k in (1, 2, 3, 4)]
    assert target.sink.applied(TABLE) == Lsn(100)


def test_an_evolution_may_run_its_parts_elsewhere(target: Target) -> None:
    begin(target.sink, row(1), row(2))

    def elsewhere(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [pickle.loads(pickle.dumps(function))(pickle.loads(pickle.dumps(item))) for item in items]

    target.sink.evolve(TABLE, pa.schema([("id", pa.int64())]), ["id"], elsewhere)
    assert sorted(target.read(TABLE)["id"].to_pylist()) == [1, 2]


def test_a_table_that_is_not_there_is_named(sink: LakeSink) -> None:
    for call in (lambda: sink.version(TABLE), lambda: sink.stage(TABLE, []), lambda: do(sink, insert(1))):
        with pytest.raises(SinkMismatch, match=r"public\.orders"):
            call()


def test_a_copy_is_visible_as_a_whole_with_its_lsn(target: Target) -> None:
    sink = target.sink
    sink.create(TABLE, SCHEMA)
    staged = sink.stage(TABLE, table_of(row(1), row(2)).to_batches())
    staged += pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sink)).stage(TABLE, table_of(row(3)).to_batches())))
    assert sum(file.rows for file in staged) == 3
    assert len(target.read(TABLE)) == 0
    version = sink.commit(TABLE, staged, Lsn(100), OVERWRITE)
    assert sink.version(TABLE) == version
    expect(target, row(1), row(2), row(3), lsn=100)


def test_a_commit_of_an_lsn_that_is_there_does_nothing(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    more = target.sink.stage(TABLE, table_of(row(2)).to_batches())
    for lsn in (99, 100):
        assert target.sink.commit(TABLE, more, Lsn(lsn), APPEND) == version
    expect(target, row(1), lsn=100)
    target.sink.commit(TABLE, more, Lsn(101), APPEND)
    expect(target, row(1), row(2), lsn=101)


def test_a_row_that_is_not_there_is_updated_into_being_and_deleted_in_peace(target: Target) -> None:
    begin(target.sink, row(1))
    do(target.sink, update(5), delete(6))
    expect(target, row(1), row(5))


def test_an_unchanged_value_of_a_row_that_is_lost_is_refused(target: Target) -> None:
    begin(target.sink, row(1))
    with pytest.raises(SinkMismatch, match="does not have 1 of the updated rows"):
        do(target.sink, update(5, note=UNCHANGED), update(1, note=UNCHANGED))
    expect(target, row(1), lsn=100)


def test_a_batch_that_comes_to_nothing_commits_nothing(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    assert do(target.sink, insert(2), delete(2)) == version
    expect(target, row(1), lsn=100)


def test_a_table_created_twice_at_once_is_there_once(target: Target) -> None:
    for number in range(20):
        table = TableName("public", f"t{number}")
        gate = threading.Barrier(4)

        def create(_: int, table: TableName = table, gate: threading.Barrier = gate) -> int:
            sink = target.again()
            gate.wait()
            return sink.create(table, SCHEMA)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(create, range(4))) == [0] * 4


def test_a_version_that_was_published_outlives_its_replacement_and_the_tidying(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    for number in range(3):
        do(target.sink, update(1, count=number), lsn=200 + number)
        tidy(target.sink, TABLE)
    assert target.sink.version(TABLE) > version
    assert target.sink.keep_seconds > 0
    assert same_rows(rows_of(target.read_at(TABLE, version)), [row(1)])


def test_a_version_is_read_back_in_pieces_whatever_came_later(target: Target) -> None:
    begin(target.sink, row(1), row(2), row(3), row(4))
    version = target.sink.version(TABLE)
    do(target.sink, update(1, count=9), delete(2), insert(5))
    scan = target.sink.scan(TABLE, version, 2)
    assert (scan.rows, scan.schema.names) == (4, SCHEMA.names)
    assert len(scan.pieces) == 2, "the copy was made by two tasks"
    pieces = pickle.loads(pickle.dumps(scan.pieces))
    batches = [batch for piece in pieces for batch in target.sink.read(piece)]
    assert same_rows(rows_of(pa.Table.from_batches(batches)), [row(1), row(2), row(3), row(4)])
    [name] = SCHEMA.names[1:2]
    some = pa.Table.from_batches(batch for piece in pieces for batch in target.sink.read(piece, [name]))
    assert (some.column_names, sorted(some[name].to_pylist())) == ([name], [1, 2, 3, 4])
    do(target.sink, TRUNCATE, lsn=300)
    empty = target.sink.scan(TABLE, target.sink.version(TABLE))
    assert (empty.rows, [batch for piece in empty.pieces for batch in target.sink.read(piece)]) == (0, [])


def test_what_is_staged_and_not_committed_never_shows(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    target.sink.stage(TABLE, table_of(row(2)).to_batches())  # and here the task dies
    expect(target, row(1), lsn=100)
    assert target.sink.version(TABLE) == version
    do(target.again(), insert(2, count=5))
    expect(target, row(1), row(2, count=5))


def test_two_commits_of_one_lsn_at_once_have_one_effect(target: Target) -> None:
    begin(target.sink, row(1))
    first = target.sink.version(TABLE)
    for number in range(target.races):
        gate = threading.Barrier(2)

        def commit(_: int, lsn: int = 1000 + number, gate: threading.Barrier = gate) -> int:
            sink = target.again()
            staged = sink.stage(TABLE, table_of(row(lsn)).to_batches())
            gate.wait()
            return sink.commit(TABLE, staged, Lsn(lsn), APPEND)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(commit, range(2))) == [first + 1 + number] * 2
    expect(target, row(1), *(row(1000 + number) for number in range(target.races)), lsn=1000 + target.races - 1)
