"""The clean-up of a Delta log: what has to be durable before it, and which versions stay."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from delta_rows import read_delta
from sinks.histories import rows_of
from sinks.replaying import check, forget, log, long_history
from sinks.text_table import TABLE, begin, do, rows, update
from walmere.directory import Directory
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.sinks.delta.log import retention
from walmere.sinks.delta.sink import DeltaSink


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


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
