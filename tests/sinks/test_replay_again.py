"""Versions of a table are kept in memory: what is read of the log when it is opened again, or was replaced."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from sinks.replaying import OURS, check, forget, log, long_history
from sinks.text_table import SCHEMA, TABLE, begin, do, rows, update
from walmere.directory import Directory
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


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
