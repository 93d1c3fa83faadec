"""Receiving, beside pg_recvlogical: slot → durable, fsynced change log, against slot → /dev/null.

Both are whole processes, timed from start to end, start-up included, over TCP, on a backlog made before. Each run has
a copy of the same slot. Run as `make bench-receive`, or `python -m bench.receive [--server 15] [--rounds 3] [--small]`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from bench.side_by_side import Report, Run, timed
from walmere.demo.server import LOGICAL, Server, binaries

INSERTS = """
CREATE TABLE a1 (id bigint PRIMARY KEY, customer int, status text, amount numeric(12,2), created timestamptz,
                 note text, payload text)
"""
FILL_INSERTS = """
DO $$ BEGIN
    FOR t IN 0 .. {transactions} - 1 LOOP
        INSERT INTO a1 SELECT t * 1000 + i, i % 777, 'shipped', (i * 13.37)::numeric(12,2), now(),
                              'note ' || md5((t * 1000 + i)::text), md5(i::text) || md5((i + t)::text)
                       FROM generate_series(0, 999) i;
        COMMIT;
    END LOOP;
END $$
"""
MIXED = """
CREATE TABLE a2 (id bigint PRIMARY KEY, customer int, amount numeric(12,2), note text);
INSERT INTO a2 SELECT i, i % 777, i, md5(i::text) FROM generate_series(-100000, 0) i
"""
FILL_MIXED = """
DO $$ BEGIN
    FOR i IN 1 .. {rows} LOOP
        IF i % 10 < 5 THEN
            INSERT INTO a2 VALUES (i, i % 777, i, md5(i::text));
        ELSIF i % 10 < 9 THEN
            UPDATE a2 SET amount = amount + 1 WHERE id = -(i::bigint * 7919 % 90000);
        ELSE
            DELETE FROM a2 WHERE id = i - 9;
        END IF;
        COMMIT;
    END LOOP;
