"""What every sink does, whichever it is: the contract of `walmere.sinks.base`, one test after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinks.conftest import SINKS, Target
from sinks.histories import (
    SCHEMA,
    UNCHANGED,
    Change,
    History,
    Row,
    frozen,
    keyed_histories,
    multiset_histories,
    rows_of,
    same_rows,
    typed,
)
from walmere.apply.fold import fold
from walmere.errors import SinkError, SinkMismatch, WalmereError
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import APPEND, OVERWRITE, LakeSink, Upkeep
from walmere.storage import Directory

TABLE = TableName("public", "orders")
BY_ID = Identity("d", ("id",))
FULL = Identity("f")
K, O = ord("K"), ord("O")  # noqa: E741


def row(key: int | None, count: int = 0, note: Any = "n", tags: Any = None) -> Row:
    return ("p", key, count, note, tags)


def table_of(*rows: Row, schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = [pa.array([r[i] for r in rows], schema.field(i).type) for i in range(len(schema))]
    return pa.table(columns, schema=schema)


def insert(key: int, **values: Any) -> Change:
    return Change("I", row(key, **values))


def update(key: int, was: int | None = None, **values: Any) -> Change:
    old = (None if was is None else (None, was, None, None, None), 0 if was is None else K)
    return Change("U", row(key, **values), *old)


def delete(key: int) -> Change:
    return Change("D", None, (None, key, None, None, None), K)


TRUNCATE = Change("T")


def begin(sink: LakeSink, *rows: Row, lsn: int = 100, table: TableName = TABLE, schema: pa.Schema = SCHEMA) -> None:
    """As after the copy of a table, made by two tasks."""
    sink.create(table, schema)
    half = len(rows) // 2
    staged = [
        file
        for part in (rows[:half], rows[half:])
        for file in sink.stage(table, table_of(*part, schema=schema).to_batches())
    ]
    sink.commit(table, staged, Lsn(lsn), OVERWRITE)


def tidy(sink: LakeSink, table: TableName) -> None:
    """All upkeep that a table can need."""
    planned = sink.plan_upkeep(table, BY_ID, Upkeep(deleted_share=0))
    sink.replace_files(table, [sink.rewrite_files(work) for work in planned])
    sink.vacuum(table)


def do(sink: LakeSink, *changes: Change, lsn: int = 200, identity: Identity = BY_ID, table: TableName = TABLE) -> int:
    return sink.apply(table, fold(typed(changes), identity), Lsn(lsn), identity)


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


def test_a_copy_of_no_rows_has_its_lsn_too(target: Target) -> None:
    begin(target.sink)
    expect(target, lsn=100)
    do(target.sink, insert(1))
    expect(target, row(1))


def test_a_copy_made_again_takes_the_place_of_the_first(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    begin(target.sink, row(7), lsn=300)
    expect(target, row(7), lsn=300)


def test_a_commit_of_an_lsn_that_is_there_does_nothing(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    more = target.sink.stage(TABLE, table_of(row(2)).to_batches())
    for lsn in (99, 100):
        assert target.sink.commit(TABLE, more, Lsn(lsn), APPEND) == version
    expect(target, row(1), lsn=100)
    target.sink.commit(TABLE, more, Lsn(101), APPEND)
    expect(target, row(1), row(2), lsn=101)


def test_what_is_staged_and_not_committed_never_shows(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    target.sink.stage(TABLE, table_of(row(2)).to_batches())  # and here the task dies
    expect(target, row(1), lsn=100)
    assert target.sink.version(TABLE) == version
    do(target.again(), insert(2, count=5))
    expect(target, row(1), row(2, count=5))


def test_inserts_are_added(target: Target) -> None:
    begin(target.sink, row(1))
    do(target.sink, insert(2), insert(3))
    expect(target, row(1), row(2), row(3))


def test_updates_replace(target: Target) -> None:
    begin(target.sink, row(1), row(2), row(3))
    do(target.sink, update(2, count=7), update(2, count=8), insert(4))
    expect(target, row(1), row(2, count=8), row(3), row(4))


def test_deletes_remove(target: Target) -> None:
    begin(target.sink, row(1), row(2), row(3))
    do(target.sink, delete(1), delete(3))
    expect(target, row(2))
    do(target.sink, delete(2), lsn=300)
    expect(target, lsn=300)


def test_delete_and_insert_again_leaves_one_row(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    do(target.sink, delete(1), insert(1, count=9))
    expect(target, row(1, count=9), row(2))


def test_a_row_that_is_not_there_is_updated_into_being_and_deleted_in_peace(target: Target) -> None:
    begin(target.sink, row(1))
    do(target.sink, update(5), delete(6))
    expect(target, row(1), row(5))


def test_a_key_changes(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    do(target.sink, update(9, was=1, count=3))
    expect(target, row(9, count=3), row(2))


def test_keys_are_swapped_and_rotated(target: Target) -> None:
    begin(target.sink, row(1, count=1), row(2, count=2), row(3, count=3))
    do(
        target.sink,
        update(0, was=1, count=1, note=UNCHANGED),
        update(1, was=2, count=2, note=UNCHANGED),
        update(2, was=3, count=3, note=UNCHANGED),
        update(3, was=0, count=1, note=UNCHANGED),
    )
    expect(target, row(3, count=1), row(1, count=2), row(2, count=3))


def test_an_unchanged_value_stays_as_the_target_has_it(target: Target) -> None:
    begin(target.sink, row(1, note="long" * 99, tags=["a", None]), row(2, note=None), row(3))
    do(
        target.sink,
        update(1, count=1, note=UNCHANGED, tags=UNCHANGED),
        update(2, count=2, note=UNCHANGED),
        update(3, count=3, note="sent"),
    )
    expect(
        target,
        row(1, count=1, note="long" * 99, tags=["a", None]),
        row(2, count=2, note=None),
        row(3, count=3, note="sent"),
    )


def test_an_unchanged_value_goes_along_with_a_changed_key(target: Target) -> None:
    begin(target.sink, row(1, note="one"), row(2, note="two"), row(3, note="three"))
    do(
        target.sink,
        update(9, was=1, count=1, note=UNCHANGED),
        insert(1, note="new"),
        delete(2),
        update(2, was=3, count=3, note=UNCHANGED),
    )
    expect(target, row(9, count=1, note="one"), row(1, note="new"), row(2, count=3, note="three"))


def test_an_unchanged_value_of_a_row_that_is_lost_is_refused(target: Target) -> None:
    begin(target.sink, row(1))
    with pytest.raises(SinkMismatch, match="does not have 1 of the updated rows"):
        do(target.sink, update(5, note=UNCHANGED), update(1, note=UNCHANGED))
    expect(target, row(1), lsn=100)


def test_truncate_empties(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    version = target.sink.version(TABLE)
    assert do(target.sink, TRUNCATE) == version + 1
    expect(target)


def test_truncate_and_insert_is_one_commit(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    version = target.sink.version(TABLE)
    assert do(target.sink, insert(3), TRUNCATE, insert(1, count=4), insert(5), update(5, count=6)) == version + 1
    expect(target, row(1, count=4), row(5, count=6))


@pytest.mark.parametrize(
    "changes",
    [[insert(5)], [update(1, count=5)], [update(6, was=1), delete(2), insert(7)], [TRUNCATE, insert(1)], [TRUNCATE]],
)
def test_a_batch_is_one_commit_and_none_when_it_comes_again(target: Target, changes: list[Change]) -> None:
    begin(target.sink, row(1), row(2))
    before = target.sink.version(TABLE)
    version = do(target.sink, *changes)
    assert version == before + 1
    rows = rows_of(target.read(TABLE))
    for lsn in (200, 150):
        assert do(target.again(), *changes, lsn=lsn) == version
    assert target.sink.version(TABLE) == version
    expect(target, *rows)


def test_a_batch_that_comes_to_nothing_commits_nothing(target: Target) -> None:
    begin(target.sink, row(1))
    version = target.sink.version(TABLE)
    assert do(target.sink, insert(2), delete(2)) == version
    expect(target, row(1), lsn=100)


def test_one_delete_takes_one_of_equal_rows(target: Target) -> None:
    begin(target.sink, *[row(1)] * 5, row(2))
    gone = Change("D", None, row(1), O)
    do(target.sink, gone, identity=FULL)
    expect(target, *[row(1)] * 4, row(2))
    do(target.sink, gone, gone, Change("U", row(2, count=1), row(2), O), lsn=300, identity=FULL)
    expect(target, *[row(1)] * 2, row(2, count=1), lsn=300)


def test_in_a_multiset_null_equals_null_and_nothing_else(target: Target) -> None:
    nothing: Row = (None,) * 5
    begin(target.sink, nothing, nothing, row(None), row(1, tags=[]), row(1, tags=None), row(1, tags=[None]))
    do(
        target.sink,
        Change("D", None, nothing, O),
        Change("D", None, row(None), O),
        Change("U", row(1, count=3, tags=UNCHANGED), row(1, tags=[]), O),
        identity=FULL,
    )
    expect(target, nothing, row(1, count=3, tags=[]), row(1, tags=None), row(1, tags=[None]))


def test_without_replica_identity_rows_are_added(target: Target) -> None:
    begin(target.sink, row(1))
    do(target.sink, insert(1), insert(1), identity=Identity("n"))
    expect(target, row(1), row(1), row(1))


EVERY_TYPE: dict[str, tuple[pa.DataType, list[Any]]] = {
    "i16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "i32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "i64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "f32": (pa.float32(), [float("-inf"), -0.0]),
    "f64": (pa.float64(), [1.7976931348623157e308, float("inf")]),
    "bool": (pa.bool_(), [True, False]),
    "text": (pa.string(), ["", "\U0010ffff" * 40 + "'\"\\\n\t"]),
    "bytea": (pa.binary(), [b"", bytes(range(256))]),
    "date": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    "timestamp": (pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]),  # noqa: DTZ001
    "timestamptz": (
        pa.timestamp("us", "UTC"),
        [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)],
    ),
    "small": (pa.decimal128(5, 2), [Decimal("-999.99"), Decimal("0.01")]),
    "large": (pa.decimal128(38, 10), [Decimal("-" + "9" * 28 + "." + "9" * 10), Decimal("0.0000000001")]),
    "whole": (pa.decimal128(38, 0), [Decimal("9" * 38), Decimal(0)]),
    "list": (pa.list_(pa.int32()), [[], [1, None, 3]]),
    "texts": (pa.list_(pa.string()), [["", None, '"'], [None]]),
    "vector": (pa.list_(pa.float32()), [[1.5, -2.5], []]),
    "hstore": (pa.map_(pa.string(), pa.string()), [[], [("a", "b"), ("c", None)]]),
}
TYPED = pa.schema([(name, kind) for name, (kind, _) in EVERY_TYPE.items()])


def values(which: int | None) -> Row:
    return tuple(None if which is None else cases[which] for _, cases in EVERY_TYPE.values())


def test_values_of_every_type_come_back_as_they_went_in(target: Target) -> None:
    rows = [values(0), values(1)]
    empty = (1, *values(None)[1:])
    begin(target.sink, *rows, empty, schema=TYPED)
    found = target.read(TABLE)
    assert [field.type for field in found.schema] == [field.type for field in TYPED]
    assert same_rows(rows_of(found), [*rows, empty])


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_key_may_be_of_any_type_and_other_values_stay(target: Target, name: str) -> None:
    begin(target.sink, values(0), values(1), schema=TYPED)
    place = TYPED.names.index(name)
    identity = Identity("i", (name,))
    old = tuple(value if i == place else None for i, value in enumerate(values(0)))
    changes = typed([Change("D", None, old, K), Change("U", (*values(1),))], TYPED)
    target.sink.apply(TABLE, fold(changes, identity), Lsn(200), identity)
    expect(target, values(1))


def test_rows_of_every_type_are_told_apart_in_a_multiset(target: Target) -> None:
    begin(target.sink, values(0), values(0), values(1), values(None), schema=TYPED)
    changes = typed([Change("D", None, values(0), O), Change("D", None, values(None), O)], TYPED)
    target.sink.apply(TABLE, fold(changes, FULL), Lsn(200), FULL)
    expect(target, values(0), values(1))


def test_nan_is_itself_and_minus_zero_is_not_zero(target: Target) -> None:
    schema = pa.schema([("x", pa.float64())])
    begin(target.sink, (float("nan"),), (0.0,), (-0.0,), schema=schema)
    changes = typed([Change("D", None, (float("nan"),), O), Change("D", None, (0.0,), O)], schema)
    target.sink.apply(TABLE, fold(changes, FULL), Lsn(200), FULL)
    assert str(rows_of(target.read(TABLE))) == "[(-0.0,)]"


ODD = ["Orders", "ORDERS", "o r", "a.b", "a/b", "..", ".", ".x", "it's", 'q"q', "~2F", "%2F", "a%", "\U0001f40d", "é"]
ODD += ["_delta_log", "-x", "a\\b", "a:b", "a\nb", "x" * 63, "ü" * 31, "*?[]{}", "a#b", "null", "~", "a=b", " "]


def test_tables_of_any_name_stay_apart(target: Target) -> None:
    tables = [TableName(namespace, name) for name in ODD for namespace in ("public", name)]
    for number, table in enumerate(tables[:: 1 if len(tables) < 20 else 3]):
        begin(target.sink, row(number), table=table)
    for number, table in enumerate(tables[:: 1 if len(tables) < 20 else 3]):
        do(target.sink, update(number, count=number + 1), table=table)
        assert rows_of(target.read(table)) == [row(number, count=number + 1)]


def test_columns_may_have_any_name(target: Target) -> None:
    names = ["Unit Price", "a.b", "a", "q\"u`o'te", ",;{}()=", "\U0001f40d", "select", "x y.z", "%41", "min", "path"]
    schema = pa.schema([(name, pa.string()) for name in names])
    rows = [tuple(f"{i}{name}" for name in names) for i in range(3)]
    begin(target.sink, *rows, schema=schema)
    for number, name in enumerate(names):
        identity = Identity("d", (name,))
        told: Row = tuple(value if i in (number, 2) else UNCHANGED for i, value in enumerate(rows[1]))
        changes = typed([Change("U", told)], schema)
        target.sink.apply(TABLE, fold(changes, identity), Lsn(200 + number), identity)
    expect(target, *rows, lsn=200 + len(names) - 1)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.one_of(keyed_histories(12), multiset_histories(12)), cut=st.integers(0, 12))
def test_batches_of_any_history_lead_to_its_rows(
    tmp_path_factory: pytest.TempPathFactory, history: History, cut: int
) -> None:
    target = SINKS["delta"](tmp_path_factory.mktemp("history"))
    begin(target.sink, *history.before)
    for lsn, part in ((200, history.changes[:cut]), (300, history.changes[cut:])):
        do(target.sink, *part, lsn=lsn, identity=history.identity)
    found = rows_of(target.read(TABLE))
    assert same_rows(found, history.after), (sorted(map(str, map(frozen, found))), history.after)


RACES: dict[str, Callable[[LakeSink, int], Any]] = {
    "append": lambda sink, lsn: do(sink, insert(1000 + lsn), lsn=lsn),
    "update": lambda sink, lsn: do(sink, update(1, count=lsn), insert(1000 + lsn), lsn=lsn),
    "multiset": lambda sink, lsn: do(
        sink, Change("D", None, row(2), O), Change("I", row(1000 + lsn)), lsn=lsn, identity=FULL
    ),
    "truncate": lambda sink, lsn: do(sink, TRUNCATE, insert(1000 + lsn), lsn=lsn),
    "commit": lambda sink, lsn: sink.commit(
        TABLE, sink.stage(TABLE, table_of(row(1000 + lsn)).to_batches()), Lsn(lsn), APPEND
    ),
}


def racer(again: bytes, name: str, gate: Any, rounds: int, out: Any) -> None:
    sink: LakeSink = pickle.loads(again)
    for number in range(rounds):
        gate.wait()
        try:
            out.put((number, RACES[name](sink, 1000 + number)))
        except WalmereError as error:
            out.put((number, str(error)))


@pytest.mark.parametrize("name", RACES)
def test_two_attempts_at_once_have_one_effect(target: Target, name: str) -> None:
    rounds = target.races
    begin(target.sink, row(1), *[row(2)] * 100)
    first = target.sink.version(TABLE)
    processes = multiprocessing.get_context("spawn")
    gate, out = processes.Barrier(2), processes.Queue()
    args = (pickle.dumps(target.sink), name, gate, rounds, out)
    both = [processes.Process(target=racer, args=args) for _ in range(2)]
    for process in both:
        process.start()
    results = [out.get(timeout=60) for _ in range(2 * rounds)]
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    for number in range(rounds):
        versions = [result for round_number, result in results if round_number == number]
        assert versions == [first + 1 + number] * 2
    assert target.sink.version(TABLE) == first + rounds
    assert target.sink.applied(TABLE) == 1000 + rounds - 1
    found = sorted(r[1] for r in rows_of(target.read(TABLE)))
    new = [2000 + number for number in range(rounds)]
    expected = {"truncate": new[-1:], "multiset": [1] + [2] * (100 - rounds) + new}
    assert found == expected.get(name, [1] + [2] * 100 + new)


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


def test_a_zombie_that_wakes_after_later_batches_changes_nothing(target: Target) -> None:
    begin(target.sink, row(1), row(2))
    late = [update(1, count=5), delete(2)]
    do(target.sink, *late)
    do(target.sink, insert(2, count=8), update(1, count=9), lsn=300)
    version = target.sink.version(TABLE)
    assert do(target.again(), *late) == version
    expect(target, row(1, count=9), row(2, count=8), lsn=300)


def test_a_death_at_the_commit_leaves_the_table_as_it_was(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(target.sink, row(1), row(2))
    version = target.sink.version(TABLE)

    class Dead(BaseException):
        pass

    def die(*args: Any, **kwargs: Any) -> None:
        raise Dead

    for changes in ([insert(3)], [update(1, count=4), insert(3)], [TRUNCATE]):
        with monkeypatch.context() as patch, contextlib.suppress(Dead):
            patch.setattr(Directory, "create", die)
            do(target.sink, *changes)
        expect(target, row(1), row(2), lsn=100)
        assert target.sink.version(TABLE) == version
    do(target.sink, update(1, count=4), insert(3))
    expect(target, row(1, count=4), row(2), row(3))


def test_errors_of_a_sink_cross_a_process_border() -> None:
    for kind in (SinkError, SinkMismatch):
        again = pickle.loads(pickle.dumps(kind("doing", "wrong", "hint")))
        assert (type(again), str(again)) == (kind, str(kind("doing", "wrong", "hint")))


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
