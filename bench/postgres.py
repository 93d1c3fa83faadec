"""A database as the target, compared with a native subscription: backlogs, the copy, and freshness.

The source is one server. The native subscription and ours write to two databases of a second server, with the same
`synchronous_commit`. After each run, the rows of the target must be those of the source.

Freshness is measured by polling the target's table for the newest row, every 10 ms. Each transaction has a number, and
two of three insert a row with this number as its key, so the poll only reads the end of the primary key. Our
transactions are visible in the order of the source: once a number is visible, all before it are.

Run it with `python -m bench.postgres [--server 15] [--rounds 3] [--small] [--synchronous-commit on]
[--only inserts mixed updates copy freshness]`, or run all with `make bench`.
"""

from __future__ import annotations

import functools
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from bench import freshness
from bench.backlog import NATIVE
from bench.load import Load, inserts, mixed, updates
from bench.ours import warm
from bench.postgres_target import Database, OursInPostgres, contents, database
from bench.side_by_side import RESULTS, Report, Run
from bench.snapshot import CREATE, fill
from bench.source import Native, Source, native, options, recreate, source

RATE = 500
FRESHNESS = "CREATE TABLE f (id bigint PRIMARY KEY, number bigint, sent timestamptz, note text)"


@dataclass(frozen=True)
class Bench:
    """A source, both targets, a scratch directory, and the report."""

    source: Source
    subscriber: Native
    database: Database
    scratch: Path
    report: Report
    rounds: int

    def ours(self, table: str) -> OursInPostgres:
        return OursInPostgres(self.database, self.source, self.scratch / table, table)

    def compare(self, sql: psycopg.Connection[Any], table: str, expected: tuple[Any, ...]) -> None:
        """Make sure that a target has the rows of the source. The table is dropped: autovacuum would disturb others."""
        found = contents(sql, table)
        assert found == expected, f"{table} of the target: count and checksum are {found}, at the source {expected}"
        sql.execute(f"DROP TABLE {table}".encode())

    def backlog(self, name: str, load: Load, bar: float) -> None:
        """Copy the table, write a backlog after the slot, then let both apply it in turn."""
        load.prepare(self.source)
        recreate(self.database.sql, load.table, load.create, "")
        ours = self.ours(load.table)
        ours.run(load.table, self.source.end())
        restore = ours.keep()
        with self.source.copy_of(load.table, f"{load.table}_kept") as kept:
            self.source.drop(load.table)
            print(f"making {name} …")
            self.source.sql.execute(load.fill.encode())
            mark = self.source.mark()
            end = self.source.end()
            expected = contents(self.source.sql, load.table)

            def theirs() -> Run:
                self.subscriber.sql.execute("CHECKPOINT")
                run = self.subscriber.catch_up(load.table, load.create, load.existing, kept, end, reported=False)
                self.compare(self.subscriber.sql, load.table, expected)
                return run

            def catch_up() -> Run:
                restore()
                self.database.sql.execute("CHECKPOINT")
                recreate(self.database.sql, load.table, load.create, load.existing)
                with self.source.copy_of(kept, load.table) as slot:
                    run = ours.catch_up(slot, mark)
                self.compare(self.database.sql, load.table, expected)
                return run

            self.report.ratio(name, bar, NATIVE, theirs, catch_up, self.rounds)
        ours.remove()
        self.source.sql.execute(f"DROP PUBLICATION {load.table}; DROP TABLE {load.table}".encode())

    def copy(self, rows: int, bar: float) -> None:
        """The initial copy of a table that exists in the target, with its primary key."""
        fill(self.source, rows)
        expected = contents(self.source.sql, "b")

        def theirs() -> Run:
            self.subscriber.sql.execute("CHECKPOINT")
            run = self.subscriber.initial_sync("b", CREATE)
            self.compare(self.subscriber.sql, "b", expected)
            return run

        def pipes() -> Run:
            self.database.sql.execute("CHECKPOINT")
            recreate(self.database.sql, "b", CREATE.replace("PRIMARY KEY", ""), "")
            run = self.source.two_copies("b", self.database.dsn)
            began = time.perf_counter()
            self.database.sql.execute("ALTER TABLE b ADD PRIMARY KEY (id)")
            run = replace(run, seconds=run.seconds + time.perf_counter() - began)
            self.compare(self.database.sql, "b", expected)
            return run

        def copy(*, create_table: bool = False) -> Run:
            self.database.sql.execute("CHECKPOINT")
            ours = self.ours("b")
            if create_table:
                ours.target += "\ncreate_tables = true"
            else:
                recreate(self.database.sql, "b", CREATE, "")
            run = ours.run("b", self.source.end())
            self.compare(self.database.sql, "b", expected)
            ours.remove()
            self.source.drop("b")
            return run

        theirs(), copy()  # once without timing: the disk is still writing the new rows
        name = f"copy of {rows:,} rows"
        created = functools.partial(copy, create_table=True)
        self.report.ratio(name, bar, "native initial sync", theirs, copy, self.rounds)
        self.report.ratio(f"{name}, with create_tables", None, "native initial sync", theirs, created, self.rounds)
        self.report.ratio(f"{name}, with create_tables", None, "psql | psql, twice", pipes, created, self.rounds)
        self.source.sql.execute("DROP PUBLICATION b; DROP TABLE b")

    def freshness(self, seconds: int) -> None:
        """Time from the commit at the source until it is visible, at a constant rate of inserts and updates."""
        self.source.sql.execute(FRESHNESS)
        self.source.sql.execute("INSERT INTO f SELECT -i, -1, now(), md5(i::text) FROM generate_series(1, 100000) i")
        self.source.sql.execute("CREATE PUBLICATION f FOR TABLE f")
        recreate(self.database.sql, "f", FRESHNESS, "")
        ours = self.ours("f")
        count = seconds * RATE
        assert (count - 1) % 3  # the last transaction is an insert, which the poll sees
        with ours.following():
            while ours.rows("f") != 100_000:
                time.sleep(0.1)
            newest = "SELECT max(id) FROM f"
            with (
                freshness.polling(self.database.dsn, newest, count, seconds + 60) as polled,
                freshness.writing(self.source.server.dsn(), transaction, count, RATE) as written,
            ):
                sent, visible = written.result(), polled.result()
        took = sent[-1] - sent[0]
        delay = visible - sent
        median, high = np.percentile(delay, [50, 99])
        rate = count / took
        more = {"transactions": count, "rate": round(rate), "max_seconds": round(float(delay.max()), 2)}
        name = f"freshness at {rate:.0f} transactions/s for {took:.0f} s"
        self.report.value(f"{name}, median", f"{median:.2f} s", "≤ 0.5 s", median <= 0.5, **more)
        self.report.value(f"{name}, 99th percentile", f"{high:.2f} s", "≤ 1.5 s", high <= 1.5, **more)
        freshness.plot(sent - sent[0], delay, RESULTS / "freshness-postgres.png")
        self.compare(self.database.sql, "f", contents(self.source.sql, "f"))
        ours.remove()
        self.source.drop("f")


