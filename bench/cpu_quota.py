"""CPU quotas of Linux: a group of processes gets a part of a core, however much of the machine is free."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000
"""Microseconds in which the quota may be used up once."""


@dataclass(frozen=True)
class Throttling:
    """How many periods a group was busy in, and in how many of these it wanted more than its quota."""

    periods: int
    throttled: int

    def __sub__(self, other: Throttling) -> Throttling:
        return Throttling(self.periods - other.periods, self.throttled - other.throttled)


class CpuQuota:
    """A control group (version 1 or 2) for processes and their children. Only root can make one."""

    def __init__(self, name: str) -> None:
        first = (_ROOT / "cpu").is_dir()
        self._directory = (_ROOT / "cpu" if first else _ROOT) / f"walmere-{os.getpid()}-{name}"
        self._quota = ("cpu.cfs_quota_us", "{}") if first else ("cpu.max", f"{{}} {_PERIOD}")
        self._without = "-1" if first else "max"
        if not first:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        self._directory.mkdir()

    def add(self, pid: int) -> None:
        """Put a process into the group. Processes that it starts from now on are in the group, too."""
        (self._directory / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float | None) -> None:
        """Set the quota: a part of a core, or None for no limit."""
        name, text = self._quota
        value = self._without if cores is None else str(round(cores * _PERIOD))
        (self._directory / name).write_text(text.format(value))

    def throttling(self) -> Throttling:
        """Since the group was made."""
        found = dict(line.split() for line in (self._directory / "cpu.stat").read_text().splitlines())
        return Throttling(int(found["nr_periods"]), int(found["nr_throttled"]))

    def remove(self) -> None:
        """Delete the group, when its processes have ended."""
        with contextlib.suppress(FileNotFoundError):
            self._directory.rmdir()
