from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from sinks.histories import (
    SCHEMA,
    UNCHANGED,
    Change,
    History,
    Row,
    apply_net,
    keyed_histories,
    multiset_histories,
    rows_of,
    same_rows,
    typed,
)
from walmere.apply.fold import Changes, Identity, Net, fold
from walmere.errors import WalmereError
from walmere.sinks.row_index import RowIndex, codes

BY_ID = Identity("d", ("id",))
K, O = ord("K"), ord("O")  # noqa: E741
slow = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def row(key: int, count: int = 0, note: Any = None, tags: Any = None) -> Row:
    return ("p", key, count, note, tags)


def old_key(key: int) -> Row:
    return (None, key, None, None, None)


def insert(key: int, count: int = 0, note: Any = None) -> Change:
    return Change("I", row(key, count, note))


def update(key: int, count: int = 0, note: Any = None, was: int | None = None) -> Change:
    return Change("U", row(key, count, note), None if was is None else old_key(was), 0 if was is None else K)


def delete(key: int) -> Change:
    return Change("D", None, old_key(key), K)


def folded(*changes: Change, identity: Identity = BY_ID) -> Net:
    return fold(typed(changes), identity)


def keys(table: pa.Table) -> list[int]:
    return sorted(table["id"].to_pylist())


def shape(net: Net) -> tuple[list[int], list[int], list[int]]:
    return keys(net.deletes), keys(net.upserts), keys(net.appends)


@slow
@given(keyed_histories())
def test_a_fold_by_key_comes_to_what_the_changes_one_by_one_come_to(history: History) -> None:
    net = fold(history.typed(), history.identity)
    assert same_rows(apply_net(history.before, net, history.identity), history.after)
    key = list(history.identity.key)
    found = [row for part in (net.deletes, net.upserts, net.appends) for row in rows_of(part.select(key))]
    assert len(found) == len(set(found))
    assert len(net.carry) == len(SCHEMA)
    assert (net.carry_from is not None) == any(mask is not None for mask in net.carry)


@slow
@given(multiset_histories())
def test_a_fold_without_key_comes_to_what_the_changes_one_by_one_come_to(history: History) -> None:
    net = fold(history.typed(), history.identity)
    assert same_rows(apply_net(history.before, net, history.identity), history.after)
    assert len(set(map(str, rows_of(net.deletes)))) == len(net.deletes)
    assert net.counts is not None
    assert (net.counts > 0).all()


def test_pure_inserts_are_an_append_of_the_very_same_arrays() -> None:
    changes = typed([insert(1), insert(2)])
    net = fold(changes, BY_ID)
    assert net.append_only
    assert net.appends is changes.new


def test_an_insert_beside_an_update_of_another_row_is_still_an_append() -> None:
    assert shape(folded(update(1), insert(2))) == ([], [1], [2])


def test_a_row_that_came_and_went_needs_nothing() -> None:
    assert folded(insert(1), update(1), delete(1)).empty
    assert folded(insert(1), update(2, was=1), delete(2)).empty


def test_delete_and_insert_again_replaces() -> None:
    net = folded(delete(1), insert(1, 7))
    assert shape(net) == ([], [1], [])
    assert net.upserts["count"].to_pylist() == [7]


def test_insert_and_delete_and_insert_again_is_an_append() -> None:
    assert shape(folded(insert(1), delete(1), insert(1, 2))) == ([], [], [1])


def test_a_moved_row_leaves_its_old_key_and_is_added_under_the_new() -> None:
    assert shape(folded(update(2, was=1))) == ([1], [], [2])


def test_an_old_key_equal_to_the_new_moves_nothing() -> None:
    assert shape(folded(update(1, was=1))) == ([], [1], [])


def test_two_rows_swap_their_keys_by_way_of_a_third() -> None:
    net = folded(update(9, 1, was=1), update(1, 2, was=2), update(2, 1, was=9))
    assert shape(net) == ([], [1, 2], [])
    assert dict(zip(net.upserts["id"].to_pylist(), net.upserts["count"].to_pylist(), strict=True)) == {1: 2, 2: 1}


def test_keys_move_along_a_chain() -> None:
    assert shape(folded(update(4, was=3), update(3, was=2), update(2, was=1))) == ([1], [2, 3], [4])


