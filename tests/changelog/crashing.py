"""Dies at every step on the way to the disk, one after the other; started by test_crash_points.

    python -m changelog.crashing DIRECTORY kill|power

For each step N there is a directory DIRECTORY/N. A child writes a log there and calls `os._exit` at its Nth step, which
is before a system call that makes something durable, in the middle of a write, or after it. With `power`, what was not
fsynced is lost as well. What it would have confirmed to PostgreSQL stands in the file `confirmed`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from changelog.walsender import T, U, Walsender, begin_log, insert, relation, truncate
from walmere.changelog import retention
from walmere.lsn import Lsn


def stream() -> list[list[memoryview]]:
    """What the server sends, always the same."""
    source = Walsender()
    return [
        source.inserts(1, 2),
        source.prepared(b"p", relation(U), insert(10, U), insert(11, U)),
        source.transaction(insert(3), truncate(T, U)),
        source.commit_prepared(b"p"),
        source.prepared(b"q", insert(20)),
        source.message(b"beside"),
        source.rollback_prepared(b"q"),
        source.inserts(4, oid=U),
    ]


TRUTH = [["1", "2"], ["3", f"truncate [{T}, {U}]"], ["10", "11"], ["beside"], ["4"]]


def write(directory: Path, confirm: Callable[[Lsn], None]) -> None:
    """Write it, piece by piece, confirming what is durable; at the end retention takes all of it away again."""
    writer, assembly = begin_log(directory)
    for frames in stream():
        assembly.feed(frames)
        writer.flush()
        confirm(writer.durable)
    retention.submit(writer, None, time.time())  # in effect: keep from 1970 on, so nothing goes
    writer.flush()
    retention.submit(writer, None, -1)
    writer.flush()
    confirm(writer.durable)
    writer.close()


class Death:
    """Counts steps, and dies at one of them."""

    def __init__(self, directory: Path, step: int, *, power: bool) -> None:
        self.left = step
        self._log = directory / "log"
        self._power = power
        self._confirmed = os.open(directory / "confirmed", os.O_WRONLY | os.O_CREAT, 0o600)
        self._write, self._fsync, self._rename, self._unlink = os.write, os.fsync, Path.rename, Path.unlink
        self._synced: dict[str, int] = {}
        os.write, os.fsync = self.write, self.fsync  # type: ignore[assignment]
        Path.rename, Path.unlink = self._named(self._rename), self._named(self._unlink)  # type: ignore[method-assign]

    def confirm(self, lsn: Lsn) -> None:
        os.pwrite(self._confirmed, str(lsn).encode(), 0)

    def step(self) -> None:
        self.left -= 1
        if not self.left:
            self.die()

    def die(self) -> None:
        if self._power:
            for path in self._log.glob("*.*"):
                os.truncate(path, self._synced.get(self._key(path.stat()), 0))
        os._exit(9)

    def _key(self, stat: os.stat_result) -> str:
        return f"{stat.st_dev}:{stat.st_ino}"

    def write(self, descriptor: int, data: Any) -> int:
        before = os.fstat(descriptor)
        self._synced.setdefault(self._key(before), before.st_size)
        if before.st_size and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp":
            return self._write(descriptor, data)  # of the many writes to a segment, the first is enough
        self.step()
        if self.left == 1:
            self._write(descriptor, memoryview(data)[: len(data) // 2])
        self.step()
        written = self._write(descriptor, data)
        self.step()
        return written

    def fsync(self, descriptor: int) -> None:
        self.step()
        self._fsync(descriptor)
        stat = os.fstat(descriptor)
        self._synced[self._key(stat)] = stat.st_size
        self.step()

    def _named(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.step()
            result = original(*arguments, **more)
            self.step()
            return result

        return call


def main(root: Path, *, power: bool) -> None:
    with tempfile.TemporaryDirectory() as nowhere:
        write(Path(nowhere) / "log", lambda _: None)  # so that every child has all modules already
    step = 0
    while True:
        step += 1
        directory = root / str(step)
        directory.mkdir()
        child = os.fork()
        if not child:
            death = Death(directory, step, power=power)
            write(directory / "log", death.confirm)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return  # there is no such step any more
        assert code == 9, code


if __name__ == "__main__":
    main(Path(sys.argv[1]), power=sys.argv[2] == "power")
