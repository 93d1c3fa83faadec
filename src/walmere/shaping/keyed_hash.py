"""HMAC-SHA256 of the values of a column, by DuckDB: no loop over rows in Python.

A hash without a key would hide nothing: there are few telephone numbers, and anyone can hash them all.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from typing import Any, Final

import pyarrow as pa

_BLOCK: Final = 64
"""Bytes of a block of SHA-256."""
_INNER, _OUTER = 0x36, 0x5C
_HMAC: Final = "SELECT sha256($outer::BLOB || unhex(sha256($inner::BLOB || value))) AS hash FROM hashed_values"
_FINGERPRINT_DIGITS: Final = 16
_local = threading.local()


def key_fingerprint(key: str) -> str:
    """A text that changes with the key, and does not reveal it."""
    digest = hmac.digest(key.encode(), b"walmere: fingerprint of the key", "sha256")
    return digest.hex()[:_FINGERPRINT_DIGITS]


def keyed_hash(values: pa.Array, key: str) -> pa.Array:
    """HMAC-SHA256 of an array of binary, as 64 hexadecimal digits; NULL stays NULL."""
    block = key.encode()
    block = (hashlib.sha256(block).digest() if len(block) > _BLOCK else block).ljust(_BLOCK, b"\0")
    inner, outer = (bytes(each ^ pad for each in block) for pad in (_INNER, _OUTER))
    connection = _connection()
    connection.register("hashed_values", pa.table({"value": values}))
    try:
        found = connection.sql(_HMAC, params={"inner": inner, "outer": outer}).to_arrow_table()
    finally:
        connection.unregister("hashed_values")
    return found.column("hash").cast(pa.string()).combine_chunks()


def _connection() -> Any:
    """One connection for each thread: to open one takes milliseconds."""
    if not hasattr(_local, "connection"):
        import duckdb  # noqa: PLC0415  only tasks of tables with a hash need it

        _local.connection = duckdb.connect(config={"threads": 1})
    return _local.connection
