"""Connections to the target."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from walmere.libpq import Address, conninfo_of, describe, settings
from walmere.sinks.postgres.errors import translate_errors
from walmere.sinks.postgres.text import TextArray, TextArrayDumper

Connection = psycopg.Connection[tuple[Any, ...]]

_open: dict[tuple[int, str], Connection] = {}
_opening: Final = threading.Lock()


def connect(address: Address, application_name: str) -> Connection:
    """Open a connection whose session applies changes as a subscriber: triggers and rules fire only if enabled so."""
    with translate_errors(address, f"connecting to the target {describe(address)}"):
        connection: Connection = psycopg.connect(
            conninfo_of(address, application_name),
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,  # parameters are $1: names of tables may have a percent sign
        )
        try:
            connection.adapters.register_dumper(TextArray, TextArrayDumper)
            connection.execute(settings())
            connection.execute("SET session_replication_role = replica")
        except psycopg.Error:
            connection.close()
            raise
    return connection


@contextmanager
def reused(address: Address, application_name: str) -> Iterator[Connection]:
    """A connection that this process keeps for its next task. It is closed after an error."""
    name = (os.getpid(), conninfo_of(address, application_name))
    with _opening:
        connection = _open.pop(name, None)
    if connection is None or connection.closed:
        connection = connect(address, application_name)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    with _opening:
        unused = _open.pop(name, None)
        _open[name] = connection
    if unused is not None:
        unused.close()


@atexit.register
def _close_all() -> None:
    """Close what this process has kept; not what it has from the process that it was forked from."""
    for (pid, _), connection in _open.items():
        if pid == os.getpid():
            connection.close()
