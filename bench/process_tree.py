"""What a process and all its children use: CPU time, and bytes written to disk."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """Since the process was started."""

    cpu_seconds: float = 0.0
    written_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_seconds + other.cpu_seconds, self.written_bytes + other.written_bytes)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_seconds - other.cpu_seconds, self.written_bytes - other.written_bytes)


def usage(process: psutil.Process) -> Usage:
    """The usage of the process, its children, and their children.

    Those that have ended are included: when a process waits for a child, Linux adds the child's times and I/O to those
    of the process.
    """
    total = Usage()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended since it was listed
            times = each.cpu_times()
            cpu = times.user + times.system + times.children_user + times.children_system
            total += Usage(cpu, each.io_counters().write_bytes)
    return total
