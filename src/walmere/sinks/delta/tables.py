"""The Delta tables of a lake: how they are opened, and to whom they belong. `places` says where they are."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable

from walmere.directory import Directory
from walmere.errors import ConfigError, SinkError, SinkMismatch
from walmere.ledger.file import KEEP_SECONDS
from walmere.local_cache import local_cache
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.object_store.options import checked, deltalake_settings, is_url, locate
from walmere.owner import PROPERTY as OWNER_PROPERTY
from walmere.owner import Owner, owned_by_another
from walmere.sinks.base import StagedFile
from walmere.sinks.delta.files.parquet import conform, write
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.log.replay import TableVersion
from walmere.sinks.delta.places import table_path

if TYPE_CHECKING:
    from walmere.sinks.delta.files.key_index import KeyIndex

APP_ID: Final = "walmere"

PROPERTIES: Final[Mapping[str, str]] = {
    # A checkpoint has all files and tombstones, so it is written rarely. Readers read the commits after it.
    "delta.checkpointInterval": "100",
}
FILE_SIZE: Final = 256 << 20
"""Bytes. With deletion vectors, a changed row does not rewrite its file, and every batch names the files it changes."""
REWRITTEN_FILE_SIZE: Final = 16 << 20
"""Bytes. Without deletion vectors, one changed row rewrites one file, so files are smaller."""


def owner_of(found: TableVersion) -> Owner | None:
    """The owner in the table's metadata; None if it has none."""
    text = found.properties.get(OWNER_PROPERTY)
    return None if text is None else Owner.from_json(text)


@dataclass(frozen=True, slots=True)
class DeltaTables:
    """A directory of Delta tables, and the settings to write them."""

    path: str  # local, or the URL of an object store
    app_id: str = APP_ID  # LSNs are comparable only within one: another source needs another
    storage_options: Mapping[str, str] | None = None  # of the object store; secrets are refused
    properties: Mapping[str, str] = field(default_factory=lambda: dict(PROPERTIES))
    deletion_vectors: bool = True  # False: a changed row rewrites its file, for readers without vectors
    index: str | None = None  # a local directory for key indexes, or one in the local cache; None: they are in memory
    file_size: int = 0  # of new files; 0: by `deletion_vectors`
    keep_seconds: float = KEEP_SECONDS
    batch_seconds: float | None = None  # see `Sink.batch_interval`
    owner: Owner | None = None  # None: write to tables of any owner
    take_over: bool = False

    def __post_init__(self) -> None:
        if is_url(self.path):
            place = locate(self.path)
            object.__setattr__(self, "path", place.prefix if place.kind == "file" else place.url)
            object.__setattr__(self, "storage_options", checked(place, self.storage_options or {}))
        if not is_url(self.path):
            if "%" in self.path:
                raise ConfigError(
                    f"writing Delta tables to {self.path}",
                    "deltalake does not support % in a path",
                    "choose another path",
                )
            object.__setattr__(self, "path", os.path.abspath(self.path))  # noqa: PTH100
        if not self.file_size:
            object.__setattr__(self, "file_size", FILE_SIZE if self.deletion_vectors else REWRITTEN_FILE_SIZE)

    @property
    def keep_hours(self) -> int:
        """`keep_seconds`, rounded up to what `deltalake` accepts."""
        return math.ceil(self.keep_seconds / 3600)

    @property
    def options(self) -> dict[str, str] | None:
        """The storage options for `deltalake`."""
        return deltalake_settings(self.storage_options or {}) if is_url(self.path) else None

    def location(self, table: TableName) -> str:
        """The table's directory."""
        return f"{self.path.rstrip('/')}/{table_path(table)}"

    def directory(self, table: TableName) -> Directory:
        """The table's directory, to read and write files in it."""
        return Directory(self.location(table), self.storage_options)

    def newest(self, table: TableName) -> TableVersion | None:
        """The newest version of a table; None if it does not exist."""
        found = replay.newest(self.directory(table))
        name = None if found is None else found.metadata.get("name")
        if name is not None and name != str(table):
            raise SinkMismatch(
                f"opening the Delta table {table}",
                f"its directory {self.location(table)} contains the table {name}",
                "the file system ignores case: rename one of the tables, or choose another path",
            )
        return found

    def current(self, table: TableName) -> TableVersion:
        """The newest version of a table that exists."""
        found = self.newest(table)
        if found is None:
            raise SinkMismatch(
                f"opening the Delta table {table}",
                f"there is no table at {self.location(table)}",
                "let the subscription copy the table again",
            )
        return found

    def open(self, table: TableName, version: int | None = None) -> DeltaTable:
        """Open a table with `deltalake`, at its newest version or at another one."""
        if version is None:
            self.current(table)
        return DeltaTable(self.location(table), version, storage_options=self.options)

    def lsn_of(self, found: TableVersion) -> Lsn | None:
        """The LSN in the table; None if Walmere has not committed to it."""
        lsn = found.transactions.get(self.app_id)
        return None if lsn is None else Lsn(lsn)

    def owner_properties(self) -> dict[str, str]:
        """The table properties that store the owner."""
        return {} if self.owner is None or not self.owner.known else {OWNER_PROPERTY: self.owner.to_json()}

    def require_owner(self, table: TableName, version: TableVersion) -> None:
        """Refuse a table that another subscription has taken over since the run began."""
        found = owner_of(version)
        if self.owner is not None and found is not None and not self.owner.same(found):
            raise owned_by_another(f"writing to the Delta table {table}", f"the table at {self.location(table)}", found)

    def index_of(self, table: TableName) -> Path | None:
        """The local directory with the key indexes of a table."""
        if self.index is None:
            return None
        if (index := Path(self.index)).is_absolute():
            return index / table_path(table)
        # executors of several subscriptions may share the cache, and two lakes may have a table of the same name
        return local_cache() / index / hashlib.sha256(self.path.encode()).hexdigest()[:16] / table_path(table)

    def write(
        self, table: TableName, schema: pa.Schema, rows: Iterable[pa.Table], index: KeyIndex | None = None
    ) -> list[StagedFile]:
        """Write rows into new files of the table, and their key indexes. A commit makes them visible."""
        conformed = (conform(part, schema) for part in rows)
        kept = None if index is None or index.cache is None else index
        return write(self.directory(table), schema, conformed, self.file_size, kept)

    def not_writable(self, doing: str, error: Exception) -> SinkError:
        """The error for what `deltalake` could not write."""
        return SinkError(doing, str(error), f"make sure that {self.path} is writable")
