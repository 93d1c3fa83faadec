"""A PyArrow dataset over files with deletion vectors: what it returns, how often, and what it refuses."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pytest

from sinks.vectors import delete_rows
from walmere.errors import LakeError
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import OVERWRITE
from walmere.sinks.delta.files import parquet
from walmere.sinks.delta.files.dataset import VectorDataset
from walmere.sinks.delta.log.snapshot import Pinned
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("amount", pa.decimal128(10, 2))])
DELETED = {0, 3, 99, 100, 101, 250, 399}


def rows(first: int, last: int) -> pa.Table:
    ids = range(first, last)
    return pa.table(
        [
            pa.array(ids, pa.int64()),
            pa.array([None if i % 7 == 0 else f"x{i % 5}" for i in ids]),
            pa.array([i * 100 for i in ids]).cast(pa.decimal128(21, 2)).cast(SCHEMA.field("amount").type),
        ],
        schema=SCHEMA,
    )


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """400 rows in row groups of 100, some of them deleted; a file without deleted rows; a column that is newer."""
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 100)
    sink = DeltaSink(str(tmp_path / "lake"))
    sink.create(TABLE, SCHEMA)
    [file] = sink.stage(TABLE, [batch for at in range(0, 400, 100) for batch in rows(at, at + 100).to_batches()])
    sink.commit(TABLE, [file], Lsn(1), OVERWRITE)
    sink.commit(TABLE, sink.stage(TABLE, rows(1000, 1010).to_batches()), Lsn(2))
    sink.evolve(TABLE, SCHEMA.append(pa.field("more", pa.int32())), [*SCHEMA.names, pa.scalar(None, pa.int32())])
    version = delete_rows(sink, TABLE, file, *sorted(DELETED))
    return Pinned(sink, TABLE, version)


@pytest.fixture
def expected(pinned: Pinned) -> pa.Table:
    both = pa.concat_tables([rows(1000, 1010), rows(0, 400)])  # the marked file was added last
    both = both.append_column("more", pa.nulls(len(both), pa.int32()))
    return both.filter(pc.invert(pc.is_in(both["id"], pa.array(sorted(DELETED)))))


ID, X = pc.field("id"), pc.field("text")
FILTERS = [
    None,
    ID < 50,
    ID > 5000,
    (ID > 90) & (ID < 1002),
    X == "x1",
    X.is_null(),
    pc.field("more").is_null(),
    ID == 3,
]


@pytest.mark.parametrize("number", range(len(FILTERS)))
@pytest.mark.parametrize("columns", [None, ["id"], ["amount", "id", "amount"], [], {"twice": ID * 2, "x": X}])
def test_columns_and_filters_give_what_they_give_on_the_remaining_rows(
    pinned: Pinned, expected: pa.Table, columns: Any, number: int
) -> None:
    found, same = pinned.dataset(), pads.dataset(expected)
    condition = FILTERS[number]
    options = {"columns": columns, "filter": condition}
    assert isinstance(found, VectorDataset)
    want = same.to_table(**options)
    for _ in range(2):
        got = found.to_table(**options)
        assert (got.schema, got.num_rows) == (want.schema, want.num_rows)
        assert got.to_pylist() == want.to_pylist()
    assert pa.Table.from_batches(found.to_batches(**options), want.schema) == got
    assert found.scanner(**options).to_reader().read_all() == got
    assert found.count_rows(filter=condition) == same.count_rows(filter=condition) == got.num_rows
    if condition is not None:
        assert found.filter(condition).to_table(columns=columns) == got
        assert found.filter(condition).filter(ID < 60).count_rows() == same.count_rows(filter=condition & (ID < 60))
    assert found.head(3, **options).to_pylist() == got.to_pylist()[:3]


def test_it_can_be_sorted_joined_taken_from_and_pickled(pinned: Pinned, expected: pa.Table) -> None:
    dataset = pinned.dataset()
    assert dataset.schema == expected.schema
    assert dataset.sort_by("id").to_table()["id"].to_pylist() == sorted(expected["id"].to_pylist())
    joined = dataset.join(pinned.dataset().filter(ID > 1000), "id", right_suffix=" 2", join_type="inner")
    assert sorted(joined.to_table()["id"].to_pylist()) == list(range(1001, 1010))
    assert dataset.take(pa.array([0, 2]), columns=["id"])["id"].to_pylist() == [1000, 1002]
    assert pickle.loads(pickle.dumps(dataset.filter(ID < 5))).to_table()["id"].to_pylist() == [1, 2, 4]
    assert dataset.replace_schema(SCHEMA).to_table() == expected.select(SCHEMA.names)
    assert max(map(len, dataset.to_batches(batch_size=20, use_threads=False))) == 20


def test_nothing_reads_deleted_rows_around_it(pinned: Pinned, tmp_path: Path) -> None:
    """What it does not implement, PyArrow's C++ code would do on files. It finds none."""
    dataset = pinned.dataset()
    with pytest.raises(LakeError, match="to_batches"):
        dataset.get_fragments()
    other = pads.dataset(rows(1, 2))
    unreadable: dict[str, Callable[[], pa.Table]] = {
        "union": lambda: pads.dataset([dataset, pads.dataset(rows(0, 1))], schema=SCHEMA).to_table(),
        "children": dataset.children[0].to_table,
        "right side": lambda: other.join(dataset, "id", right_suffix=" 2").to_table(),
        "scanner": lambda: pads.Scanner.from_dataset(dataset).to_table(),
    }
    for way, read in unreadable.items():
        with pytest.raises(FileNotFoundError, match="this dataset has deletion vectors"):
            pytest.fail(f"{way}: {read()}")
    with pytest.raises(TypeError):
        pads.write_dataset(dataset, tmp_path / "copy", format="parquet")
    pads.write_dataset(dataset.scanner().to_reader(), tmp_path / "copy", format="parquet")
    assert pads.dataset(tmp_path / "copy").count_rows() == dataset.count_rows()


