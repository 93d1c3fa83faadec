"""The writing end: one writer, nothing durable before its time, and what was damaged is received again or refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from changelog.walsender import START, Walsender, begin_log, insert, read, relation
from walmere.changelog.manifest import Manifest
from walmere.changelog.manifest_file import NAME
from walmere.errors import ChangeLogDamaged, ChangeLogError, ChangeLogInUse
from walmere.lsn import Lsn
from walmere.storage import Lock

# Exactly one writer


def test_a_lock_is_had_once_and_says_by_whom(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "log")
    with pytest.raises(ChangeLogInUse, match=f"process {os.getpid()} holds the lock"):
        Lock(tmp_path / "log")
    lock.close()
    Lock(tmp_path / "log").close()


def test_a_lock_is_given_back_by_kill_9(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from walmere.storage import Lock"
    program += "; lock = Lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ChangeLogInUse, match=str(process.pid)):
            Lock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    Lock(tmp_path).close()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_survives_the_opening_of_the_log(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    for _ in range(2):
        writer, _ = begin_log(tmp_path)
        writer.close()
        with pytest.raises(ChangeLogInUse):
            Lock(tmp_path)
    lock.close()


def test_a_lock_on_a_file_that_was_deleted_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`walmere drop` deletes the log between this process's opening of the file and its locking."""
    flock = __import__("fcntl").flock
    first = iter([True])

    def late(descriptor: int, operation: int) -> None:
        if next(first, False):
            (tmp_path / "lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", late)
    lock = Lock(tmp_path)
    with pytest.raises(ChangeLogInUse):
        Lock(tmp_path)
    lock.close()


def test_a_lock_where_no_directory_can_be_is_one_of_our_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChangeLogError, match="opening"):
        Lock(tmp_path / "file" / "log")


# Durable


def test_nothing_is_durable_or_visible_before_its_flush(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.inserts(1))
    assert (writer.settled, writer.durable) == (False, START)
    assert read(tmp_path) == []
    writer.flush()
    assert (writer.settled, writer.durable) == (True, source.lsn)
    assert read(tmp_path) == [["1"]]
    assembly.feed(source.inserts(2))
    writer.close()
    assert read(tmp_path) == [["1"]], "what was not cut is forgotten: it was never confirmed"
    assert {path.suffix for path in tmp_path.iterdir()} <= {".arrow", ".jsonl"}


@pytest.mark.parametrize("call", ["fsync", "write", "rename", "partial"])
def test_a_full_disk_makes_nothing_durable_and_is_told_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    source = Walsender()
    stream = [source.inserts(1), source.inserts(2), source.inserts(3)]
    writer, assembly = begin_log(tmp_path)
    assembly.feed(stream[0])
    writer.flush()
    durable = writer.durable
    write, torn = os.write, list[bool]()

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def partial(descriptor: int, data: bytes) -> int:
        if torn:
            return full()
        if bytes(data[8:9]) != b" ":
            return write(descriptor, data)
        torn.append(True)  # in the middle of a line of the manifest
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        if call == "rename":
            patch.setattr(Path, "rename", full)
        else:
            patch.setattr(os, call.replace("partial", "write"), partial if call == "partial" else full)
        with pytest.raises((ChangeLogError, OSError), match="No space left") as caught:  # noqa: PT012
            assembly.feed(stream[1])
            writer.flush()
        if call != "write":  # that is the receiver's own thread: it tells
            assert isinstance(caught.value, ChangeLogError)
            assert "make room" in caught.value.hint
        with pytest.raises((ChangeLogError, OSError)):  # noqa: PT012
            assembly.feed(stream[2])
            writer.flush()
        assert writer.durable == durable
    writer.close()
    assert read(tmp_path) == [["1"]]
    writer, assembly = begin_log(tmp_path, durable)
    for frames in stream:
        assembly.feed(frames)
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["1"], ["2"], ["3"]]


# Damage


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 512)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)


DAMAGE = [truncated, emptied, lengthened, flipped, Path.unlink]


