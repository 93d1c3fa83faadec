"""Retention: what is applied and old goes, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from changelog.walsender import START, TIME, Walsender, begin_log, insert, read, relation
from walmere.changelog import retention
from walmere.changelog.manifest import Manifest, summarise
from walmere.lsn import Lsn
from walmere.pgoutput.messages import POSTGRES_EPOCH_US

COMMITTED = (TIME + POSTGRES_EPOCH_US) / 1e6
"""When a Walsender's transactions commit, in seconds of Unix time."""
GONE = -1e9


def files(log: Path) -> int:
    return len(list(log.glob("*.arrow")))


def size(log: Path) -> int:
    return sum(path.stat().st_size for path in log.glob("*.arrow"))


def start_of(log: Path) -> Lsn:
    with Manifest(log) as manifest:
        return manifest.header.start_lsn


def test_what_is_older_than_the_keep_time_goes_and_the_rest_stays(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    ends = []
    for number in range(4):
        source.time = TIME + number * 1_000_000
        assembly.feed(source.inserts(number))
        writer.flush()
        ends.append(writer.durable)
    assert writer.log_bytes == size(tmp_path) > 0
    retention.submit(writer, None, time.time() - COMMITTED - 1.5)
    writer.flush()
    assert writer.log_bytes == size(tmp_path)
    assert read(tmp_path) == [["2"], ["3"]]
    assert files(tmp_path) == 2
    assert start_of(tmp_path) == ends[1]
    assembly.feed(source.inserts(4))
    writer.flush()
    writer.close()
    writer, _ = begin_log(tmp_path, writer.durable)
    writer.close()
    assert read(tmp_path) == [["2"], ["3"], ["4"]]


def test_what_a_sink_has_not_applied_stays_however_old(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    ends = [START]
    for number in range(3):
        assembly.feed(source.inserts(number))
        writer.flush()
        ends.append(writer.durable)
    for applied, left in ((START, 3), (Lsn(ends[1] - 1), 3), (ends[1], 2), (ends[3], 0)):
        retention.submit(writer, applied, GONE)
        writer.flush()
        assert len(read(tmp_path)) == files(tmp_path) == left
    writer.close()
    assert writer.durable == ends[3]


def test_an_old_record_behind_a_young_one_stays(tmp_path: Path) -> None:
    """The log is one piece: clocks of the source that jump make no holes."""
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    for seconds in (0, 1000, 0):
        source.time = TIME + seconds * 1_000_000
        assembly.feed(source.inserts(seconds))
        writer.flush()
    retention.submit(writer, None, time.time() - COMMITTED - 500)
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["1000"], ["0"]]


def test_a_prepared_transaction_that_waits_survives_and_can_be_committed(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.prepared(b"g", relation(), insert(7)))
    assembly.feed(source.inserts(1))
    writer.flush()
    for _ in range(2):  # the second finds it in front, older than the log's beginning
        retention.submit(writer, None, GONE)
        assembly.feed(source.inserts(2))
        writer.flush()
    retention.submit(writer, None, GONE)
    writer.flush()
    durable, last = writer.durable, assembly.sequence - 1
    writer.close()
    assert read(tmp_path) == []
    assert files(tmp_path) == 1
    writer, assembly = begin_log(tmp_path, durable)
    assert writer.durable == durable
    assert start_of(tmp_path) == durable
    assert assembly.sequence == last + 1, "no sequence number is given twice"
    assembly.feed(source.commit_prepared(b"g"))
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["7"]]


@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
def test_a_prepared_transaction_that_retention_left_can_be_rolled_back(tmp_path: Path, again: bool) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.prepared(b"g", relation(), insert(7)))
    assembly.feed(source.inserts(1))
    writer.flush()
    retention.submit(writer, None, GONE)
    writer.flush()
    if again:
        writer.close()
        writer, assembly = begin_log(tmp_path, writer.durable)
    assembly.feed(source.rollback_prepared(b"g"))
    assembly.feed(source.inserts(2))
    writer.flush()
    writer.close()
    writer, _ = begin_log(tmp_path, writer.durable)
    writer.close()
    assert read(tmp_path) == [["2"]]
    assert files(tmp_path) == 1


def test_definitions_stay_for_what_comes_later(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    writer.flush()
    retention.submit(writer, None, GONE)
    assembly.feed(source.transaction(insert(2)))  # the server does not repeat its Relation
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["2"]]


def test_an_idle_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    lsn = START
    for _ in range(1200):
        lsn = Lsn(lsn + 100)
        assembly.advance(lsn)
    writer.flush()
    before = (tmp_path / "manifest.jsonl").stat().st_size
    retention.submit(writer, None, GONE)
    writer.flush()
    assert (tmp_path / "manifest.jsonl").stat().st_size < before / 100
    writer.close()
    with Manifest(tmp_path) as manifest:
        assert summarise(manifest).end_lsn == lsn


def test_with_nothing_to_remove_the_manifest_is_left_alone(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    assembly.feed(Walsender().inserts(1))
    writer.flush()
    inode = (tmp_path / "manifest.jsonl").stat().st_ino
    retention.submit(writer, START, GONE)
    retention.submit(writer, None, time.time())
    writer.flush()
    writer.close()
    assert (tmp_path / "manifest.jsonl").stat().st_ino == inode
