"""The key index finds the rows of a key, whatever happens to its files: it is a cache, never a source of truth."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import Change, Row, frozen, rows_of, same_rows, typed
from walmere.apply.fold import fold
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.files import key_index
from walmere.sinks.delta.files.key_index import KeyIndex
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import FILE_SIZE
from walmere.sinks.key_hash import hashes
from walmere.sinks.row_index import RowIndex, one_array

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
BY_ID, BY_NAME, BY_BOTH = (Identity("d", key) for key in (("id",), ("name",), ("id", "name")))
FULL = Identity("f")
K, O = ord("K"), ord("O")  # noqa: E741


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


@pytest.fixture(autouse=True)
def _nothing_open() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """As in another process: no index is open."""
    key_index._open.__init__()  # type: ignore[misc]


def rows(*ids: int, n: int = 0) -> pa.Table:
    return pa.table([list(ids), [f"name {i}" for i in ids], [n] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table, identity: Identity | None = BY_ID) -> None:
    schema = parts[0].schema
    sink.create(TABLE, schema)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches(), identity=identity)]
    sink.commit(TABLE, staged, Lsn(100), OVERWRITE)


def do(sink: DeltaSink, *changes: Change, lsn: int = 200, identity: Identity = BY_ID, schema: Any = SCHEMA) -> int:
    return sink.apply(TABLE, fold(typed(changes, schema), identity), Lsn(lsn), identity)


def update(key: int, n: int) -> Change:
    return Change("U", (key, f"name {key}", n))


def delete(key: int) -> Change:
    return Change("D", None, (key, f"name {key}", None), K)


def content(sink: DeltaSink) -> list[Row]:
    return sorted(rows_of(read_delta(sink.open(TABLE))), key=str)


def indexes(sink: DeltaSink) -> list[Path]:
    directory = sink.index_of(TABLE)
    assert directory is not None
    return sorted(directory.glob("*"))


def read_again(sink: DeltaSink) -> bool:
    """Whether all indexes of the table's files can be used."""
    forget()
    directory = sink.directory(TABLE)
    for identity in (BY_ID, BY_NAME, BY_BOTH):
        index = KeyIndex.of(directory, sink.current(TABLE).arrow_schema, identity, sink.index_of(TABLE))
        if all(index._read(file) is not None for file in sink.current(TABLE).files):
            return True
    return False


def test_the_task_that_writes_a_file_writes_its_index(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2), rows(3, 4))
    do(sink, update(1, 5), lsn=200)
    do(sink, Change("I", (9, "name 9", 9)), lsn=300)
    assert [path.name for path in indexes(sink)] == sorted(f"{file.name}.arrow" for file in sink.current(TABLE).files)
    assert read_again(sink)


def test_tasks_on_other_machines_have_indexes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "of the driver")).portable()
    for name in ("one", "two"):  # executors
        forget()
        (tmp_path / name).mkdir()
        monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / name},/somewhere/else")
        if name == "one":
            begin(sink, rows(1, 2), rows(3, 4))
        do(sink, update(1, 5), lsn=200 if name == "one" else 300)
        assert indexes(sink)
        found = sink.index_of(TABLE)
        assert found is not None
        assert found.is_relative_to(tmp_path / name / "walmere" / "index")
        assert found.parts[-2:] == ("public", "t")
        assert read_again(sink)
    monkeypatch.setenv("WALMERE_CACHE_DIRECTORY", "/mnt/cache")
    other = replace(sink, path=str(tmp_path / "another lake"))
    shared = [each.index_of(TABLE) for each in (sink, other, replace(sink))]
    assert shared[0] is not None
    assert shared[0].is_relative_to("/mnt/cache/index")
    assert shared[0] == shared[2] != shared[1], "executors of two subscriptions may share a cache"
    assert not (tmp_path / "of the driver").exists()


