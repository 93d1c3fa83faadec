"""The demo: shows Walmere in about a minute, on a machine with only Python and Java.

    1. It starts a PostgreSQL 18 server, and creates and fills a shop.
    2. It starts `walmere run`, as a user would.
    3. When the first table is copied, the writers start: the other tables are copied while they change.
    4. The writers stop. `walmere run` applies the rest.
    5. Every table is compared with its source.

The target is a lake of Delta tables, or a database on a second server (`--target postgres`).

The subscription is a process, the writers are threads, and the main thread only watches them.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.markup import escape

from walmere.config import Config
from walmere.demo import shop
from walmere.demo import target as database_target
from walmere.demo.compare import TableComparison, compare, compare_databases
from walmere.demo.display import Display
from walmere.demo.interruption import Interrupted, Interruptions
from walmere.demo.place import Place
from walmere.demo.report import Measured, Report
from walmere.demo.subscriber import MirrorProcess, own_environment
from walmere.demo.target import TargetDatabase
from walmere.demo.watch import Watch
from walmere.demo.workload import Writers
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.testing.server import LOGICAL, Server, embedded

_SETTINGS: Final = {**LOGICAL, "max_wal_size": "2GB"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `walmere demo`."""

    directory: Path
    rows: int
    seconds: float
    json: bool = False
    target: Literal["delta", "postgres"] = "delta"


def main(options: DemoOptions) -> int:
    """Run the demo. Returns the exit code: 0 equal, 1 different, 128 + the signal that ended it."""
    for name in os.environ.keys() - own_environment().keys():
        del os.environ[name]  # libpq reads them too
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    try:
        with Interruptions() as signals, signals.guard(Place(options.directory)) as place:
            report = Demo(options, place, signals, Display(console)).run()
    except Interrupted as interrupted:
        console.print(f"\nstopped; no process is left running, and the files stay in {options.directory}")
        return interrupted.exit_code
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.print(console)
    return report.exit_code


class Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions, place: Place, signals: Interruptions, display: Display) -> None:
        self._options = options
        self._place = place
        self._signals = signals
        self._display = display
        self._began = time.monotonic()
        self._sizes = shop.Sizes.of(options.rows)
        self._measured = Measured()

    def run(self) -> Report:
        """Run all steps."""
        self._display.print("[bold]Walmere[/bold]: PostgreSQL logical replication whose subscriber is Apache Spark\n")
        with (
            self._signals.guard(embedded(18, _SETTINGS)) as server,
            self._signals.guard(self._target_server()) as target_server,
        ):
            two = "" if target_server is None else "two servers of "
            port = "a free port" if target_server is None else "free ports"
            self._step(f"started {two}PostgreSQL {_version(server)} on {port}, in a temporary directory")
            target = None if target_server is None else database_target.create(target_server)
            config = self._fill(server, target)
            with (
                self._signals.guard(MirrorProcess(self._place.config_file, self._place.log)) as subscriber,
                closing(connect(config.source, "walmere demo")) as connection,
                translate_errors(config.source, "watching the shop"),
            ):
                watch = Watch(subscriber, connection, self._display, self._measured, self._began)
                with self._display.watching():
                    self._follow(watch, config)
                now = subscriber.progress
                self._step(f"copied {now.rows_copied:,} rows, applied {now.changes_applied:,} changes, caught up")
                subscriber.end()
                verdicts = self._compare(connection, target)
            if target is not None and target_server is not None:
                target = database_target.keep(target, target_server, self._place.cluster)
        self._measured.total = time.monotonic() - self._began
        return Report(self._place, subscriber.progress, self._measured, verdicts, target)

    def _target_server(self) -> AbstractContextManager[Server | None]:
        return embedded(18, database_target.SETTINGS) if self._options.target == "postgres" else nullcontext()

    def _step(self, text: str) -> None:
        self._display.print(f"[green]✓[/green] {text}  [dim]{time.monotonic() - self._began:.1f} s[/dim]")

    def _fill(self, server: Server, target: TargetDatabase | None) -> Config:
        admin = self._place.configure(server.dsn()).source
        with closing(connect(admin, "walmere demo")) as connection, translate_errors(admin, "creating the database"):
            connection.execute("CREATE DATABASE shop")
        config = self._place.configure(server.dsn("shop"), None if target is None else target.dsn)
        with (
            closing(connect(config.source, "walmere demo")) as connection,
            translate_errors(config.source, "filling the shop"),
        ):
            shop.create(connection, self._sizes)
            self._measured.rows_loaded = shop.count(connection)
        self._step(f"created a shop with {len(shop.KEYS)} tables and {self._measured.rows_loaded:,} rows")
        return config

    def _follow(self, watch: Watch, config: Config) -> None:
        """Watch from the start of Spark until everything that was written is in the target."""
        watch.until("starting Spark", lambda now: now.started)
        self._step(f"started Spark: `walmere run -c {escape(str(self._place.config_file))}`")
        watch.until("copying", lambda now: any(table.phase.copied for table in now.tables))
        seconds = self._options.seconds
        with self._signals.guard(Writers(config.source, self._sizes, seconds / 2)) as writers:
            began = time.monotonic()
            watch.writers = writers
            watch.until("copying while writers are running", lambda now: now.copied)
            watch.until(
                "applying changes of the writers", lambda _: watch.writers_may_stop(time.monotonic() - began, seconds)
            )
        written = time.monotonic()
        self._measured.writing = written - began
        self._measured.transactions = dict(writers.done)
        end = watch.end_of_writing()
        watch.until("catching up", lambda now: now.includes(end))
        self._measured.catch_up = time.monotonic() - written

    def _compare(self, connection: Connection, target: TargetDatabase | None) -> tuple[TableComparison, ...]:
        began = time.monotonic()
        if target is None:
            verdicts = tuple(compare(connection, self._place.lake, name) for name in shop.KEYS)
        else:
            with database_target.opened(target.dsn) as other:
                verdicts = tuple(compare_databases(connection, other, name) for name in shop.KEYS)
        self._measured.compare = time.monotonic() - began
        self._step("compared every row and every column")
        return verdicts


def _version(server: Server) -> str:
    return (server.data / "PG_VERSION").read_text().strip()
