"""Deletion vectors: what is written is read back, by us and by `deltalake`, and damage is noticed."""

from __future__ import annotations

import base64
import uuid
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from sinks.vectors import inline_vector
from walmere.apply.fold import fold
from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE
from walmere.sinks.delta.files.vectors import DIRECTORY, INLINE_BYTES, Vector, write
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.row_index import I64

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))

few = st.lists(st.integers(0, 2**40), max_size=30)
near_the_limits = st.lists(
    st.sampled_from([2**power + more for power in (0, 15, 16, 31, 32, 33, 40) for more in (-1, 0, 1)])
)
ranges = st.tuples(st.integers(0, 2**33), st.integers(1, 5000)).map(lambda each: range(each[0], sum(each)))
many = st.lists(ranges, max_size=3).map(lambda some: [row for each in some for row in each])
sets_of_rows = st.one_of(few, near_the_limits, many).map(lambda rows: np.unique(np.array(rows, np.int64)))


def numbers(*rows: int) -> I64:
    return np.array(rows, np.int64)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sets=st.lists(sets_of_rows, max_size=5))
def test_vectors_are_read_back_as_they_were_written(tmp_path: Path, sets: list[I64]) -> None:
    directory = Directory(str(tmp_path))
    written = write(directory, sets)
    assert [vector.count for vector in written] == [len(rows) for rows in sets]
    for vector, rows in zip(written, sets, strict=True):
        again = Vector.from_action(vector.to_action())
        assert again == vector
        assert (vector.storage == "i") == (vector.size <= INLINE_BYTES)
        found = again.rows(directory)
        assert found.dtype == np.int64
        assert np.array_equal(found, rows)


def test_a_small_vector_is_in_the_log_and_makes_no_file(tmp_path: Path) -> None:
    [none, one, far] = write(Directory(str(tmp_path)), [numbers(), numbers(7), numbers(2**32 + 5)])
    assert {none.storage, one.storage, far.storage} == {"i"}
    assert (one.path, one.offset, "offset" in one.to_action()) == (None, None, False)
    assert list(tmp_path.iterdir()) == []


def test_vectors_of_one_commit_share_a_file_each_at_its_offset(tmp_path: Path) -> None:
    rows = [np.arange(step, 5000, step, dtype=np.int64) for step in (2, 3, 5)]
    written = write(Directory(str(tmp_path)), [rows[0], numbers(1), *rows[1:]])
    assert [vector.storage for vector in written] == ["u", "i", "u", "u"]
    [file] = (tmp_path / DIRECTORY).iterdir()
    assert {vector.path for vector in written if vector.path} == {f"{DIRECTORY}/{file.name}"}
    assert [vector.offset for vector in written] == [
        1,
        None,
        1 + written[0].size + 8,
        1 + written[0].size + 8 + written[2].size + 8,
    ]
    content = file.read_bytes()
    assert content[0] == 1
    assert len(content) == 1 + sum(vector.size + 8 for vector in written if vector.path)
    for vector in written:
        if vector.offset is not None:
            assert int.from_bytes(content[vector.offset :][:4], "big") == vector.size


def test_the_file_of_a_vector_is_named_by_its_uuid_in_z85() -> None:
    """The example of Delta's protocol document."""
    vector = Vector("u", "ab^-aqEH.-t@S}K{vb[*k^", 40, 6, 4)
    assert vector.path == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert Vector("u", "^-aqEH.-t@S}K{vb[*k^", 40, 6, 4).path == vector.path[3:]


@given(st.sets(st.integers(0, 2**16 - 1), min_size=1, max_size=20))
def test_a_vector_that_spark_has_written_into_the_log_is_read(rows: set[int]) -> None:
    assert Vector.from_action(inline_vector(*sorted(rows))).rows(Directory("/")).tolist() == sorted(rows)


def in_a_file(path: Path) -> tuple[Vector, Path]:
    [vector] = write(Directory(str(path)), [np.arange(0, 5000, 2, dtype=np.int64)])
    [file] = (path / DIRECTORY).iterdir()
    return vector, file


@pytest.mark.parametrize("place", [1, 4, 5, 8, 300, -5, -4, -1])
def test_a_changed_byte_in_a_file_of_vectors_is_an_error_that_names_the_file(tmp_path: Path, place: int) -> None:
    vector, file = in_a_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    with pytest.raises(SinkMismatch, match="size or checksum") as caught:
        vector.rows(Directory(str(tmp_path)))
    assert file.name in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 3, 5, 9, 200, -1])
