"""Where the tables of a lake are.

A table is in `<path>/<namespace>/<table>`. In a name, every character but ASCII letters, digits, `_`, `-` and `.` is
written as `~` and two hexadecimal digits per byte of UTF-8. So are `~` itself and a dot at the beginning. This is
percent-encoding with another sign: `deltalake` decodes a `%` in a path once too often, and `~` has no meaning in URLs,
file systems, shells (in the middle of a word) and Hadoop.

Upper and lower case are kept. On a file system that ignores case, two tables could share a directory. The table's name
is in its metadata, so the second table is refused.
"""

from __future__ import annotations

import re
from typing import Final

from walmere.names import TableName

PLACE: Final = "_walmere"
"""The directory of the points, see `walmere.ledger.lake`."""
_ENCODED: Final = re.compile(rf"[^A-Za-z0-9_.-]|^\.|^_(?=(?:delta_log|{PLACE[1:]})$)")


def quote(name: str) -> str:
    """An identifier as the name of a directory."""
    return _ENCODED.sub(lambda match: "".join(f"~{byte:02X}" for byte in match[0].encode()), name)


def unquote(name: str) -> str:
    """The inverse of `quote`."""
    return re.sub(r"(?:~[0-9A-F]{2})+", lambda match: bytes.fromhex(match[0].replace("~", "")).decode(), name)


def table_path(table: TableName) -> str:
    """The path of a table, relative to the lake."""
    return f"{quote(table.namespace)}/{quote(table.name)}"