def test_pyarrow_has_no_method_of_datasets_that_was_not_thought_of() -> None:
    by_scanner = {"count_rows", "head", "take", "to_batches", "to_table"}
    harmless = {"schema", "partition_expression", "children"}
    public = {name for name, _ in inspect.getmembers(pads.UnionDataset) if not name.startswith("_")}
    assert public == by_scanner | harmless | {name for name in vars(VectorDataset) if not name.startswith("_")}


def test_duckdb_and_polars_read_it_with_columns_and_filters_pushed_down(
    pinned: Pinned, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = VectorDataset.scanner

    def watched(self: VectorDataset, columns: Any = None, filter: Any = None, **options: Any) -> Any:  # noqa: A002
        asked.append((columns, filter))
        return real(self, columns, filter, **options)

    monkeypatch.setattr(VectorDataset, "scanner", watched)
    with duckdb.connect() as connection:
        relation = connection.from_arrow(pinned.dataset())
        for _ in range(2):
            assert relation.filter("id < 5").project("id").fetchall() == [(1,), (2,), (4,)]
        assert {tuple(columns) for columns, _ in asked} == {("id",)}
        assert all(condition is not None for _, condition in asked)
        assert relation.aggregate("sum(id)").fetchall() == [(pc.sum(expected["id"]).as_py(),)]
    lazy = pl.scan_pyarrow_dataset(pinned.dataset())
    assert lazy.filter(pl.col("id") < 5).select("id").collect()["id"].to_list() == [1, 2, 4]
    assert lazy.collect().height == expected.num_rows


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_read_with_one_thread_of_each_pool(pinned: Pinned, threads: int) -> None:
    """A scanner that waits, in a thread of PyArrow's pool, for another thread of that pool would wait forever."""
    program = """
import pickle, sys
import duckdb, pyarrow as pa
pa.set_cpu_count(1)
pa.set_io_thread_count(1)
dataset = pickle.loads(bytes.fromhex(sys.argv[1]))
print(dataset.to_table().num_rows, dataset.count_rows(filter=None), dataset.scanner().to_reader().read_all().num_rows)
a = b = duckdb.connect().execute(f"SET threads = {sys.argv[2]}").from_arrow(dataset)
print(a.set_alias("a").join(b.set_alias("b"), "a.id = b.id").aggregate("count(*)").fetchall())
"""
    arguments = [pickle.dumps(pinned.dataset()).hex(), str(threads)]
    found = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    count = 410 - len(DELETED)
    assert found.stdout.split("\n")[:2] == [f"{count} {count} {count}", f"[({count},)]"]


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """With little read ahead, what is held is a few batches."""
    sink = DeltaSink(str(tmp_path / "lake"), file_size=1 << 20)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    sink.create(TABLE, schema)
    text = pa.array(np.random.default_rng(1).integers(0, 1 << 62, 20_000)).cast(pa.string())
    batches = (
        pa.record_batch([pa.array(range(at, at + 20_000)), text], schema=schema) for at in range(0, 800_000, 20_000)
    )
    staged = sink.stage(TABLE, batches)
    sink.commit(TABLE, staged, Lsn(1), OVERWRITE)
    for file in staged:
        version = delete_rows(sink, TABLE, file, 1, 2, 3)
    dataset = Pinned(sink, TABLE, version).dataset()
    before = pa.total_allocated_bytes()
    most = total = 0
    for batch in dataset.to_batches(batch_size=10_000, batch_readahead=1, fragment_readahead=1):
        total += len(batch)
        most = max(most, pa.total_allocated_bytes() - before)
    assert total == 800_000 - 3 * len(staged)
    assert most < dataset.to_table().nbytes / 2
