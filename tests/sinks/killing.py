"""Kills a process at a step: before or after the n-th call that changes files or makes them durable.

`run` runs in a process of its own. It counts its steps, writes what is durable by then to a journal, and kills itself
with SIGKILL at step n. `lose_power` then removes from the files what the disk need not have: a crash of the machine.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable


class Journal:
    """What a process has done so far. It outlives the process."""

    def __init__(self, path: Path, kill_at: int) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._write, self._fstat, self._listdir = os.write, os.fstat, os.listdir
        self.kill_at, self.step = kill_at, 0

    def record(self, **entry: Any) -> None:
        self._write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def next(self, what: str) -> None:
        self.step += 1
        self.record(step=self.step, what=what)
        if self.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def synced(self, descriptor: int) -> None:
        """A file is durable; of a directory, its entries are."""
        found = self._fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.record(directory=str(path), entries=self._listdir(path))
        else:
            self.record(inode=found.st_ino)


def _stepping(journal: Journal, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        journal.next(f"before {name}")
        result = function(*args, **kwargs)
        if name == "fsync":
            journal.synced(args[0])
        journal.next(f"after {name}")
        return result

    return call


def _open_stepping(journal: Journal, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa+"):
            return function(file, mode, *args, **kwargs)
        journal.next("before open")
        opened = function(file, mode, *args, **kwargs)
        journal.next("after open")
        return opened

    return call


def install(journal: Journal) -> None:
    """Count what this process does to files from now on."""
    for name in ("fsync", "link", "rename", "unlink", "mkdir"):
        setattr(os, name, _stepping(journal, getattr(os, name), name))
    io.open = _open_stepping(journal, io.open)
    for kind, methods in ((pq.ParquetWriter, ("write_table", "close")), (DeltaTable, CHECKPOINTS)):
        for method in methods:
            setattr(kind, method, _stepping(journal, getattr(kind, method), method))
    real = pafs.SubTreeFileSystem

    class Stepping(real):  # type: ignore[misc, valid-type]
        def open_output_stream(self, *args: Any, **kwargs: Any) -> Any:
            return _stepping(journal, super().open_output_stream, "open_output_stream")(*args, **kwargs)

        def delete_file(self, *args: Any) -> Any:
            return _stepping(journal, super().delete_file, "delete_file")(*args)

        def move(self, *args: Any) -> Any:
            return _stepping(journal, super().move, "move")(*args)

    pafs.SubTreeFileSystem = Stepping
    pa.OSFile = _stepping(journal, pa.OSFile, "OSFile")


CHECKPOINTS = ("create_checkpoint", "cleanup_metadata")


def run(pickled: bytes, journal: str, kill_at: int) -> None:
    """Call a pickled function, and die at a step of it."""
    function, *args = pickle.loads(pickled)
    install(Journal(Path(journal), kill_at))
    function(*args)


def steps(journal: Path) -> list[str]:
    """The steps that were taken."""
    entries = map(json.loads, journal.read_text().splitlines())
    return [entry["what"] for entry in entries if "step" in entry]


def lose_power(journal: Path, before: Path, after: Path, *, entries_survive: bool) -> None:
    """Undo what was not durable when the process was killed, in a directory that was a copy of `before`.

    New entries of a directory that was not fsynced are removed, or stay. A file that was not fsynced is empty then.
    """
    inodes: set[int] = set()
    entries: set[str] = set()
    for entry in map(json.loads, journal.read_text().splitlines()):
        if "inode" in entry:
            inodes.add(entry["inode"])
        elif "directory" in entry:
            entries |= {f"{entry['directory']}/{name}" for name in entry["entries"]}
    old = {path.relative_to(before) for path in before.rglob("*")}
    for path in sorted(after.rglob("*"), reverse=True):
        if path.relative_to(after) in old:
            continue
        if str(path) not in entries and not entries_survive:
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            else:
                path.unlink()
        elif path.is_file() and path.stat().st_ino not in inodes:
            path.write_bytes(b"")
