"""A backlog of changes behind a slot, applied by us, by pg_recvlogical to /dev/null, and by a native subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.load import Load
from bench.ours import Ours
from bench.side_by_side import Report, Run
from bench.source import Native, Source

RECVLOGICAL = "pg_recvlogical"
NATIVE = "native subscription"


@dataclass(frozen=True)
class Bench:
    """A source, a scratch directory, and the report."""

    source: Source
    scratch: Path
    report: Report
    rounds: int

    def backlog(self, name: str, load: Load, bars: Mapping[str, float | None], subscriber: Native) -> None:
        """Copy the table, write a backlog after the slot, then let the tools apply it in turn.

        `bars` has the limit tools to compare with; None: the ratio is only stated.
        """
        load.prepare(self.source)
        ours = Ours(self.source, self.scratch / load.table, load.table)
        ours.run(load.table, self.source.end())
        restore = ours.keep()
        with self.source.copy_of(load.table, f"{load.table}_kept") as kept:
            self.source.drop(load.table)
            print(f"making {name} …")
            self.source.sql.execute(load.fill.encode())
            end = self.source.end()
            rows = int(self.source.value(f"SELECT count(*) FROM {load.table}"))

            def catch_up() -> Run:
                restore()
                with self.source.copy_of(kept, load.table) as slot:
                    run = ours.run(slot, end)
                assert ours.rows(load.table) == rows
                return run

            tools = {
                RECVLOGICAL: lambda: self.source.recvlogical(kept, load.table, end),
                NATIVE: lambda: subscriber.catch_up(load.table, load.create, load.existing, kept, end),
            }
            for tool, bar in bars.items():
                self.report.ratio(name, bar, tool, tools[tool], catch_up, self.rounds)
        ours.remove()
