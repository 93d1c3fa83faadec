"""The OID of the database of a connection."""

from __future__ import annotations

from walmere.publisher.connect import Connection


def database_oid(connection: Connection) -> int:
    """The OID of the database. It stays the same when the database is renamed."""
    row = connection.execute(
        "SELECT oid::text FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])