def test_one_row_goes_round_in_a_circle() -> None:
    net = folded(update(2, 1, was=1), update(3, 2, was=2), update(1, 3, was=3))
    assert shape(net) == ([], [1], [])
    assert net.upserts["count"].to_pylist() == [3]


def test_truncate_forgets_what_came_before_and_adds_what_comes_after() -> None:
    net = folded(insert(1), delete(5), Change("T"), insert(1, 4), insert(2), delete(2))
    assert net.truncate
    assert shape(net) == ([], [], [1])


def test_after_a_truncate_the_target_has_nothing_to_look_for() -> None:
    net = folded(Change("T"), update(1), delete(2), update(4, was=3))
    assert net.append_only
    assert keys(net.appends) == [1, 4]


def test_a_last_truncate_leaves_nothing_but_itself() -> None:
    net = folded(insert(1), Change("T"), insert(2), Change("T"))
    assert net.truncate
    assert net.append_only
    assert not len(net.appends)


def test_an_unchanged_value_comes_from_the_change_before() -> None:
    net = folded(insert(1, 1, "long"), update(1, 2, UNCHANGED), update(1, 3, UNCHANGED))
    assert rows_of(net.appends) == [row(1, 3, "long")]
    assert net.carry_from is None


def test_an_unchanged_value_follows_its_row_through_changes_of_key() -> None:
    net = folded(insert(1, 1, "mine"), insert(2, 1, "other"), update(9, 2, UNCHANGED, was=1), update(9, 3, UNCHANGED))
    assert row(9, 3, "mine") in rows_of(net.appends)


def test_an_unchanged_value_of_the_target_is_carried_under_the_key_it_has_there() -> None:
    net = folded(update(2, 1, UNCHANGED, was=1), update(3, 1, UNCHANGED, was=2), update(5, 1, "new"))
    assert shape(net) == ([1], [3, 5], [])
    assert net.carry_from is not None
    where = dict(zip(net.upserts["id"].to_pylist(), net.carry_from["id"].to_pylist(), strict=True))
    assert where == {3: 1, 5: 5}
    note = net.carry[SCHEMA.names.index("note")]
    assert note is not None
    assert dict(zip(net.upserts["id"].to_pylist(), note.tolist(), strict=True)) == {3: True, 5: False}


def test_a_null_sent_is_not_mistaken_for_an_unchanged_value() -> None:
    net = folded(update(1, 1, "long"), update(1, 2, None), update(1, 3, UNCHANGED))
    assert rows_of(net.upserts) == [row(1, 3, None)]
    assert net.carry_from is None


def test_with_identity_full_the_old_row_tells_the_unchanged_value() -> None:
    change = Change("U", row(1, 2, UNCHANGED), row(1, 1, "long"), O)
    for identity in (Identity("f", ("id",)), Identity("f")):
        net = folded(change, identity=identity)
        assert rows_of(net.upserts) + rows_of(net.appends) == [row(1, 2, "long")]
        assert net.carry_from is None


def test_one_delete_takes_one_of_equal_rows_and_null_equals_null() -> None:
    gone = Change("D", None, row(1, 0, None), O)
    net = folded(gone, gone, Change("I", row(1, 0, None)), identity=Identity("f"))
    assert rows_of(net.deletes) == [row(1)]
    assert net.counts is not None
    assert net.counts.tolist() == [1]
    assert not len(net.appends)


def test_an_update_to_what_the_row_was_is_nothing() -> None:
    assert folded(Change("U", row(1), row(1), O), identity=Identity("f")).empty


@pytest.mark.parametrize("identity", [Identity("n"), Identity("n", ("id",)), Identity("d")])
def test_without_identity_only_inserts_and_truncates_pass(identity: Identity) -> None:
    net = folded(Change("T"), insert(1), insert(1), identity=identity)
    assert net.truncate
    assert len(net.appends) == 2
    with pytest.raises(WalmereError, match="without a replica identity"):
        folded(insert(1), delete(1), identity=identity)


def test_a_value_left_alone_of_a_truncated_row_is_refused() -> None:
    with pytest.raises(WalmereError, match="TRUNCATE"):
        folded(Change("T"), update(1, 1, UNCHANGED))