def test_a_search_deletes_old_indexes_of_files_that_the_table_does_not_have(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, vacuum runs on one executor, and the indexes of the others would stay."""
    begin(sink, rows(1, 2), rows(3, 4))
    [kept, *_] = indexes(sink)
    old, young = kept.with_name("old.arrow"), kept.with_name("young.arrow")
    for path in (old, young):
        path.touch()
    yesterday = time.time() - 86_400
    for path in (old, kept):
        os.utime(path, (yesterday, yesterday))
    do(sink, update(1, 5), lsn=200)
    assert old.exists()
    monkeypatch.setattr(key_index, "_PRUNE_SECONDS", 0.0)
    do(sink, update(1, 6), lsn=300)
    assert not old.exists()
    assert young.exists()
    assert kept.exists()


def test_without_a_directory_indexes_are_kept_in_memory_and_none_is_written(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    begin(sink, rows(1, 2), rows(3, 4))
    do(sink, update(1, 5), delete(4))
    assert content(sink) == [(1, "name 1", 5), (2, "name 2", 0), (3, "name 3", 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]
    assert len(key_index._open._indexes) == 2
    assert key_index._open._memory == 12 * 4


def of_another_file(sink: DeltaSink, path: Path) -> None:
    shutil.copy(next(other for other in indexes(sink) if other != path), path)


def of_other_columns(sink: DeltaSink, path: Path) -> None:
    [file] = [file for file in sink.current(TABLE).files if file.name == path.stem]
    by_name = KeyIndex.of(sink.directory(TABLE), SCHEMA, BY_NAME, sink.index_of(TABLE))
    path.unlink()
    by_name.open(file)
    assert path.exists()


def replaced_by(change: Callable[[bytes], bytes]) -> Callable[[DeltaSink, Path], None]:
    def damage(sink: DeltaSink, path: Path) -> None:
        content = path.read_bytes()
        path.unlink()  # the file may be mapped
        path.write_bytes(change(content))

    return damage


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(place * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]

    return flip


DAMAGES: dict[str, Callable[[DeltaSink, Path], None]] = {
    "missing": lambda sink, path: path.unlink(),
    **{f"changed byte at {place}": replaced_by(flipped(place)) for place in (0.0, 0.02, 0.3, 0.5, 0.7, 0.97, 1.0)},
    "empty": replaced_by(lambda content: b""),
    "one byte": replaced_by(lambda content: b"\0"),
    "four zeros": replaced_by(lambda content: bytes(4)),
    "all zeros": replaced_by(lambda content: bytes(len(content))),
    "half": replaced_by(lambda content: content[: len(content) // 2]),
    "last byte missing": replaced_by(lambda content: content[:-1]),
    "without checksum": replaced_by(lambda content: content[:-4]),
    "longer": replaced_by(lambda content: content + b"\0"),
    "of another file": of_another_file,
    "of other columns": of_other_columns,
}


@pytest.mark.parametrize("identity", [BY_ID, BY_BOTH], ids=["exact", "with keys"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_is_missing_or_damaged_is_made_again(sink: DeltaSink, damage: str, identity: Identity) -> None:
    begin(sink, rows(1, 2, 3), rows(4, 5), identity=identity)
    for path in indexes(sink):
        DAMAGES[damage](sink, path)
    forget()
    do(sink, update(1, 7), delete(5), update(4, 7), identity=identity)
    assert content(sink) == [(1, "name 1", 7), (2, "name 2", 0), (3, "name 3", 0), (4, "name 4", 7)]
    assert read_again(sink)


def test_the_index_of_a_file_of_the_same_name_and_another_size_is_not_used(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2, 3))
    [file] = sink.current(TABLE).files
    index = KeyIndex.of(sink.directory(TABLE), SCHEMA, BY_ID, sink.index_of(TABLE))
    assert index._read(file) is not None
    index.write(file.name, file.size + 1, [rows(3, 2, 1).select(["id"])])
    assert index._read(file) is None
    forget()
    do(sink, update(1, 7))
    assert content(sink)[0] == (1, "name 1", 7)


def test_a_directory_that_cannot_be_written_costs_time_and_no_rows(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file")
    sink = DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))
    begin(sink, rows(1, 2), rows(3))
    do(sink, update(1, 7), delete(3))
    forget()
    do(sink, update(2, 8), lsn=300)
    sink.vacuum(TABLE)
    assert content(sink) == [(1, "name 1", 7), (2, "name 2", 8)]


def test_an_index_that_is_a_directory_costs_time_and_no_rows(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    [path] = indexes(sink)
    path.unlink()
    path.mkdir()
    forget()
    do(sink, update(1, 7))
    assert content(sink) == [(1, "name 1", 7), (2, "name 2", 0)]
    assert [each.name for each in indexes(sink) if each.name.endswith(".tmp")] == []


def test_a_full_disk_leaves_no_part_of_an_index(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(sink, rows(1, 2), identity=None)

    def full(path: Path) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(key_index, "_checksum_of", full)  # the last step before the rename
    do(sink, update(1, 7))
    monkeypatch.undo()
    assert content(sink) == [(1, "name 1", 7), (2, "name 2", 0)]
    assert indexes(sink) == []


def few(count: int) -> Callable[[list[pa.Array]], Any]:
    """Hashes that collide: there are only so many different ones."""
    return lambda columns: hashes(columns) % np.uint64(count)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("identity", [BY_ID, BY_NAME, BY_BOTH], ids=["id", "name", "both"])
def test_keys_whose_hashes_collide_are_different_keys(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, count: int, identity: Identity
) -> None:
    monkeypatch.setattr(key_index, "hashes", few(count))
    monkeypatch.setattr(key_index, "is_exact", lambda schema: False)
    begin(sink, rows(*range(20)), rows(*range(20, 40)), identity=identity)
    expected = dict.fromkeys(range(40), 0)
    for number in range(5):
        changed, gone = range(number, 40, 7), 10 * number % 40 + number
        changes = [update(key, number) for key in changed if key in expected and key != gone]
        expected |= {change.new[0]: number for change in changes if change.new}
        if expected.pop(gone, None) is not None:
            changes.append(delete(gone))
        do(sink, *changes, update(1000, number), delete(2000), lsn=200 + number, identity=identity)
        expected[1000] = number
        forget()
    assert content(sink) == sorted([(key, f"name {key}", n) for key, n in expected.items()], key=str)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), count=st.sampled_from([1, 3, 2**63]))
def test_equal_rows_of_a_multiset_are_deleted_as_often_as_told_also_if_hashes_collide(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int
) -> None:
    path = tmp_path_factory.mktemp("multiset")
    sink = DeltaSink(str(path / "lake"), index=str(path / "index"))
    row = st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from(["a", "b", None]), st.just(0))
    parts = data.draw(st.lists(st.lists(row, min_size=1, max_size=15), min_size=1, max_size=3))
    left: list[Row] = [each for part in parts for each in part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "hashes", few(count))
        dicts = [[dict(zip(SCHEMA.names, each, strict=True)) for each in part] for part in parts]
        begin(sink, *(pa.Table.from_pylist(part, SCHEMA) for part in dicts), identity=FULL)
        for lsn in range(3):
            gone = [left.pop(data.draw(st.integers(0, len(left) - 1))) for _ in range(min(len(left), 4))]
            new = data.draw(st.lists(row, max_size=3))
            left += new
            changes = [Change("D", None, each, O) for each in gone] + [Change("I", each) for each in new]
            do(sink, *changes, lsn=200 + lsn, identity=FULL)
            forget()
        assert same_rows(rows_of(read_delta(sink.open(TABLE))), left)


KEYS: dict[str, tuple[Any, list[Any]]] = {
    "int": (pa.int32(), [-(2**31), -1, 0, 1, 2**31 - 1]),
    "float": (pa.float64(), [0.0, -0.0, float("inf"), 1.5]),
    "bool": (pa.bool_(), [True, False]),
    "date": (pa.date32(), [date(1, 1, 1), date(2026, 1, 1)]),
    "text": (pa.string(), ["", "a", "a" * 300 + "b" + "c" * 300, "a" * 300 + "d" + "c" * 300, "\U0001f40d"]),
    "bytea": (pa.binary(), [b"", b"\0", b"\0\0", b"\xff" * 500]),
    "numeric": (pa.decimal128(38, 2), [Decimal("-1.50"), Decimal("1.50"), Decimal("1" + "0" * 35 + ".00")]),
    "list": (pa.list_(pa.string()), [[], [""], ["a", None], [None, "a"]]),
}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), cached=st.booleans())
def test_any_batches_on_keys_of_any_type_are_those_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, cached: bool
) -> None:
    path = tmp_path_factory.mktemp("dictionary")
    names = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2, unique=True))
    schema = pa.schema([*((name, KEYS[name][0]) for name in names), ("n", pa.int64())])
    identity = Identity("d", tuple(names))
    sink = DeltaSink(str(path / "lake"), index=str(path / "index") if cached else None)
    sink.create(TABLE, schema)
    model: dict[str, Row] = {}
    for lsn in range(1, data.draw(st.integers(2, 6))):
        changes = []
        for key in data.draw(st.lists(st.tuples(*(st.sampled_from(KEYS[name][1]) for name in names)), max_size=6)):
            new = (*key, lsn)
            if repr(key) in model and data.draw(st.booleans()):
                del model[repr(key)]
                changes.append(Change("D", None, (*key, None), K))
            else:
                changes.append(Change("U" if repr(key) in model else "I", new))
                model[repr(key)] = new
        do(sink, *changes, lsn=lsn, identity=identity, schema=schema)
        match data.draw(st.sampled_from(["go on", "new process", "delete an index", "damage an index", "upkeep"])):
            case "new process":
                forget()
            case "delete an index" if cached and indexes(sink):
                data.draw(st.sampled_from(indexes(sink))).unlink()
                forget()
            case "damage an index" if cached and indexes(sink):
                which = data.draw(st.sampled_from(indexes(sink)))
                replaced_by(flipped(data.draw(st.floats(0, 1))))(sink, which)
                forget()
            case "upkeep":
                sink.optimize(TABLE, identity, Upkeep(deleted_share=0))
    found = rows_of(read_delta(sink.open(TABLE)))
    assert sorted(map(repr, map(frozen, found))) == sorted(map(repr, map(frozen, model.values())))


def test_columns_may_have_the_names_that_the_index_uses(sink: DeltaSink) -> None:
    schema = pa.schema([("#hash", pa.string()), ("#row", pa.string()), ("n", pa.int64())])
    begin(sink, pa.table([["a", "b"], ["c", "d"], [1, 2]], schema=schema), identity=Identity("d", ("#hash", "#row")))
    forget()
    do(sink, Change("U", ("a", "c", 5)), identity=Identity("d", ("#hash", "#row")), schema=schema)
    assert content(sink) == [("a", "c", 5), ("b", "d", 2)]


def test_nothing_is_found_in_an_empty_table_or_for_no_keys(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    index = KeyIndex.of(sink.directory(TABLE), SCHEMA, BY_ID, sink.index_of(TABLE))
    none = rows().select(["id"])
    keys = [one_array(none["id"])]
    assert list(index.find(sink.current(TABLE).files, RowIndex(none, ("id",)), keys)) == []
    assert list(index.find([], RowIndex(none, ("id",)), keys)) == []
    do(sink, Change("T"), lsn=200)
    do(sink, delete(1), lsn=300)
    assert content(sink) == []


def test_the_index_of_a_replaced_file_is_removed_by_vacuum_and_that_of_a_staged_one_is_not(sink: DeltaSink) -> None:
    begin(sink, rows(1), rows(2), identity=BY_ID)
    before = {path.name for path in indexes(sink)}
    [staged] = sink.stage(TABLE, rows(3).to_batches(), identity=BY_ID)
    sink.vacuum(TABLE)
    assert {path.name for path in indexes(sink)} == before | {f"{staged.path}.arrow"}
    do(sink, update(1, 1), update(2, 1))
    sink.vacuum(TABLE)
    [file] = sink.current(TABLE).files
    assert {path.name for path in indexes(sink)} == {f"{file.name}.arrow", f"{staged.path}.arrow"}
    assert Path(sink.location(TABLE), next(iter(before)).removesuffix(".arrow")).exists(), "readers may still need it"
    old = time.time() - 2 * 86_400
    for path in indexes(sink):
        os.utime(path, (old, old))
    left_by_a_killed_process = indexes(sink)[0].with_name(".0123.tmp")
    left_by_a_killed_process.touch()
    os.utime(left_by_a_killed_process, (old, old))
    sink.vacuum(TABLE)
    assert [path.name for path in indexes(sink)] == [f"{file.name}.arrow"]


def test_a_process_keeps_no_index_of_replaced_files_open(sink: DeltaSink) -> None:
    """The disk would keep them too, although they are deleted."""
    begin(sink, rows(*range(10)))
    for lsn in range(200, 230):
        do(sink, *[update(key, lsn) for key in range(10)], lsn=lsn)
        assert len(key_index._open._indexes) <= 3
    assert len(content(sink)) == 10


def test_memory_is_counted_once_also_if_threads_open_an_index_at_once(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    begin(sink, *(rows(*range(first, first + 50)) for first in range(0, 500, 50)))
    index = KeyIndex.of(sink.directory(TABLE), SCHEMA, BY_ID, None)
    files = sink.current(TABLE).files
    gate = threading.Barrier(4)

    def open_all(_: int) -> int:
        gate.wait()
        return sum(len(index.open(file).hashes) for file in files)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_all, range(4))) == [500] * 4
    assert key_index._open._memory == 500 * 12
    assert len(key_index._open._indexes) == 10


def test_a_process_keeps_only_so_many_indexes_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    begin(sink, *(rows(*range(first, first + 50)) for first in range(0, 500, 50)))
    monkeypatch.setattr(key_index, "_MAX_MEMORY", 1500)
    do(sink, update(77, 1), delete(499))
    assert len(key_index._open._indexes) == 2
    assert key_index._open._memory == 1200
    monkeypatch.setattr(key_index, "_MAX_OPEN", 1)
    do(sink, update(78, 1), lsn=300)
    assert len(key_index._open._indexes) == 1
    assert len(content(sink)) == 499


def test_the_indexes_of_a_table_of_a_terabyte_stay_open_and_take_no_file_descriptors(sink: DeltaSink) -> None:
    assert 1 << 40 < key_index._MAX_OPEN * FILE_SIZE < 65_530 * FILE_SIZE
    index = KeyIndex.of(sink.directory(TABLE), SCHEMA, BY_ID, sink.index_of(TABLE))
    begin(sink, *(rows(number) for number in range(20)))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    opened = [index.open(file) for file in sink.current(TABLE).files]
    assert len(opened) == 20
    assert len(list(descriptors.iterdir())) == before


def test_an_index_that_was_made_again_is_mapped_and_takes_no_memory(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2), identity=None)
    assert indexes(sink) == []
    do(sink, update(1, 7))
    [(index, size)] = key_index._open._indexes.values()
    assert (index.hashes.flags.owndata, size) == (False, 0)
    assert len(indexes(sink)) == 2
