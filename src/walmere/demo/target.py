"""The target of `walmere demo --target postgres`: a database on a second server of the demo.

When the demo ends, both servers are stopped. The target's cluster stays in the directory of the demo, so that it can be
started again and looked at. (As root, the server runs as another user. If that user cannot reach the directory or the
binaries, the cluster is removed.)
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from walmere.config import PostgresTarget
from walmere.demo import shell
from walmere.sinks.postgres.connect import Connection, connect
from walmere.sinks.postgres.errors import translate_errors
from walmere.testing.server import Server

SETTINGS: Final = {"max_wal_size": "256MB", "min_wal_size": "32MB", "max_active_replication_origins": "32"}
"""A session that copies has an origin, and there is one for each core."""
DATABASE: Final = "shop"


@dataclass(frozen=True, slots=True)
class TargetDatabase:
    """The database, and how its server is started again."""

    dsn: str
    bindir: Path
    account: str | None  # the user that runs the server, if it is another one
    cluster: Path | None = None  # None: it is removed

    def next_commands(self) -> list[tuple[str, str]]:
        """Commands to try, with descriptions."""
        if self.cluster is None:
            return []
        run_as = "" if self.account is None else f"runuser -u {self.account} -- "
        pg_ctl = f"{run_as}{shell.path(self.bindir / 'pg_ctl')} -D {shell.quoted(self.cluster)}"
        psql = "psql" if shutil.which("psql") else shell.path(self.bindir / "psql")
        log = shell.quoted(self.cluster / "server.log")

        def query(sql: str) -> str:
            return f"{psql} {self.dsn} -c {shell.quoted(sql)}"

        return [
            ("start the target's server again", f"{pg_ctl} -l {log} start"),
            (
                "the orders in the target, by status",
                query("SELECT status, count(*), sum(total) FROM orders GROUP BY 1"),
            ),
            (
                "how far each table is: stored in the transactions that changed it",
                query("SELECT name, lsn, version FROM walmere.tables"),
            ),
            (
                "the same as a replication origin",
                query("SELECT remote_lsn FROM pg_replication_origin_status WHERE external_id = 'walmere_demo'"),
            ),
            ("stop the server", f"{pg_ctl} stop"),
        ]


def create(server: Server) -> TargetDatabase:
    """Create the database. It has no tables yet: Walmere creates them."""
    with opened(server.dsn()) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}".encode())
    owner = server.data.stat().st_uid
    account = pwd.getpwuid(owner).pw_name if owner != os.getuid() else None
    return TargetDatabase(server.dsn(DATABASE), server.bindir, account)


@contextmanager
def opened(dsn: str) -> Iterator[Connection]:
    """A connection to the target's server."""
    address = PostgresTarget.model_validate({"kind": "postgres", "dsn": dsn})
    with (
        translate_errors(address, "using the target of the demo"),
        closing(connect(address, "walmere demo")) as connection,
    ):
        yield connection


def keep(target: TargetDatabase, server: Server, cluster: Path) -> TargetDatabase:
    """Stop the server, and move its data to the directory of the demo."""
    copied = server.directory in server.bindir.parents  # the binaries are removed with the server
    if target.account is not None and (
        copied or not all(each.stat().st_mode & 1 for each in cluster.absolute().parents)
    ):
        return target
    server.stop()
    shutil.move(server.data, cluster)
    if target.account is not None:  # a move to another file system does not keep the owner
        for each in (cluster, *cluster.rglob("*")):
            shutil.chown(each, target.account)
    return replace(target, cluster=cluster)