END $$
"""
LARGE = "CREATE TABLE a3 (id bigint PRIMARY KEY, note text)"
FILL_LARGE = "INSERT INTO a3 SELECT i, md5(i::text) || md5(i::text) FROM generate_series({first}, {last}) i"


class Bench:
    """A server with a backlog, and the two tools on it."""

    def __init__(self, server: Server, scratch: Path) -> None:
        self.server = server
        self.scratch = scratch
        self.sql = psycopg.connect(server.dsn(), autocommit=True)
        self.sql.execute("SET synchronous_commit = off")
        self._number = 0

    def slot(self, name: str) -> None:
        self.sql.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def drop(self, name: str) -> None:
        self.sql.execute("SELECT pg_drop_replication_slot(%s)", [name])

    def end(self) -> str:
        """Where the WAL ends, flushed."""
        self.sql.execute("SELECT txid_current()")
        self.sql.execute("CHECKPOINT")
        row = self.sql.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        return str(row[0])

    def recvlogical(self, slot: str, publication: str, end: str) -> Run:
        """pg_recvlogical of the same server, as far as our receiver goes."""
        with self._copy(slot) as copy:
            return timed(
                [
                    self.server.bindir / "pg_recvlogical",
                    *("-h", "127.0.0.1", "-p", str(self.server.port), "-U", "postgres", "-d", "postgres"),
                    *("-S", copy, "--start", "-f", "/dev/null", "-E", end, "--no-loop"),
                    *("-o", "proto_version=1", "-o", f"publication_names={publication}"),
                ]
            )

    def receive(self, slot: str, publication: str, end: str, *, streaming: bool = True) -> Run:
        """`walmere receive --until`."""
        directory = self.scratch / "subscription"
        with self._copy(slot) as copy:
            config = self.scratch / "walmere.toml"
            config.write_text(
                f'[source]\ndsn = "{self.server.dsn()}"\npublications = ["{publication}"]\nslot = "{copy}"\n'
                f"streaming = {str(streaming).lower()}\n"
                f'[subscription]\nname = "bench"\ndirectory = "{directory}"\n'
            )
            run = timed([Path(sys.executable).parent / "walmere", "receive", "-c", config, "--until", end])
        shutil.rmtree(directory)
        return run

    def _copy(self, slot: str) -> _Copy:
        self._number += 1
        return _Copy(self, slot, f"copy_{self._number}")


class _Copy:
    def __init__(self, bench: Bench, slot: str, name: str) -> None:
        self.bench, self.name = bench, name
        bench.sql.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [slot, name])

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
        while self.bench.sql.execute(query, [self.name]).fetchone() != (None,):
            pass  # the walsender is still saying goodbye
        self.bench.drop(self.name)


def main() -> None:
    """All bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=int, default=max(binaries()), help="major version of the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a hundredth of the rows, to see that it works")
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    settings = {**LOGICAL, "max_wal_size": "16GB", "shared_buffers": "'512MB'", "checkpoint_timeout": "'1h'"}
    server = Server(binaries()[arguments.server], settings)
    report = Report("receive: slot → durable change log", {"server": arguments.server, "small": arguments.small})
    scratch = Path(tempfile.mkdtemp(prefix="walmere-bench-"))
    try:
        server.start()
        bench = Bench(server, scratch)
        transactions, rows = 2000 // scale, 300_000 // scale
        inserts, mixed = f"{transactions * 1000:,} inserts", f"{rows:,} one-row transactions"
        fill = FILL_INSERTS.format(transactions=transactions)
        _backlog(bench, report, inserts, 0.55, "a1", INSERTS, fill, arguments.rounds)
        _backlog(bench, report, mixed, 0.6, "a2", MIXED, FILL_MIXED.format(rows=rows), arguments.rounds)
        _memory(bench, report, 5_000_000 // scale)
        bench.sql.close()
    finally:
        server.remove()
        shutil.rmtree(scratch)
    _kills(report)
    report.finish()


def _backlog(
    bench: Bench, report: Report, name: str, bar: float, table: str, create: str, fill: str, rounds: int
) -> None:
    """Make a backlog behind a slot, then let both tools read it."""
    print(f"making {name} …")
    bench.sql.execute(f"{create}; CREATE PUBLICATION {table} FOR TABLE {table}")
    bench.slot(table)
    bench.sql.execute(fill)
    end = bench.end()
    report.ratio(
        name,
        bar,
        "pg_recvlogical",
        lambda: bench.recvlogical(table, table, end),
        lambda: bench.receive(table, table, end),
        rounds,
    )
    bench.drop(table)


def _memory(bench: Bench, report: Report, rows: int) -> None:
    bench.sql.execute(LARGE + "; CREATE PUBLICATION a3 FOR TABLE a3")
    peaks: dict[tuple[int, bool], Run] = {}
    for count, first in ((1000, 0), (rows, 1_000_000)):
        print(f"making one transaction of {count:,} rows …")
        bench.slot("a3")
        bench.sql.execute(FILL_LARGE.format(first=first, last=first + count - 1))
        end = bench.end()
        for streaming in (True, False):
            peaks[count, streaming] = bench.receive("a3", "a3", end, streaming=streaming)
        bench.drop("a3")
    for streaming in (True, False):
        small, large = peaks[1000, streaming], peaks[rows, streaming]
        more = (large.peak_bytes - small.peak_bytes) / (1 << 20)
        report.value(
            f"one transaction of {rows:,} rows, streaming {'on' if streaming else 'off'}",
            f"+{more:.0f} MB",
            "peak ≤ that of 1,000 rows + 150 MB",
            more <= 150,
            peak_mb={"1000": small.peak_bytes >> 20, str(rows): large.peak_bytes >> 20},
            seconds=[round(large.seconds, 2)],
        )


def _kills(report: Report) -> None:
    print("killing the receiver 20 times …")
    story = Path(__file__).parents[1] / "tests" / "stories" / "003_crash.py"
    command = [sys.executable, "-m", "pytest", "-q", str(story), "-k", "twenty"]
    passed = subprocess.run(command, cwd=story.parents[2], capture_output=True, text=True, check=False)
    target = "every committed transaction once, in order; confirmed ≤ durable after every kill"
    report.value(
        "20 × kill -9 during a mixed load", passed.stdout.strip().splitlines()[-1], target, not passed.returncode
    )


if __name__ == "__main__":
    main()