def write_three(directory: Path) -> list[Lsn]:
    source = Walsender()
    writer, assembly = begin_log(directory)
    ends = []
    for number in (1, 2, 3):
        assembly.feed(source.inserts(number))
        writer.flush()
        ends.append(writer.durable)
    writer.close()
    return ends


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_after_the_confirmed_position_is_received_again(
    tmp_path: Path, damage: Callable[[Path], None], which: int
) -> None:
    ends = [START, *write_three(tmp_path)]
    damage(sorted(tmp_path.glob("*.arrow"))[which])
    writer, assembly = begin_log(tmp_path, ends[which])
    assert writer.durable == assembly.position == ends[which]
    assert len(list(tmp_path.glob("*.arrow"))) == which, "all that follow it go as well: the order is the order"
    source = Walsender()
    for number in (1, 2, 3):
        assembly.feed(source.inserts(number))
    writer.flush()
    writer.close()
    assert read(tmp_path) == [["1"], ["2"], ["3"]]


@pytest.mark.parametrize("damage", [truncated, emptied, lengthened, Path.unlink])
def test_what_is_damaged_before_it_is_named_and_nothing_is_touched(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    ends = write_three(tmp_path)
    second = sorted(tmp_path.glob("*.arrow"))[1]
    (tmp_path / "00000000000000009999.arrow.tmp").write_bytes(b"left over")
    damage(second)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ChangeLogDamaged, match=second.name):
        begin_log(tmp_path, ends[1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_left_overs_are_removed_and_strangers_are_not(tmp_path: Path) -> None:
    write_three(tmp_path)
    (tmp_path / "00000000000000009999.arrow").write_bytes(b"nobody names it")
    (tmp_path / "00000000000000009999.arrow.tmp").write_bytes(b"")
    (tmp_path / (NAME + ".tmp")).write_bytes(b"retention died")
    (tmp_path / "README").write_text("somebody's")
    (tmp_path / "lost+found").mkdir()
    writer, _ = begin_log(tmp_path)
    writer.close()
    assert len(list(tmp_path.glob("*.arrow"))) == 3
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "README").exists()
    assert (tmp_path / "lost+found").exists()


# Prepared transactions


def test_a_log_with_a_rolled_back_prepared_transaction_can_be_opened_again(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.prepared(b"g", relation(), insert(1)))
    assembly.feed(source.rollback_prepared(b"g"))
    assembly.feed(source.inserts(2))
    writer.flush()
    end = writer.durable
    writer.close()
    for confirmed in (START, end):
        writer, _ = begin_log(tmp_path, confirmed)
        assert writer.durable == end
        writer.close()
    assert read(tmp_path) == [["2"]]
    assert len(list(tmp_path.glob("*.arrow"))) == 1


def test_files_of_a_rollback_that_was_interrupted_are_removed(tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.prepared(b"g", relation(), insert(1)))
    writer.flush()
    [left] = tmp_path.glob("*.arrow")
    data = left.read_bytes()
    assembly.feed(source.rollback_prepared(b"g"))
    writer.flush()
    writer.close()
    left.write_bytes(data)
    writer, _ = begin_log(tmp_path, writer.durable)
    writer.close()
    assert not left.exists()


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
def test_a_prepared_transaction_damaged_after_it_was_confirmed_is_not_received_again_with_its_commit(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The server sends only Commit Prepared then: the contents are nowhere any more."""
    source = Walsender()
    writer, assembly = begin_log(tmp_path)
    assembly.feed(source.prepared(b"g", relation(), *(insert(i) for i in range(100))))
    writer.flush()
    confirmed = writer.durable
    assembly.feed(source.commit_prepared(b"g"))
    writer.flush()
    writer.close()
    [segment] = tmp_path.glob("*.arrow")
    damage(segment)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ChangeLogDamaged, match=segment.name):
        begin_log(tmp_path, confirmed)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_log_that_ends_before_the_confirmed_position_is_left_as_it_is(tmp_path: Path) -> None:
    """The receiver refuses it; until then somebody may still find out what happened."""
    ends = write_three(tmp_path)
    (tmp_path / "00000000000000009999.arrow").write_bytes(b"perhaps what is missing")
    writer, _ = begin_log(tmp_path, Lsn(ends[-1] + 1))
    writer.close()
    assert (tmp_path / "00000000000000009999.arrow").exists()
    with Manifest(tmp_path) as manifest:
        assert len([e for e in manifest.entries() if hasattr(e, "segments")]) == 3
