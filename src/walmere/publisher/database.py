"""Which database a connection is to."""

from __future__ import annotations

from typing import Any

import psycopg

from walmere.publisher.connect import Connection


def database_oid(connection: Connection) -> int:
    """The OID of the database. It stays the same when the database is renamed."""
    row = connection.execute(
        "SELECT oid::text FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])


def is_same_database(one: psycopg.Connection[Any], other: psycopg.Connection[Any]) -> bool:
    """Whether both are connections to one database, under whatever address.

    The system identifier is not enough: a server that was cloned from a backup has the same.
    """
    query = (
        "SELECT pg_catalog.extract('epoch', pg_catalog.pg_postmaster_start_time())::text, oid::text"
        " FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
    )
    return one.execute(query).fetchall() == other.execute(query).fetchall()
