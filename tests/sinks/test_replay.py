"""Replaying the log comes to the same table as `deltalake` does, at every version, whatever happens to the log."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from walmere.apply.fold import fold
from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log import replay, retention
from walmere.sinks.delta.log.recorded_size import NotRecorded, recorded_size
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))
K = ord("K")


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table([list(ids), [text] * len(ids)], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table) -> None:
    sink.create(TABLE, SCHEMA)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches())]
    sink.commit(TABLE, staged, Lsn(1), OVERWRITE)


def do(sink: DeltaSink, *changes: Change) -> int:
    schema = sink.current(TABLE).arrow_schema
    more = (None,) * (len(schema) - 2)
    wider = [Change(c.kind, c.new and (*c.new, *more), c.old and (*c.old, *more), c.old_kind) for c in changes]
    return sink.apply(TABLE, fold(typed(wider, schema), BY_ID), next_lsn(sink), BY_ID)


def next_lsn(sink: DeltaSink) -> Lsn:
    return Lsn((sink.applied(TABLE) or 0) + 1)


def update(key: int, text: str = "new") -> Change:
    return Change("U", (key, text))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), K)


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


def restore(opened: DeltaTable) -> None:
    before = max(0, opened.version() - 2)
    # deltalake takes the greater versions of both protocols, without their features, and fails
    if DeltaTable(opened.table_uri, before).protocol() == opened.protocol():
        opened.restore(before)


def add_column(opened: DeltaTable) -> None:
    name = f"c{len(opened.schema().fields)}"
    opened.alter.add_columns(Schema.from_arrow(pa.schema([(name, pa.int64())])).fields[0])


def with_our_columns(opened: DeltaTable, table: pa.Table) -> pa.Table:
    schema = pa.schema(opened.schema().to_arrow())
    missing = [pa.nulls(len(table), field.type) for field in list(schema)[2:]]
    return pa.Table.from_arrays([*table.columns, *missing], schema=schema)


THEIRS: dict[str, Callable[[DeltaTable], object]] = {
    "append": lambda opened: write_deltalake(opened, with_our_columns(opened, rows(100, 101)), mode="append"),
    "overwrite": lambda opened: write_deltalake(opened, with_our_columns(opened, rows(*range(10))), mode="overwrite"),
    "other columns": lambda opened: write_deltalake(opened, rows(1, 2, 3), mode="overwrite", schema_mode="overwrite"),
    "delete": lambda opened: opened.delete("id % 4 = 1"),
    "update": lambda opened: opened.update({"text": "'theirs'"}, predicate="id % 5 = 0"),
    "compact": lambda opened: opened.optimize.compact(),
    "restore": restore,
    "add column": add_column,
    "properties": lambda opened: opened.alter.set_table_properties({"delta.appendOnly": "false"}),
    "checkpoint": lambda opened: opened.create_checkpoint(),
}
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


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(sorted(THEIRS) + sorted(OURS) * 2), min_size=3, max_size=10), cold=st.booleans())
def test_any_history_of_commits_comes_to_the_same_table_at_every_version(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], cold: bool
) -> None:
    sink = DeltaSink(str(tmp_path_factory.mktemp("lake")), properties={"delta.checkpointInterval": "4"})
    begin(sink, rows(*range(1000)), rows(*range(1000, 1010)))
    for step in steps:
        if step in THEIRS:
            THEIRS[step](DeltaTable(sink.location(TABLE)))
        else:
            OURS[step](sink)
        if cold:
            forget()
        check(sink)
    forget()
    check(sink)
    for version in range(sink.version(TABLE) + 1):
        check(sink, version)


def split_checkpoint(sink: DeltaSink, parts: int) -> None:
    """Make several parts of the newest checkpoint, as Spark does with large ones."""
    whole = max(log(sink).glob("*.checkpoint.parquet"))
    table = pq.read_table(whole)
    for number in range(parts):
        name = f"{whole.name.removesuffix('.parquet')}.{number + 1:010d}.{parts:010d}.parquet"
        pq.write_table(table.take(list(range(number, len(table), parts))), whole.with_name(name))
    whole.unlink()
    last = log(sink) / "_last_checkpoint"
    content = json.loads(last.read_text())
    last.write_text(json.dumps({"version": content["version"], "size": content["size"], "parts": parts}))


def long_history(sink: DeltaSink, checkpoint: int = 6, commits: int = 10) -> None:
    """A table with a checkpoint in the middle of its log."""
    begin(sink, rows(*range(1000)), rows(*range(1000, 1010)))
    while sink.version(TABLE) < commits:
        OURS["many deletes" if sink.version(TABLE) % 2 else "apply"](sink)
        if sink.version(TABLE) == checkpoint:
            DeltaTable(sink.location(TABLE)).create_checkpoint()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_checkpoint_of_several_parts_is_read_also_without_the_commits_before_it(sink: DeltaSink, parts: int) -> None:
    long_history(sink)
    if parts > 1:
        split_checkpoint(sink, parts)
    for version in range(6):
        (log(sink) / f"{version:020d}.json").unlink()
    forget()
    check(sink)
    for version in range(6, 11):
        check(sink, version)
    with pytest.raises(SinkMismatch, match="version 0 is not there"):
        replay.at(sink.directory(TABLE), 5)
    assert len(replay.tombstones(sink.directory(TABLE), 10)) >= 8


def test_a_checkpoint_of_which_a_part_is_missing_is_not_used(sink: DeltaSink) -> None:
    long_history(sink)
    split_checkpoint(sink, 3)
    next(log(sink).glob("*.checkpoint.0000000002.*")).unlink()
    forget()
    directory = sink.directory(TABLE)
    found = replay.newest(directory)
    assert found is not None
    assert (found.version, found.transactions[APP_ID]) == (10, 10)
    assert len(replay.tombstones(directory, 10)) >= 8


def what_vacuum_needs(removed: list[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    files = [(each["deletionTimestamp"], DataFile.from_action({"size": 0, **each})) for each in removed]
    return {(time, file.path, file.vector) for time, file in files}


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def other_content(path: Path) -> None:
    pq.write_table(pa.table({"add": [1, 2]}), path)


@pytest.mark.parametrize("damage", [cut_off, zeros, other_content, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_replaced_by_the_commits(sink: DeltaSink, damage: Callable[[Path], None]) -> None:
    """deltalake does not fsync them: after a crash of the machine, one may be empty or cut off."""
    long_history(sink)
    directory = sink.directory(TABLE)
    expected = [seen_by_us(replay.at(directory, version), directory) for version in range(11)]
    removed = replay.tombstones(directory, 10)
    [checkpoint] = log(sink).glob("*.checkpoint.parquet")
    damage(checkpoint)
    forget()
    newest = replay.newest(directory)
    assert newest is not None
    assert seen_by_us(newest, directory) == expected[10]
    assert [seen_by_us(replay.at(directory, version), directory) for version in range(11)] == expected
    assert what_vacuum_needs(replay.tombstones(directory, 10)) >= what_vacuum_needs(removed), "as the commits have them"
    assert any(each["deletionVector"] is not None for each in removed)
    (log(sink) / f"{0:020d}.json").unlink()
    forget()
    reads: list[Callable[[], object]] = [
        lambda: replay.newest(directory),
        lambda: replay.at(directory, 10),
        lambda: replay.tombstones(directory, 10),
    ]
    for read in reads:
        with pytest.raises(SinkMismatch, match="version 0 is not there"):
            read()


@pytest.mark.parametrize("hint", ["missing", "not JSON", "too old", "of a version that has none", "a list"])
def test_what_last_checkpoint_says_does_not_matter(sink: DeltaSink, hint: str) -> None:
    long_history(sink, checkpoint=4)
    DeltaTable(sink.location(TABLE)).create_checkpoint()  # version 10
    for version in range(10):
        if version != 4:
            (log(sink) / f"{version:020d}.json").unlink()
    last = log(sink) / "_last_checkpoint"
    versions = {"too old": 4, "of a version that has none": 7}
    texts = {"not JSON": "{", **{name: json.dumps({"version": each, "size": 9}) for name, each in versions.items()}}
    last.write_text(texts.get(hint, "[]"))
    if hint == "missing":
        last.unlink()
    forget()
    found = replay.newest(sink.directory(TABLE))
    assert found is not None
    assert (found.version, found.transactions[APP_ID]) == (10, 10)
    with pytest.raises(SinkMismatch, match="version 5 is not there"):
        replay.at(sink.directory(TABLE), 7)


def test_commits_after_a_gap_are_an_error_and_never_a_shorter_table(sink: DeltaSink) -> None:
    long_history(sink, checkpoint=-1)
    (log(sink) / f"{5:020d}.json").unlink()
    forget()
    with pytest.raises(SinkMismatch, match="version 5 is not there"):
        sink.version(TABLE)
    (log(sink) / f"{0:020d}.json").unlink()
    forget()
    with pytest.raises(SinkMismatch, match="version 0 is not there"):
        sink.create(TABLE, SCHEMA)
    assert not (log(sink) / f"{0:020d}.json").exists()


def test_a_log_that_is_cleaned_up_while_it_is_read_is_read_again(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_history(sink, checkpoint=4)
    forget()
    real = Directory.files
    calls: list[str] = []

    def files(self: Directory, name: str) -> dict[str, float]:
        found = real(self, name)
        if not calls:  # right after it was listed, another process makes a checkpoint and deletes older commits
            DeltaTable(sink.location(TABLE)).create_checkpoint()
            for version in range(10):
                (log(sink) / f"{version:020d}.json").unlink()
            (log(sink) / f"{4:020d}.checkpoint.parquet").unlink()
        calls.append(name)
        return found

    monkeypatch.setattr(Directory, "files", files)
    assert sink.version(TABLE) == 10
    assert len(calls) == 2


def test_statistics_that_spark_writes_as_structs_are_not_repeated_in_commits(sink: DeltaSink) -> None:
    long_history(sink, checkpoint=10)
    [checkpoint] = log(sink).glob("*.checkpoint.parquet")
    table = pq.read_table(checkpoint)
    adds = table["add"].combine_chunks()
    day = pa.array([date(2026, 1, 1)] * len(adds))
    parsed = pa.StructArray.from_arrays([pa.StructArray.from_arrays([day], ["d"])], ["minValues"])
    fields = [*adds.type, pa.field("stats_parsed", parsed.type)]
    wider = pa.StructArray.from_arrays(
        [*(adds.field(i) for i in range(adds.type.num_fields)), parsed], fields=fields, mask=adds.is_null()
    )
    pq.write_table(table.set_column(table.column_names.index("add"), "add", wider), checkpoint)
    forget()
    assert all("stats_parsed" not in add for add in sink.current(TABLE).adds.values())
    before = len(rows_of(read_delta(sink.open(TABLE))))
    do(sink, delete(1004), delete(1007))
    forget()
    check(sink)
    assert before - len(rows_of(read_delta(sink.open(TABLE)))) == len({1004, 1007})


@pytest.mark.parametrize(
    "line", ['{"add":{}}', '{"add":null}', '{"remove":7}', '{"txn":{"appId":"a"}}', '{"remove":{"size":1}}']
)
def test_actions_without_what_they_need_are_an_error_that_names_the_version(sink: DeltaSink, line: str) -> None:
    begin(sink, rows(1))
    (log(sink) / f"{2:020d}.json").write_text(line)
    with pytest.raises(SinkMismatch, match="version 2"):
        sink.version(TABLE)


def test_a_commit_of_no_actions_and_actions_of_unknown_kinds_change_nothing(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    before = sink.current(TABLE)
    (log(sink) / f"{2:020d}.json").write_text("\n")
    (log(sink) / f"{3:020d}.json").write_text('{"commitInfo":{}}\n\n{"cdc":{"path":"x"}}\r\n{"domainMetadata":{}}')
    after = sink.current(TABLE)
    assert (after.version, after.adds, after.metadata) == (3, before.adds, before.metadata)


def test_a_table_that_was_deleted_and_created_again_is_read_again(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    do(sink, update(1))
    shutil.rmtree(sink.location(TABLE))
    assert replay.newest(sink.directory(TABLE)) is None
    assert sink.applied(TABLE) is None
    begin(sink, rows(7))
    check(sink)
    do(sink, update(7))
    check(sink)


def test_a_table_of_the_same_length_in_the_place_of_another_is_read_again(sink: DeltaSink, tmp_path: Path) -> None:
    other = DeltaSink(str(tmp_path / "other"))
    for each, key in ((sink, 1), (other, 2)):
        begin(each, rows(key))
        do(each, update(key))
    assert sink.current(TABLE).metadata["id"] != other.current(TABLE).metadata["id"]
    shutil.rmtree(sink.location(TABLE))
    shutil.copytree(other.location(TABLE), sink.location(TABLE))
    check(sink)
    assert sink.current(TABLE).metadata["id"] == other.current(TABLE).metadata["id"]


@pytest.mark.parametrize("checkpoint", [-1, 3, 6])
def test_a_table_restored_from_a_backup_is_read_again(sink: DeltaSink, tmp_path: Path, checkpoint: int) -> None:
    long_history(sink, checkpoint, commits=5)
    shutil.copytree(sink.location(TABLE), tmp_path / "backup")  # keeps the times of files
    while sink.version(TABLE) < 8:
        OURS["apply"](sink)
    if checkpoint == 6:
        DeltaTable(sink.location(TABLE)).create_checkpoint()
    assert sink.version(TABLE) == 8
    shutil.rmtree(sink.location(TABLE))
    shutil.copytree(tmp_path / "backup", sink.location(TABLE))
    check(sink)
    assert (sink.version(TABLE), sink.applied(TABLE)) == (5, Lsn(5))
    while sink.version(TABLE) < 9:  # another history of the same length
        OURS["insert"](sink)
        check(sink)


def test_a_newest_commit_that_was_replaced_is_read_again(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    do(sink, update(1, "first"))
    newest = log(sink) / f"{2:020d}.json"
    text = newest.read_text()
    assert sink.applied(TABLE) == Lsn(2)
    stamp = newest.stat()
    newest.unlink()
    assert sink.version(TABLE) == 1
    newest.write_text(text.replace('"version":2', '"version":9'))
    os.utime(newest, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the same size and time, another file
    assert sink.applied(TABLE) == Lsn(9)
    newest.write_text(text.replace('"version":2', '"version":8'))  # the same file and size, another time
    assert sink.applied(TABLE) == Lsn(8)


def test_a_commit_that_is_replaced_right_after_it_was_read_is_noticed(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(sink, rows(1))
    do(sink, update(1))
    forget()
    newest = log(sink) / f"{2:020d}.json"
    real = Directory.read

    def read(self: Directory, name: str) -> bytes | None:
        content = real(self, name)
        if name.endswith(newest.name):
            newest.write_text(newest.read_text().replace('"version":2', '"version":9'))
        return content

    monkeypatch.setattr(Directory, "read", read)
    assert sink.applied(TABLE) == Lsn(2)
    monkeypatch.undo()
    assert sink.applied(TABLE) == Lsn(9)


def test_opening_a_table_again_reads_only_what_was_committed_since(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_history(sink)
    read: list[str] = []
    real = Directory.read

    def watched(self: Directory, name: str) -> bytes | None:
        read.append(name.rpartition("/")[2])
        return real(self, name)

    monkeypatch.setattr(Directory, "read", watched)
    assert sink.version(TABLE) == 10
    assert read == []
    write_deltalake(sink.location(TABLE), rows(5000), mode="append")
    assert sink.version(TABLE) == 11
    assert sink.version(TABLE) == 11
    assert read == [f"{11:020d}.json"]


def test_a_checkpoint_is_durable_before_older_commits_are_deleted(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "3"})
    begin(sink, rows(1, 2))
    synced: list[str] = []
    monkeypatch.setattr(Directory, "sync", lambda self, *names: synced.extend(names))
    real = retention.clean_up

    def clean_up(directory: Directory, properties: Mapping[str, str], readable: Callable[[], Iterable[int]]) -> None:
        assert synced[-2:] == [f"_delta_log/{3:020d}.checkpoint.parquet", "_delta_log"]
        synced.append("cleaned up")
        real(directory, properties, readable)

    monkeypatch.setattr(retention, "clean_up", clean_up)
    while sink.version(TABLE) < 3:
        do(sink, update(1))
    assert synced[-1] == "cleaned up"


def test_the_last_version_of_a_table_that_has_rested_outlives_the_commit_that_replaces_it(sink: DeltaSink) -> None:
    """Its commits are older than the log is kept, and a checkpoint of the new commit needs none of them."""
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "5"})
    begin(sink, rows(1, 2))
    for last in (4, 9, 14):
        while sink.version(TABLE) < last:
            do(sink, update(1, str(sink.version(TABLE))))
        before = rows_of(read_delta(sink.open(TABLE)))
        for path in log(sink).iterdir():
            os.utime(path, (time.time() - 9 * 86_400,) * 2)
        assert do(sink, update(1, "new")) == last + 1
        assert (log(sink) / f"{last + 1:020d}.checkpoint.parquet").exists()
        assert rows_of(read_delta(sink.open(TABLE, last))) == before
        forget()
        check(sink)
        check(sink, last)
    names = {path.name for path in log(sink).glob("*.json")}
    assert names == {f"{version:020d}.json" for version in range(10, 16)}, "and what it does not need is deleted"


def test_the_log_of_the_newest_point_stays_however_old_it_is(sink: DeltaSink) -> None:
    """While a table is ahead of the others, there may be no newer point for hours."""
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "5"})
    begin(sink, rows(1, 2))
    while sink.version(TABLE) < 7:
        do(sink, update(1, str(sink.version(TABLE))))
    sink.open_ledger("shop", [Entry(Lsn(1), None, {str(TABLE): 7})])
    before = rows_of(read_delta(sink.open(TABLE)))
    for _ in range(3):
        for path in log(sink).iterdir():
            os.utime(path, (time.time() - 9 * 86_400,) * 2)
        for _ in range(5):
            do(sink, update(1, "new"))
    assert rows_of(read_delta(sink.open(TABLE, 7))) == before
    assert min(path.name for path in log(sink).glob("*.json")) == f"{5:020d}.json"


@pytest.mark.parametrize(
    "properties", [{"delta.enableExpiredLogCleanup": "false"}, {"delta.logRetentionDuration": "interval 2 weeks"}]
)
def test_a_log_that_others_want_to_keep_is_kept(sink: DeltaSink, properties: dict[str, str]) -> None:
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "5", **properties})
    begin(sink, rows(1, 2))
    for _ in range(12):
        do(sink, update(1))
        for path in log(sink).iterdir():
            os.utime(path, (time.time() - 9 * 86_400,) * 2)
    assert len(list(log(sink).glob("*.json"))) == sink.version(TABLE) + 1


def test_a_table_of_which_only_the_checkpoint_is_left_is_read_and_continued(sink: DeltaSink) -> None:
    long_history(sink, checkpoint=10)
    for path in log(sink).glob("*.json"):
        path.unlink()
    for _ in range(2):
        assert sink.applied(TABLE) == Lsn(10)
    assert do(sink, update(1004)) == 11
    check(sink)
    forget()
    check(sink)


def test_threads_see_versions_in_order_while_others_commit(sink: DeltaSink) -> None:
    begin(sink, rows(*range(20)))
    done = threading.Event()
    directory = sink.directory(TABLE)

    def watch(number: int) -> int:
        last = 0
        while not done.is_set():
            if number == 0:
                forget()
            found = replay.newest(directory)
            assert found is not None
            assert found.version >= last
            assert found.transactions[APP_ID] == found.version
            assert sum(file.rows(directory) - file.deleted for file in found.files) == 20
            last = found.version
        return last

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(watch, number) for number in range(3)]
        for number in range(25):
            do(sink, *[update(key, str(number)) for key in range(number % 3, 20, 3)])
        done.set()
        assert all(each.result() <= 26 for each in watching)
    check(sink)


def test_tables_that_were_not_opened_for_long_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MAX_KEPT", 3)
    forget()
    sink = DeltaSink(str(tmp_path / "lake"))
    tables = [TableName("public", f"t{number}") for number in range(6)]
    for table in tables:
        sink.create(table, SCHEMA)
    assert len(replay._kept) == 3
    assert [sink.version(table) for table in tables] == [0] * 6