def test_a_file_of_vectors_that_is_cut_off_is_an_error_that_names_the_file(tmp_path: Path, size: int) -> None:
    vector, file = in_a_file(tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SinkMismatch, match="size or checksum") as caught:
        vector.rows(Directory(str(tmp_path)))
    assert file.name in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"abcd", (1681511376).to_bytes(4, "little") + bytes(8), bytes(100)])
def test_a_vector_of_an_unknown_format_is_an_error(tmp_path: Path, data: bytes) -> None:
    padded = data + bytes(-len(data) % 4)
    vector = Vector.from_action({**inline_vector(1), "pathOrInlineDv": z85(padded), "sizeInBytes": len(data)})
    with pytest.raises(SinkMismatch, match="format is unknown"):
        vector.rows(Directory(str(tmp_path)))


@pytest.mark.parametrize("cut", [4, 8, 12, 20])
def test_a_vector_in_the_log_that_is_cut_off_is_an_error(tmp_path: Path, cut: int) -> None:
    [whole] = write(Directory(str(tmp_path)), [numbers(1, 5, 70_000, 2**33)])
    data = base64.b85decode(whole.where.encode().translate(bytes.maketrans(THEIRS, PYTHON)))[:cut]
    with pytest.raises(SinkMismatch, match="cannot be decoded"):
        Vector("i", z85(data), len(data), 4).rows(Directory(str(tmp_path)))


@pytest.mark.parametrize("storage", ["p", "x"])
def test_a_vector_in_a_file_elsewhere_is_refused_by_name(tmp_path: Path, storage: str) -> None:
    with pytest.raises(SinkMismatch, match=f"storage type {storage}"):
        Vector(storage, "file:///elsewhere.bin", 40, 6, 1).rows(Directory(str(tmp_path)))


PYTHON = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
THEIRS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(data: bytes) -> str:
    return base64.b85encode(data).translate(bytes.maketrans(PYTHON, THEIRS)).decode()


def seen_by_deltalake(sink: DeltaSink) -> dict[str, list[int]]:
    """The deleted rows of each file that has some."""
    found = pa.table(DeltaTable(sink.location(TABLE)).deletion_vectors())
    return {
        unquote(path.rpartition("/")[2]): np.flatnonzero(~np.array(kept, np.bool_)).tolist()
        for path, kept in zip(*(column.to_pylist() for column in found.columns), strict=True)
    }


def seen_by_us(sink: DeltaSink) -> dict[str, list[int]]:
    directory = sink.directory(TABLE)
    files = sink.current(TABLE).files
    return {file.name: file.deleted_rows(directory).tolist() for file in files if file.vector is not None}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches=st.lists(st.sets(st.integers(0, 2999), max_size=400), min_size=1, max_size=4), dense=st.booleans())
def test_deltalake_reads_the_same_deleted_rows_and_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, batches: list[set[int]], dense: bool
) -> None:
    sink = DeltaSink(str(tmp_path_factory.mktemp("lake")))
    sink.create(TABLE, SCHEMA)
    parts = [range(1000), range(1000, 1010), range(1010, 3000)]
    tables = [pa.table([list(ids), list(map(str, ids))], schema=SCHEMA) for ids in parts]
    staged = [file for table in tables for file in sink.stage(TABLE, table.to_batches())]
    sink.commit(TABLE, staged, Lsn(1), OVERWRITE)
    left = dict.fromkeys(range(3000), "")
    for lsn, ids in enumerate(batches, 2):
        gone = {each + more for each in ids for more in (range(7) if dense else (0,))} & set(left)
        changes = [Change("D", None, (key, None), ord("K")) for key in sorted(gone)]
        sink.apply(TABLE, fold(typed(changes, SCHEMA), BY_ID), Lsn(lsn), BY_ID)
        for key in gone:
            del left[key]
        assert seen_by_deltalake(sink) == {name: rows for name, rows in seen_by_us(sink).items() if rows}
        assert sorted(rows_of(read_delta(sink.open(TABLE)))) == [(key, str(key)) for key in left]


def test_the_name_of_a_new_vector_file_can_be_read_back_from_its_descriptor(tmp_path: Path) -> None:
    for _ in range(50):
        vector, file = in_a_file(tmp_path)
        assert vector.path == f"{DIRECTORY}/{file.name}"
        assert str(uuid.UUID(file.stem.removeprefix("deletion_vector_"))) in file.name
        file.unlink()
