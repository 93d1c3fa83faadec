"""What every sink does, a lake or a database: the contract of `walmere.sinks.base`, one test after the other.

`subjects` hides how each is written to and read. `test_lake` has what only lakes promise, `postgres/` what only
databases do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinks.histories import (
    SCHEMA,
    TRUNCATE,
    UNCHANGED,
    Change,
    History,
    K,
    O,
    Row,
    delete,
    frozen,
    insert,
    keyed_histories,
    multiset_histories,
    row,
    rows_of,
    same_rows,
    update,
)
from sinks.subjects import BY_ID, Dead, Subject, Writer
from walmere.errors import SinkConflict, SinkError, SinkMismatch, WalmereError
from walmere.lsn import Lsn
from walmere.names import Identity, TableName

TABLE = TableName("public", "orders")
FULL = Identity("f")


def begin(
    subject: Subject,
    *rows: Row,
    lsn: int = 100,
    table: TableName = TABLE,
    schema: pa.Schema = SCHEMA,
    identity: Identity = BY_ID,
) -> int:
    """As after the copy of a table, made by two tasks. `identity`: of the batches that follow."""
    subject.create(table, schema, identity)
    copy = subject.writer.begin_copy(table, schema)
    half = len(rows) // 2
    copy.range(0, rows[:half])
    copy.range(1, rows[half:])
    return copy.commit(lsn)


def do(
    writer: Writer,
    *changes: Change,
    lsn: int = 200,
    identity: Identity = BY_ID,
    table: TableName = TABLE,
    schema: pa.Schema = SCHEMA,
) -> int:
    return writer.apply(table, changes, lsn, identity, schema)


def expect(subject: Subject, *rows: Row, lsn: int = 200) -> None:
    found = rows_of(subject.read(TABLE))
    assert same_rows(found, rows), found
    assert subject.sink.applied(TABLE) == Lsn(lsn)


def test_a_copy_has_its_rows_and_its_lsn_when_it_is_whole(subject: Subject) -> None:
    subject.create(TABLE, SCHEMA, BY_ID)
    copy = subject.writer.begin_copy(TABLE, SCHEMA)
    copy.range(0, [row(1), row(2)])
    pickle.loads(pickle.dumps(subject.writer))  # it goes to tasks
    copy.range(1, [row(3)])
    assert subject.sink.applied(TABLE) is None
    version = copy.commit(100)
    assert subject.sink.version(TABLE) == version
    assert subject.sink.count(TABLE) == 3
    expect(subject, row(1), row(2), row(3), lsn=100)


def test_a_copy_made_again_shows_the_old_rows_until_it_is_whole(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    copy = subject.again().begin_copy(TABLE, SCHEMA)
    copy.range(0, [row(2, count=5)])
    copy.range(1, [row(3)])
    expect(subject, row(1), row(2), lsn=100)
    copy.commit(300)
    expect(subject, row(2, count=5), row(3), lsn=300)


def test_a_copy_that_fails_leaves_nothing(subject: Subject) -> None:
    subject.create(TABLE, SCHEMA, BY_ID)
    first = subject.writer.begin_copy(TABLE, SCHEMA)
    first.range(0, [row(1)])
    first.abandon()
    assert (len(subject.read(TABLE)), subject.sink.applied(TABLE)) == (0, None)
    begin(subject, row(1), row(2))
    again = subject.writer.begin_copy(TABLE, SCHEMA)
    again.range(0, [row(1), row(7)])
    again.abandon()
    expect(subject, row(1), row(2), lsn=100)
    do(subject.writer, insert(7))
    expect(subject, row(1), row(2), row(7))


def test_a_copy_that_was_killed_is_replaced_and_its_late_tasks_change_nothing(subject: Subject) -> None:
    subject.create(TABLE, SCHEMA, BY_ID)
    killed = subject.writer.begin_copy(TABLE, SCHEMA)
    killed.range(0, [row(1)])
    begin(subject, row(2), row(3))
    for late in (lambda: killed.range(1, [row(4)]), lambda: killed.commit(99)):
        with contextlib.suppress(SinkConflict):  # or it finds that there is nothing to do
            late()
    expect(subject, row(2), row(3), lsn=100)


def test_a_range_that_two_attempts_copy_at_once_is_there_once(subject: Subject) -> None:
    subject.create(TABLE, SCHEMA, Identity("n"))
    copy = subject.writer.begin_copy(TABLE, SCHEMA)
    gate = threading.Barrier(2)

    def attempt(_: int) -> None:
        gate.wait()
        copy.range(0, [row(1), row(2)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, range(2)))
    copy.range(0, [row(1), row(2)])
    copy.commit(100)
    expect(subject, row(1), row(2), lsn=100)


def test_a_table_gets_another_column_and_a_new_name_of_one_and_keeps_rows_and_lsn(subject: Subject) -> None:
    begin(subject, row(1), row(2, note=None))
    for writer in (subject.writer, subject.again()):  # the second finds it done
        writer.evolve(TABLE, SCHEMA, "more", "x", ("note", "comment"))
        found = subject.read(TABLE).sort_by("id")
        assert found.column_names == ["part", "id", "count", "comment", "tags", "more"]
        assert found.select(["id", "comment", "more"]).to_pylist() == [
            {"id": 1, "comment": "n", "more": "x"},
            {"id": 2, "comment": None, "more": "x"},
        ]
    assert subject.sink.applied(TABLE) == Lsn(100)


def test_a_table_that_is_not_there_has_no_lsn_and_no_version(subject: Subject) -> None:
    assert subject.sink.applied(TABLE) is None
    assert subject.sink.standing(TABLE) is None
    with pytest.raises(SinkMismatch, match=r"public\.orders"):
        subject.sink.version(TABLE)


def test_a_copy_of_no_rows_has_its_lsn_too(subject: Subject) -> None:
    begin(subject)
    expect(subject, lsn=100)
    do(subject.writer, insert(1))
    expect(subject, row(1))


def test_a_copy_made_again_takes_the_place_of_the_first(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    begin(subject, row(7), lsn=300)
    expect(subject, row(7), lsn=300)


def test_inserts_are_added(subject: Subject) -> None:
    begin(subject, row(1))
    do(subject.writer, insert(2), insert(3))
    expect(subject, row(1), row(2), row(3))


def test_updates_replace(subject: Subject) -> None:
    begin(subject, row(1), row(2), row(3))
    do(subject.writer, update(2, count=7), update(2, count=8), insert(4))
    expect(subject, row(1), row(2, count=8), row(3), row(4))


def test_deletes_remove(subject: Subject) -> None:
    begin(subject, row(1), row(2), row(3))
    do(subject.writer, delete(1), delete(3))
    expect(subject, row(2))
    do(subject.writer, delete(2), lsn=300)
    expect(subject, lsn=300)


def test_delete_and_insert_again_leaves_one_row(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    do(subject.writer, delete(1), insert(1, count=9))
    expect(subject, row(1, count=9), row(2))


def test_a_key_changes(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    do(subject.writer, update(9, was=1, count=3))
    expect(subject, row(9, count=3), row(2))


def test_keys_are_swapped_and_rotated(subject: Subject) -> None:
    begin(subject, row(1, count=1), row(2, count=2), row(3, count=3))
    do(
        subject.writer,
        update(0, was=1, count=1, note=UNCHANGED),
        update(1, was=2, count=2, note=UNCHANGED),
        update(2, was=3, count=3, note=UNCHANGED),
        update(3, was=0, count=1, note=UNCHANGED),
    )
    expect(subject, row(3, count=1), row(1, count=2), row(2, count=3))


def test_an_unchanged_value_stays_as_the_target_has_it(subject: Subject) -> None:
    begin(subject, row(1, note="long" * 99, tags=["a", None]), row(2, note=None), row(3))
    do(
        subject.writer,
        update(1, count=1, note=UNCHANGED, tags=UNCHANGED),
        update(2, count=2, note=UNCHANGED),
        update(3, count=3, note="sent"),
    )
    expect(
        subject,
        row(1, count=1, note="long" * 99, tags=["a", None]),
        row(2, count=2, note=None),
        row(3, count=3, note="sent"),
    )


def test_an_unchanged_value_goes_along_with_a_changed_key(subject: Subject) -> None:
    begin(subject, row(1, note="one"), row(2, note="two"), row(3, note="three"))
    do(
        subject.writer,
        update(9, was=1, count=1, note=UNCHANGED),
        insert(1, note="new"),
        delete(2),
        update(2, was=3, count=3, note=UNCHANGED),
    )
    expect(subject, row(9, count=1, note="one"), row(1, note="new"), row(2, count=3, note="three"))


def test_truncate_empties(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    version = subject.sink.version(TABLE)
    assert do(subject.writer, TRUNCATE) == version + 1
    expect(subject)


def test_truncate_and_insert_is_one_commit(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    version = subject.sink.version(TABLE)
    assert do(subject.writer, insert(3), TRUNCATE, insert(1, count=4), insert(5), update(5, count=6)) == version + 1
    expect(subject, row(1, count=4), row(5, count=6))


@pytest.mark.parametrize(
    "changes",
    [[insert(5)], [update(1, count=5)], [update(6, was=1), delete(2), insert(7)], [TRUNCATE, insert(1)], [TRUNCATE]],
)
def test_a_batch_is_one_commit_and_none_when_it_comes_again(subject: Subject, changes: list[Change]) -> None:
    begin(subject, row(1), row(2))
    before = subject.sink.version(TABLE)
    version = do(subject.writer, *changes)
    assert version == before + 1
    rows = rows_of(subject.read(TABLE))
    for lsn in (200, 150):
        assert do(subject.again(), *changes, lsn=lsn) == version
    assert subject.sink.version(TABLE) == version
    expect(subject, *rows)


def test_a_batch_that_comes_to_nothing_changes_no_row(subject: Subject) -> None:
    begin(subject, row(1))
    do(subject.writer, insert(2), delete(2))
    assert rows_of(subject.read(TABLE)) == [row(1)]
    do(subject.writer, insert(2), lsn=300)
    expect(subject, row(1), row(2), lsn=300)


def test_one_delete_takes_one_of_equal_rows(subject: Subject) -> None:
    begin(subject, *[row(1)] * 5, row(2), identity=FULL)
    gone = Change("D", None, row(1), O)
    do(subject.writer, gone, identity=FULL)
    expect(subject, *[row(1)] * 4, row(2))
    do(subject.writer, gone, gone, Change("U", row(2, count=1), row(2), O), lsn=300, identity=FULL)
    expect(subject, *[row(1)] * 2, row(2, count=1), lsn=300)


def test_in_a_multiset_null_equals_null_and_nothing_else(subject: Subject) -> None:
    nothing: Row = (None,) * 5
    rows = [nothing, nothing, row(None), row(1, tags=[]), row(1, tags=None), row(1, tags=[None])]
    begin(subject, *rows, identity=FULL)
    do(
        subject.writer,
        Change("D", None, nothing, O),
        Change("D", None, row(None), O),
        Change("U", row(1, count=3, tags=UNCHANGED), row(1, tags=[]), O),
        identity=FULL,
    )
    expect(subject, nothing, row(1, count=3, tags=[]), row(1, tags=None), row(1, tags=[None]))


def test_without_replica_identity_rows_are_added(subject: Subject) -> None:
    begin(subject, row(1), identity=Identity("n"))
    do(subject.writer, insert(1), insert(1), identity=Identity("n"))
    expect(subject, row(1), row(1), row(1))


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


def test_values_of_every_type_come_back_as_they_went_in(subject: Subject) -> None:
    rows = [values(0), values(1)]
    empty = (1, *values(None)[1:])
    begin(subject, *rows, empty, schema=TYPED, identity=FULL)
    found = subject.read(TABLE)
    assert [field.type for field in found.schema] == [field.type for field in TYPED]
    assert same_rows(rows_of(found), [*rows, empty])


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_key_may_be_of_any_type_and_other_values_stay(subject: Subject, name: str) -> None:
    identity = Identity("i", (name,))
    begin(subject, values(0), values(1), schema=TYPED, identity=identity)
    place = TYPED.names.index(name)
    old = tuple(value if i == place else None for i, value in enumerate(values(0)))
    changes = [Change("D", None, old, K), Change("U", (*values(1),))]
    do(subject.writer, *changes, identity=identity, schema=TYPED)
    expect(subject, values(1))


def test_rows_of_every_type_are_told_apart_in_a_multiset(subject: Subject) -> None:
    begin(subject, values(0), values(0), values(1), values(None), schema=TYPED, identity=FULL)
    changes = [Change("D", None, values(0), O), Change("D", None, values(None), O)]
    do(subject.writer, *changes, identity=FULL, schema=TYPED)
    expect(subject, values(0), values(1))


def test_nan_is_itself_and_minus_zero_is_not_zero(subject: Subject) -> None:
    schema = pa.schema([("x", pa.float64())])
    begin(subject, (float("nan"),), (0.0,), (-0.0,), schema=schema, identity=FULL)
    changes = [Change("D", None, (float("nan"),), O), Change("D", None, (0.0,), O)]
    do(subject.writer, *changes, identity=FULL, schema=schema)
    assert str(rows_of(subject.read(TABLE))) == "[(-0.0,)]"


ODD = ["Orders", "ORDERS", "o r", "a.b", "a/b", "..", ".", ".x", "it's", 'q"q', "~2F", "%2F", "a%", "\U0001f40d", "é"]
ODD += ["_delta_log", "-x", "a\\b", "a:b", "a\nb", "x" * 63, "ü" * 31, "*?[]{}", "a#b", "null", "~", "a=b", " "]


def test_tables_of_any_name_stay_apart(subject: Subject) -> None:
    tables = [TableName(namespace, name) for name in ODD for namespace in ("public", name)]
    for number, table in enumerate(tables[:: 1 if len(tables) < 20 else 3]):
        begin(subject, row(number), table=table)
    for number, table in enumerate(tables[:: 1 if len(tables) < 20 else 3]):
        do(subject.writer, update(number, count=number + 1), table=table)
        assert rows_of(subject.read(table)) == [row(number, count=number + 1)]


def test_columns_may_have_any_name(subject: Subject) -> None:
    names = ["Unit Price", "a.b", "a", "q\"u`o'te", ",;{}()=", "\U0001f40d", "select", "x y.z", "%41", "min", "path"]
    schema = pa.schema([(name, pa.string()) for name in names])
    rows = [tuple(f"{i}{name}" for name in names) for i in range(3)]
    begin(subject, *rows, schema=schema, identity=Identity("d", (names[0],)))
    for number, name in enumerate(names):
        told: Row = tuple(value if i in (number, 2) else UNCHANGED for i, value in enumerate(rows[1]))
        do(subject.writer, Change("U", told), lsn=200 + number, identity=Identity("d", (name,)), schema=schema)
    expect(subject, *rows, lsn=200 + len(names) - 1)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.one_of(keyed_histories(12), multiset_histories(12)), cut=st.integers(0, 12))
def test_batches_of_any_history_lead_to_its_rows(
    new_subject: Callable[[], AbstractContextManager[Subject]], history: History, cut: int
) -> None:
    with new_subject() as subject:
        begin(subject, *history.before, identity=history.identity)
        for lsn, part in ((200, history.changes[:cut]), (300, history.changes[cut:])):
            do(subject.writer, *part, lsn=lsn, identity=history.identity)
        found = rows_of(subject.read(TABLE))
        assert same_rows(found, history.after), (sorted(map(str, map(frozen, found))), history.after)


RACES: dict[str, list[Change]] = {  # besides an insert, which is different in each round
    "append": [],
    "update": [update(1, count=7), delete(1), insert(1)],
    "multiset": [Change("D", None, row(2), O)],
    "truncate": [TRUNCATE],
}


def race(writer: Writer, name: str, lsn: int) -> int:
    identity = FULL if name == "multiset" else BY_ID
    return do(writer, *RACES[name], insert(1000 + lsn), lsn=lsn, identity=identity, table=TableName("public", name))


def racer(again: bytes, gate: Any, rounds: int, out: Any) -> None:
    writer: Writer = pickle.loads(again)
    for name in RACES:
        for number in range(rounds):
            gate.wait()
            try:
                out.put((name, number, race(writer, name, 1000 + number)))
            except WalmereError as error:
                out.put((name, number, str(error)))


def test_two_attempts_at_once_have_one_effect(subject: Subject) -> None:
    rounds = subject.races
    first: dict[str, int] = {}
    for name in RACES:
        rows, identity = ([row(1), *[row(2)] * 99], FULL) if name == "multiset" else (list(map(row, range(100))), BY_ID)
        first[name] = begin(subject, *rows, table=TableName("public", name), identity=identity)
    processes = multiprocessing.get_context("spawn")
    gate, out = processes.Barrier(2), processes.Queue()
    args = (pickle.dumps(subject.writer), gate, rounds, out)
    both = [processes.Process(target=racer, args=args) for _ in range(2)]
    for process in both:
        process.start()
    results = [out.get(timeout=60) for _ in range(2 * rounds * len(RACES))]
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    new = [2000 + number for number in range(rounds)]
    expected = {"truncate": new[-1:], "multiset": [1] + [2] * (99 - rounds) + new}
    for name, before in first.items():
        for number in range(rounds):
            versions = [result for race_name, *its, result in results if (race_name, *its) == (name, number)]
            assert versions == [before + 1 + number] * 2, name
        table = TableName("public", name)
        assert subject.sink.version(table) == before + rounds
        assert subject.sink.applied(table) == 1000 + rounds - 1
        found = sorted(r[1] for r in rows_of(subject.read(table)))
        assert found == expected.get(name, [*range(100), *new]), name


def test_a_zombie_that_wakes_after_later_batches_changes_nothing(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    late = [update(1, count=5), delete(2)]
    do(subject.writer, *late)
    do(subject.writer, insert(2, count=8), update(1, count=9), lsn=300)
    version = subject.sink.version(TABLE)
    assert do(subject.again(), *late) == version
    expect(subject, row(1, count=9), row(2, count=8), lsn=300)


def test_a_death_at_the_commit_leaves_the_table_as_it_was(subject: Subject) -> None:
    begin(subject, row(1), row(2))
    version = subject.sink.version(TABLE)
    for changes in ([insert(3)], [update(1, count=4), insert(3)], [TRUNCATE]):
        with subject.dying(), pytest.raises(Dead):
            do(subject.writer, *changes)
        expect(subject, row(1), row(2), lsn=100)
        assert subject.sink.version(TABLE) == version
    do(subject.writer, update(1, count=4), insert(3))
    expect(subject, row(1, count=4), row(2), row(3))


def test_errors_of_a_sink_cross_a_process_border() -> None:
    for kind in (SinkError, SinkMismatch):
        again = pickle.loads(pickle.dumps(kind("doing", "wrong", "hint")))
        assert (type(again), str(again)) == (kind, str(kind("doing", "wrong", "hint")))
