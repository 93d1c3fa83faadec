"""The size of a table by its newest commit: what it cannot know, it does not say. `test_replay` has what it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import OVERWRITE
from walmere.sinks.delta.log.recorded_size import NotRecorded, recorded_size
from walmere.sinks.delta.places import table_path
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.table_size import TableSize

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of two versions."""
    sink = DeltaSink(str(tmp_path))
    sink.create(TABLE, SCHEMA)
    sink.commit(TABLE, sink.stage(TABLE, pa.table([[1, 2]], schema=SCHEMA).to_batches()), Lsn(1), OVERWRITE)
    return tmp_path / table_path(TABLE)


def newest(table: Path) -> Path:
    return max((table / "_delta_log").glob("*.json"))


def test_a_new_table_is_empty(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path)).create(TABLE, SCHEMA)
    assert recorded_size(tmp_path / table_path(TABLE)) == TableSize(0, 0, 0)


def test_where_there_is_no_table_there_is_no_size(tmp_path: Path) -> None:
    assert recorded_size(tmp_path / "nothing") is None
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    assert recorded_size(tmp_path / "t") is None


def test_a_commit_of_an_earlier_version_does_not_say_it(table: Path) -> None:
    first, *others = newest(table).read_text().splitlines()
    info = {key: value for key, value in json.loads(first)["commitInfo"].items() if key != "walmere.files"}
    newest(table).write_text("\n".join([json.dumps({"commitInfo": info}), *others]))
    with pytest.raises(NotRecorded):
        recorded_size(table)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"commitInfo":null}', '{"add":{}}', '{"commitInfo":{}}', "\xff"])
def test_a_commit_that_is_no_commit_does_not_say_it(table: Path, content: str) -> None:
    newest(table).write_bytes(content.encode("latin-1"))
    with pytest.raises(NotRecorded):
        recorded_size(table)


@pytest.mark.parametrize("checkpoint", ["checkpoint.parquet", "checkpoint.0000000001.0000000002.parquet"])
def test_the_commit_before_a_checkpoint_is_not_the_newest(table: Path, checkpoint: str) -> None:
    assert recorded_size(table) == TableSize(1, newest_file(table).stat().st_size, 0)
    newest(table).with_name(f"{2:020d}.{checkpoint}").write_bytes(b"")
    with pytest.raises(NotRecorded):
        recorded_size(table)


def newest_file(table: Path) -> Path:
    [file] = table.glob("*.parquet")
    return file
