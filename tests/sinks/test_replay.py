"""Replaying the log comes to the same table as `deltalake` does, at every version, whatever happens to the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import rows_of
from sinks.replaying import OURS, check, forget, log, long_history, seen_by_us
from sinks.text_table import SCHEMA, TABLE, begin, delete, do, rows
from walmere.directory import Directory
from walmere.errors import SinkMismatch
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


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
