"""A Delta table as `deltalake` sees it, and as a replay of the log does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from sinks.histories import Change
from sinks.text_table import BY_ID, SCHEMA, TABLE, begin, delete, do, next_lsn, rows, update
from walmere.directory import Directory
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.log.recorded_size import NotRecorded, recorded_size
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID


def log(sink: DeltaSink) -> Path:
    return Path(sink.location(TABLE), "_delta_log")


def forget() -> None:
    """As in another process: no table is kept."""
    replay._kept.clear()


def seen_by_deltalake(opened: DeltaTable) -> dict[str, Any]:
    vectors = pa.table(opened.deletion_vectors())
    protocol, metadata = opened.protocol(), opened.metadata()
    return {
        "version": opened.version(),
        "files": sorted(unquote(uri.rpartition("/")[2]) for uri in opened.file_uris()),
        "deleted": {
            unquote(path.rpartition("/")[2]): np.flatnonzero(~np.array(kept, np.bool_)).tolist()
            for path, kept in zip(*(column.to_pylist() for column in vectors.columns), strict=True)
        },
        "protocol": (
            protocol.min_reader_version,
            protocol.min_writer_version,
            sorted(protocol.reader_features or ()),
            sorted(protocol.writer_features or ()),
        ),
        "metadata": (metadata.id, metadata.name, metadata.created_time, dict(metadata.configuration)),
        "columns": opened.schema().to_json(),
        "lsn": opened.transaction_version(APP_ID),
        "bytes": sum(pa.table(opened.get_add_actions(flatten=True))["size_bytes"].to_pylist()),
    }


def seen_by_us(found: TableVersion, directory: Directory) -> dict[str, Any]:
    protocol, metadata = found.protocol, found.metadata
    deleted = {file.name: file.deleted_rows(directory).tolist() for file in found.files if file.vector is not None}
    return {
        "version": found.version,
        "files": sorted(file.name for file in found.files),
        "deleted": {name: rows for name, rows in deleted.items() if rows},
        "protocol": (
            protocol["minReaderVersion"],
            protocol["minWriterVersion"],
            sorted(protocol.get("readerFeatures") or ()),
            sorted(protocol.get("writerFeatures") or ()),
        ),
        "metadata": (metadata["id"], metadata.get("name"), metadata.get("createdTime"), dict(found.properties)),
        "columns": found.schema.to_json(),
        "lsn": found.transactions.get(APP_ID),
        "bytes": found.size.bytes,
    }


def check(sink: DeltaSink, version: int | None = None) -> None:
    """That we see what deltalake sees: at a version, or now."""
    directory = sink.directory(TABLE)
    found = replay.newest(directory) if version is None else replay.at(directory, version)
    assert found is not None
    assert seen_by_us(found, directory) == seen_by_deltalake(DeltaTable(sink.location(TABLE), version))
    assert found.size.files == len(found.files)
    assert found.size.deleted == sum(len(file.deleted_rows(directory)) for file in found.files)
    if version is None:
        check_recorded(sink, found)


def check_recorded(sink: DeltaSink, found: TableVersion) -> None:
    """That our commits say how large the table is after them, and those of others do not."""
    newest = log(sink) / f"{found.version:020d}.json"
    if newest.exists() and '"engineInfo":"walmere/' in newest.read_text():
        assert recorded_size(Path(sink.location(TABLE))) == found.size
    else:
        with pytest.raises(NotRecorded):
            recorded_size(Path(sink.location(TABLE)))


OURS: dict[str, Callable[[DeltaSink], object]] = {
    "apply": lambda sink: do(sink, *[update(key, f"v{sink.version(TABLE)}") for key in range(0, 40, 3)]),
    "many deletes": lambda sink: do(sink, *[delete(key) for key in range(sink.version(TABLE) % 7, 1000, 2)]),
    "insert": lambda sink: do(sink, Change("I", (1000 + sink.version(TABLE), "x"))),
    "truncate": lambda sink: do(sink, Change("T"), Change("I", (5, "x"))),
    "upkeep": lambda sink: sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0)),
    "copy": lambda sink: sink.commit(
        TABLE, sink.stage(TABLE, rows(*range(50)).to_batches(), SCHEMA), next_lsn(sink), OVERWRITE, SCHEMA
    ),
    "no vectors": lambda sink: do(DeltaSink(sink.path, deletion_vectors=False), update(3, "rewritten")),
}


def long_history(sink: DeltaSink, checkpoint: int = 6, commits: int = 10) -> None:
    """A table with a checkpoint in the middle of its log."""
    begin(sink, rows(*range(1000)), rows(*range(1000, 1010)))
    while sink.version(TABLE) < commits:
        OURS["many deletes" if sink.version(TABLE) % 2 else "apply"](sink)
        if sink.version(TABLE) == checkpoint:
            DeltaTable(sink.location(TABLE)).create_checkpoint()
