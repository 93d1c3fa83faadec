"""The servers of a test session. pytest has `conftest` under a name of its own, so what must exist once is here."""

from __future__ import annotations

from pathlib import Path

from walmere.testing.server import LOGICAL, Server, binaries

BINARIES = binaries(sorted((Path(__file__).parents[1] / ".servers").glob("*/bin")))  # scripts/matrix.py fills it
_servers: dict[int, Server] = {}


def server_of(version: int) -> Server:
    """The session's server of this version, started when first asked for."""
    if version not in _servers:
        # PostgreSQL 14 sends autovacuum's transactions, too, as empty ones: no test could count
        quiet = {"autovacuum": "off"} if version == 14 else {}
        server = Server(BINARIES[version], {**LOGICAL, "fsync": "off", "max_wal_size": "2GB", **quiet})
        _servers[version] = server
        server.start()
    return _servers[version]


def remove_servers() -> None:
    """Stop them, and delete their directories."""
    for server in _servers.values():
        server.remove()
    _servers.clear()