def transaction(number: int) -> tuple[bytes, list[Any]]:
    """An update, then two inserts. The key of a new row is the number."""
    if number % 3:
        return b"INSERT INTO f VALUES (%s, %s, now(), 'new')", [number, number]
    return b"UPDATE f SET number = %s WHERE id = %s", [number, -1 - number * 7919 % 100000]


def main() -> None:
    """Run all parts, or those of `--only`."""
    bars = ("inserts", "mixed", "updates", "copy", "freshness")
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=bars, default=bars)
    parser.add_argument(
        "--synchronous-commit", choices=("off", "on"), default="off", help="off: the default of CREATE SUBSCRIPTION"
    )
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    commit = arguments.synchronous_commit
    streaming = "parallel" if arguments.server >= 16 else "on"
    facts = {"server": arguments.server, "small": arguments.small, "synchronous_commit": commit, "streaming": streaming}
    report = Report("postgres", "slot → committed in the target's tables", facts)
    subscription = f"streaming = {streaming}, synchronous_commit = {commit}"
    with (
        source(arguments.server) as made,
        native(made, arguments.server, subscription) as subscriber,
        database(subscriber, commit) as target,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        recreate(target.sql, "warm", "CREATE TABLE warm (id int PRIMARY KEY)", "")
        make = functools.partial(OursInPostgres, target)
        report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory), make)
        bench = Bench(made, subscriber, target, Path(directory), report, arguments.rounds)
        if "inserts" in arguments.only:
            transactions = 2000 // scale
            bench.backlog(f"{transactions * 1000:,} inserts", inserts(transactions), 0.8)
        if "mixed" in arguments.only:
            count, existing = 300_000 // scale, 1_000_000 // scale
            name = f"{count:,} mixed one-row transactions on {existing:,} rows"
            bench.backlog(name, mixed(count, existing), 0.8)
        if "updates" in arguments.only:
            count, rows = 300_000 // scale, 10_000_000 // scale
            bench.backlog(f"{count:,} one-row updates on {rows:,} rows", updates("u", rows, count), 0.8)
        if "copy" in arguments.only:
            bench.copy(5_000_000 // scale, 0.6)
        if "freshness" in arguments.only:
            bench.freshness(60 // min(scale, 6))
    report.finish()


if __name__ == "__main__":
    main()