def test_changes_that_cannot_be_are_refused() -> None:
    with pytest.raises(WalmereError, match="old tuple"):
        folded(Change("D"))
    with pytest.raises(WalmereError, match="old tuple"):
        folded(Change("I", row(1), old_key(1), K), delete(2))
    with pytest.raises(WalmereError, match="of the key was not sent"):
        folded(Change("U", ("p", UNCHANGED, 1, None, None)))
    with pytest.raises(WalmereError, match="does not have its old row"):
        folded(delete(1), identity=Identity("f"))
    with pytest.raises(ValueError, match="replica identity"):
        Identity("x")


def test_a_row_updated_very_often_keeps_its_unchanged_value_without_ado() -> None:
    count = 100_000
    unchanged = np.ones(count, np.bool_)
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
    new = pa.table([pa.array(np.ones(count, np.int64)), pa.nulls(count, pa.string())], schema=schema)
    changes = Changes(np.full(count, ord("U"), np.uint8), new, (None, unchanged), np.zeros(count, np.uint8), None)
    net = fold(changes, BY_ID)
    assert len(net.upserts) == 1
    assert net.carry[1] is not None


def test_slices_and_chunks_of_tables_are_folded_as_they_are() -> None:
    history = [insert(8, 0, "cut"), delete(1), insert(1, 5, "a"), update(2, 6, UNCHANGED), insert(3, 7, "b")]
    whole = typed(history)
    cut = Changes(
        whole.kind[1:],
        pa.concat_tables([whole.new.slice(1, 2), whole.new.slice(3)]),
        tuple(None if mask is None else mask[1:] for mask in whole.unchanged),
        whole.old_kind[1:],
        None if whole.old is None else pa.concat_tables([whole.old.slice(1, 1), whole.old.slice(2)]),
    )
    expected, net = folded(*history[1:]), fold(cut, BY_ID)
    for part in ("deletes", "upserts", "appends", "carry_from"):
        assert rows_of(getattr(net, part)) == rows_of(getattr(expected, part))


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), [0.0, -0.0, float("nan"), None]),
    (pa.binary(), [b"", b"\0", b"\xff", None]),
    (pa.list_(pa.int32()), [[], [None], [1], [1, 2], None]),
    (pa.list_(pa.list_(pa.string())), [[], [[]], [["a"]], [["a"], ["b"]], [["a", "b"]], None]),
    (pa.map_(pa.string(), pa.string()), [[], [("a", None)], [("a", "b")], [("a", "b"), ("c", "d")], None]),
    (pa.struct([("x", pa.int32()), ("y", pa.string())]), [{"x": 1, "y": None}, {"x": None, "y": None}, None]),
    (pa.list_(pa.float32(), 2), [[1.0, 2.0], [1.0, 3.0], None]),
]


@pytest.mark.parametrize(("kind", "values"), VALUES)
def test_values_of_any_type_are_numbered_by_their_bits(kind: pa.DataType, values: list[Any]) -> None:
    column = pa.array([values[0], *values, *values], kind).slice(1)
    number, count = codes([column])
    assert count == len(values)
    assert (number[: len(values)] == number[len(values) :]).all()
    assert len(set(number.tolist())) == count


@pytest.mark.parametrize(("kind", "values"), VALUES)
def test_an_index_finds_rows_by_columns_of_any_type(kind: pa.DataType, values: list[Any]) -> None:
    some = pa.table({"n": [1] * len(values), "v": pa.array(values, kind)}).slice(1)
    index = RowIndex(some, ("n", "v"))
    others = pa.table({"n": [1, 2] * len(values), "v": pa.array([v for v in values for _ in "12"], kind)})
    asked: list[str] = []

    def column(name: str) -> pa.Array:
        asked.append(name)
        return others[name].combine_chunks()

    where, which = index.find(column, len(others))
    assert where.tolist() == [2 * i for i in range(1, len(values))]
    assert which.tolist() == list(range(len(values) - 1))
    asked.clear()
    none = index.find(lambda name: column(name).slice(0, 0), 0)
    assert [len(part) for part in none] == [0, 0]
    assert not asked
