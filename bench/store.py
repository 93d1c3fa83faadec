"""A subscription in an object store, compared with one on the local disk.

    receive     `walmere receive` of a backlog into a store, and into a local change log
    takeover    another machine with an empty directory goes on: until the receiver streams, and until a run has applied
                what was written meanwhile (Spark is running already)

The S3 server is versitygw, if `scripts/versitygw` has got it, or else moto, which needs more CPU time.

Run it with `python -m bench.store [--server 15] [--rounds 3] [--small] [--only receive takeover] [--moto]`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.load import Load, inserts, mixed
from bench.ours import Ours, warm
from bench.side_by_side import Report, Run, timed
from bench.source import Source, options, scratch_config, source
from walmere import config as configuration
from walmere.subscription.receiver import Receiver

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from object_stores import ENVIRONMENT, Bucket, S3Server, VersityServer, versitygw

__all__ = ["ENVIRONMENT", "WALMERE", "Bucket", "s3", "with_store"]
WALMERE = Path(sys.executable).parent / "walmere"


@contextmanager
def s3(*, moto: bool) -> Iterator[S3Server | VersityServer]:
    """A running S3 server, with its credentials in the environment."""
    os.environ.update(ENVIRONMENT)
    program = None if moto else versitygw()
    server = S3Server() if program is None else VersityServer(program)
    try:
        yield server
    finally:
        server.stop()


def settings(bucket: Bucket) -> tuple[str, str]:
    """Lines of [subscription], and a section [storage]."""
    return (
        f'store = "{bucket.url}/walmere/bench"\n',
        f'[storage]\nendpoint = "{bucket.endpoint}"\nregion = "us-east-1"\n',
    )


class Stored(Ours):
    """A subscription in a store; its directory can be replaced by an empty one."""

    bucket: Bucket

    def config_file(self, slot: str | None = None) -> Path:
        """Write the configuration."""
        file = super().config_file(slot)
        return with_store(file, self.bucket)

    def burn(self) -> None:
        """The machine is lost with its disk."""
        shutil.rmtree(self.directory / "subscription")


def with_store(file: Path, bucket: Bucket) -> Path:
    """Add the store to a configuration."""
    subscription, storage = settings(bucket)
    text = file.read_text().replace("[subscription]\n", f"[subscription]\n{subscription}")
    file.write_text(f"{text}\n{storage}")
    return file


@dataclass(frozen=True)
class Bench:
    """A source, an S3 server, a scratch directory, and the report."""

    source: Source
    server: S3Server | VersityServer
    scratch: Path
    report: Report

    def receive(self, slot: str, end: str, *, stored: bool) -> Run:
        """Run `walmere receive --until`."""
        with self.source.copy_of(slot) as copy:
            config = scratch_config(self.source.server, self.scratch, slot, copy)
            if stored:
                with_store(config, self.server.bucket())
            run = timed([WALMERE, "receive", "-c", config, "--until", end])
        shutil.rmtree(self.scratch / "subscription")
        return run

    def receiving(self, name: str, bar: float | None, load: Load, rounds: int) -> None:
        """Receive a backlog into a local log and into a store, in turn."""
        end = load.backlog(self.source, name)
        self.report.ratio(
            f"{name} into a store",
            bar,
            "a local change log",
            lambda: self.receive(load.table, end, stored=False),
            lambda: self.receive(load.table, end, stored=True),
            rounds,
        )
        self.source.drop(load.table)

    def takeover(self, objects: int, rows: int) -> None:
        """Make a log of many objects, lose the machine, and time what another one does."""
        self.source.sql.execute("CREATE TABLE o (id bigint PRIMARY KEY, note text); CREATE PUBLICATION o FOR TABLE o")
        ours = Stored(self.source, self.scratch / "o", "o")
        ours.bucket = self.server.bucket()
        ours.run("o", self.source.end())
        file = ours.config_file()
        file.write_text(file.read_text().replace("[subscription]\n", "[subscription]\nupload_seconds = 0.05\n"))
        print(f"making a log of {objects:,} objects …")
        receiver = Receiver(configuration.load(file))
        thread = threading.Thread(target=receiver.run)
        thread.start()
        for number in range(objects):
            self.source.sql.execute("INSERT INTO o VALUES (%s, 'x')", [number])
            time.sleep(0.05)
        receiver.stop()
        thread.join()
        self.source.sql.execute(
            f"INSERT INTO o SELECT i, 'y' FROM generate_series({objects + 1}, {objects + rows}) i".encode()
        )
        ours.burn()
        end = self.source.end()
        run = timed([WALMERE, "receive", "-c", ours.config_file(), "--until", end])
        self.report.value(
            f"receiver takes over a log of {objects:,} objects", f"{run.seconds:.1f} s", "≤ 30 s", run.seconds <= 30
        )
        ours.burn()
        self.source.sql.execute("INSERT INTO o VALUES (-1, 'z')")
        run = ours.run("o", self.source.end())
        self.report.value("run takes over, Spark running", f"{run.seconds:.1f} s", "≤ 30 s", run.seconds <= 30)
        assert ours.rows("o") == int(self.source.value("SELECT count(*) FROM o"))
        self.source.drop("o")


def main() -> None:
    """Run all parts, or those of `--only`."""
    parts = ("receive", "takeover")
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--moto", action="store_true", help="use moto, also if versitygw is there")
    arguments = parser.parse_args()
    scale = 100 if arguments.small else 1
    with (
        source(arguments.server) as made,
        s3(moto=arguments.moto) as server,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        facts = {"server": arguments.server, "small": arguments.small, "s3": type(server).__name__}
        report = Report("store", "a subscription in an object store", facts)
        bench = Bench(made, server, Path(directory), report)
        if "receive" in arguments.only:
            transactions, rows = 2000 // scale, 300_000 // scale
            bench.receiving(f"{transactions * 1000:,} inserts", 1.3, inserts(transactions), arguments.rounds)
            bench.receiving(f"{rows:,} one-row transactions", None, mixed(rows, 100_000), arguments.rounds)
        if "takeover" in arguments.only:
            report.facts["spark_start_seconds"], _ = warm(made, Path(directory))
            bench.takeover(2000 // scale, 100_000 // scale)
    report.finish()


if __name__ == "__main__":
    main()
