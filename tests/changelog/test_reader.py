"""The reading end: in order, from a position, along with a writer, and across retention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from changelog.walsender import START, T, U, Walsender, begin_log, insert, read, relation, said, truncate
from walmere.changelog import reader as reading
from walmere.changelog import retention
from walmere.changelog.reader import Reader
from walmere.changelog.writer import Writer
from walmere.errors import ChangeLogDamaged, ChangeLogError
from walmere.lsn import Lsn

NOTHING_KEPT = -1e9


def trim(writer: Writer) -> None:
    retention.submit(writer, None, NOTHING_KEPT)
    writer.flush()


def following(log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The transactions as they come; asking for one more than there are is the end of the test's patience."""
    monkeypatch.setattr(reading, "_POLL_SECONDS", 0)
    patience = iter(range(50))
    with Reader(log) as reader:
        for transaction in reader.transactions(follow=lambda: next(patience, None) is not None):
            yield [said(change.message) for change in transaction.changes]


def test_a_reader_sees_what_comes_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    seen = following(tmp_path, monkeypatch)
    for number in range(5):
        assembly.feed(source.inserts(number))
        writer.flush()
        assert next(seen) == [str(number)]
    writer.close()
    assert list(seen) == []


def test_a_reader_that_follows_across_retention_sees_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    seen = following(tmp_path, monkeypatch)
    for number in range(0, 12, 3):
        for each in (number, number + 1):
            assembly.feed(source.inserts(each))
            writer.flush()
            assert next(seen) == [str(each)]
        trim(writer)
        assembly.feed(source.inserts(number + 2))
        writer.flush()
        assert next(seen) == [str(number + 2)], "from the new manifest"
    writer.close()
    assert list(seen) == []


def test_what_came_before_the_manifest_was_replaced_is_read_from_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader was not looking when a transaction came and retention put a manifest without it in place."""
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    writer.flush()
    seen = following(tmp_path, monkeypatch)
    assert next(seen) == ["1"]
    assembly.feed(source.inserts(2))
    writer.flush()
    second = max(tmp_path.glob("*.arrow"))
    kept = second.read_bytes()
    trim(writer)
    second.write_bytes(kept)  # as if it were a little slower in deleting
    assembly.feed(source.inserts(3))
    writer.flush()
    assert list(seen) == [["2"], ["3"]]
    writer.close()


def test_a_reader_that_is_too_slow_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    writer.flush()
    slow, slower = following(tmp_path, monkeypatch), following(tmp_path, monkeypatch)
    assert next(slow) == next(slower) == ["1"]
    assembly.feed(source.inserts(2))
    writer.flush()
    trim(writer)
    with pytest.raises(ChangeLogError, match="removed: its retention time is over") as caught:
        next(slow)
    assert not isinstance(caught.value, ChangeLogDamaged)
    writer.close()


def test_a_reader_that_missed_a_whole_manifest_does_not_skip_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    writer.flush()
    seen = following(tmp_path, monkeypatch)
    assert next(seen) == ["1"]
    for number in (2, 3):
        trim(writer)
        assembly.feed(source.inserts(number))
        writer.flush()
    trim(writer)
    assembly.feed(source.inserts(4))
    writer.flush()
    with pytest.raises(ChangeLogError, match="earlier changes have been removed"):
        list(seen)
    writer.close()


def test_a_log_that_is_dropped_under_a_reader_ends_it_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, assembly = begin_log(tmp_path)
    assembly.feed(Walsender().inserts(1))
    writer.flush()
    writer.close()
    seen = following(tmp_path, monkeypatch)
    assert next(seen) == ["1"]
    (tmp_path / "manifest.jsonl").unlink()
    with pytest.raises(ChangeLogError, match="there is no change log"):
        next(seen)


def test_reading_from_before_the_beginning_is_a_clear_error(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    end = source.lsn
    assembly.feed(source.inserts(2))
    writer.flush()
    assert read(tmp_path, START) == [["1"], ["2"]]
    assert read(tmp_path, end) == [["2"]]
    with pytest.raises(ChangeLogError, match=f"from {Lsn(START - 1)}: the log begins at {START}"):
        read(tmp_path, Lsn(START - 1))
    trim(writer)
    with pytest.raises(ChangeLogError, match=f"begins at {source.lsn}; earlier changes have been removed"):
        read(tmp_path, end)
    assert read(tmp_path) == []
    writer.close()


def test_where_there_is_no_log_the_error_says_who_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ChangeLogError, match="walmere receive"):
        Reader(tmp_path)


def test_only_wanted_relations_are_read_and_transactions_without_them_are_left_out(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    for frames in (
        source.inserts(1),
        source.transaction(relation(U), insert(2, U), insert(3)),
        source.message(b"beside"),
        source.transaction(truncate(T, U)),
    ):
        assembly.feed(frames)
    writer.flush()
    writer.close()
    with Reader(tmp_path) as reader:
        found = [
            [said(c.message) for c in t.changes] for t in reader.transactions(wanted=lambda each: each.name == "u")
        ]
    assert found == [["2"], [f"truncate [{T}, {U}]"]]


def test_a_block_that_nobody_wants_is_not_opened(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    for oid in (T, U):
        assembly.feed(source.inserts(oid, oid=oid))
        writer.flush()
    writer.close()
    min(tmp_path.glob("*.arrow")).unlink()
    with Reader(tmp_path) as reader:
        found = [list(t.changes) for t in reader.transactions(wanted=lambda each: each.name == "u")]
    assert len(found) == 1
    with pytest.raises(ChangeLogDamaged, match="the file is missing"):
        read(tmp_path)
