"""Replay the log of a Delta table: its columns, files, vectors and LSN at one version.

`deltalake` can do this too, but does not return the descriptors of deletion vectors, which a commit has to repeat, and
opens a table from the beginning each time. Here, a process keeps the newest version of each table that it has read, and
reads only what was committed since. So opening a table costs what was committed, not the length of its log. The kept
version is valid as long as its commit is the same file: a table that was restored from a backup is read again.

Checkpoints are read in their classic form, in one or several parts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema

from walmere.directory import Directory, Stamp
from walmere.errors import SinkMismatch
from walmere.sinks.delta.files.data_file import DataFile
from walmere.sinks.delta.log.names import COMMIT, LOG, NUMBERED, log_file
from walmere.sinks.delta.log.schema import arrow_schema
from walmere.sinks.table_size import TableSize

_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet\Z")
_LAST_CHECKPOINT: Final = "_last_checkpoint"
_LISTED: Final = 250
"""List so many versions before one to find its checkpoint. Checkpoints are 100 commits apart."""
_GREATEST: Final = "9" * 21
"""After the names of all versions."""
_DAMAGED: Final = (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError, TypeError, AttributeError)
"""What may be raised by a checkpoint that is damaged, or was deleted meanwhile."""
_ATTEMPTS: Final = 3
_KINDS: Final = ("protocol", "metaData", "txn", "add")
_MAX_KEPT: Final = 4096
"""Keep the newest version of so many tables."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A table at one version."""

    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transactions: Mapping[str, int] = field(default_factory=dict)
    adds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the `add` actions of its files, by path
    written: int = 0  # bytes of files and vectors in the commits that were replayed, without a checkpoint
    vector_bytes: Mapping[str, int] = field(default_factory=dict)  # by path: of all vectors that the file has had
    file_bytes: int = 0  # of its files
    deleted_rows: int = 0  # that are still in files

    @property
    def properties(self) -> Mapping[str, str]:
        """The table properties."""
        found: Mapping[str, str] = self.metadata.get("configuration") or {}
        return found

    @property
    def schema(self) -> Schema:
        """The columns, as Delta has them."""
        return _schemas(self.metadata["schemaString"])[0]

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns."""
        return _schemas(self.metadata["schemaString"])[1]

    @property
    def files(self) -> list[DataFile]:
        """The files."""
        return [DataFile.from_action(add) for add in self.adds.values()]

    @property
    def size(self) -> TableSize:
        """How large it is."""
        return TableSize(len(self.adds), self.file_bytes, self.deleted_rows)

    @property
    def features(self) -> frozenset[str]:
        """The features that the protocol names."""
        both = (self.protocol.get("readerFeatures") or [], self.protocol.get("writerFeatures") or [])
        return frozenset(feature for features in both for feature in features)

    def then(self, version: int, actions: Iterable[Mapping[str, Any]]) -> TableVersion:
        """The table after the actions of the next commit."""
        protocol, metadata = self.protocol, self.metadata
        transactions, adds, written = dict(self.transactions), dict(self.adds), self.written
        vector_bytes, size, deleted = dict(self.vector_bytes), self.file_bytes, self.deleted_rows
        for action in actions:
            for kind, content in action.items():
                match kind:
                    case "add":
                        path, vector = content["path"], content.get("deletionVector")
                        if (replaced := adds.get(path)) is not None:
                            size, deleted = size - replaced["size"], deleted - _deleted(replaced)
                        adds[path] = content
                        size, deleted = size + content["size"], deleted + _deleted(content)
                        if vector is not None:
                            vector_bytes[path] = vector_bytes.get(path, 0) + vector["sizeInBytes"]
                            written += vector["sizeInBytes"]
                        written += 0 if path in self.adds else content["size"]
                    case "remove":
                        # a commit that replaces the vector of a file adds and removes the same path, in any order
                        found = adds.get(content["path"])
                        if found is not None and _vector_id(found) == _vector_id(content):
                            del adds[content["path"]]
                            size, deleted = size - found["size"], deleted - _deleted(found)
                    case "protocol":
                        protocol = content
                    case "metaData":
                        metadata = content
                    case "txn":
                        transactions[content["appId"]] = content["version"]
        vector_bytes = {path: size for path, size in vector_bytes.items() if path in adds}
        return TableVersion(version, protocol, metadata, transactions, adds, written, vector_bytes, size, deleted)


def _deleted(add: Mapping[str, Any]) -> int:
    """How many rows its vector marks."""
    vector = add.get("deletionVector")
    return 0 if vector is None else int(vector["cardinality"])


def _vector_id(action: Mapping[str, Any]) -> tuple[Any, ...] | None:
    vector = action.get("deletionVector")
    return None if vector is None else (vector["storageType"], vector["pathOrInlineDv"], vector.get("offset"))


@lru_cache(maxsize=_MAX_KEPT)
def _schemas(text: str) -> tuple[Schema, pa.Schema]:
    schema = Schema.from_json(text)
    return schema, arrow_schema(schema)


_kept: dict[str, tuple[Stamp | None, TableVersion]] = {}
_lock: Final = threading.Lock()


def newest(directory: Directory) -> TableVersion | None:
    """The newest version; None if there is no table. Raises SinkMismatch if its log cannot be read."""
    with _lock:
        kept = _kept.get(directory.location)
    if kept is not None and directory.stamp(log_file(kept[1].version)) == kept[0]:
        found = _forward(directory, *kept)
    else:
        found = _from_checkpoint(directory)
    stamp, known = found
    if known.version >= 0 and not (known.metadata and known.protocol):
        raise _unreadable(directory, "it has no metadata or protocol")
    if kept is None or known is not kept[1]:
        with _lock:
            _kept.pop(directory.location, None)
            if stamp is not None:  # None: there is no table, or only the checkpoint of this version is left
                _kept[directory.location] = found
            if len(_kept) > _MAX_KEPT:
                del _kept[next(iter(_kept))]
    return None if known.version < 0 else known


def at(directory: Directory, version: int) -> TableVersion:
    """An older version. Raises SinkMismatch if it cannot be read any more."""
    names, start = _start(directory, version)
    _, known = _forward(directory, None, start, version, _ahead(directory, start, names, version))
    if known.version < version:
        raise _unreadable(directory, f"version {known.version + 1} is not there")
    return known


def tombstones(directory: Directory, version: int) -> list[Mapping[str, Any]]:
    """The `remove` actions up to a version that the log still has: at least path, vector and time of each."""
    found: list[Mapping[str, Any]] = []
    first = 0
    for checkpoint in checkpoints(_names(directory, version), version):
        with contextlib.suppress(*_DAMAGED):
            found = [
                each for _, removed in _structs(directory, checkpoint, ["remove"]) for each in _tombstones(removed)
            ]
            first = checkpoint[0] + 1
            break
    numbers = range(first, version + 1)
    for number, content in zip(numbers, directory.map(directory.read, map(log_file, numbers)), strict=True):
        if content is None:
            raise _unreadable(directory, f"version {number} is not there")
        found += [action["remove"] for action in _parse(directory, number, content) if "remove" in action]
    return found


def committed_at(directory: Directory, version: int) -> float:
    """When a version was committed, in seconds since the epoch; 0 if the log does not say so."""
    content = directory.read(log_file(version))
    actions = [] if content is None else _parse(directory, version, content)
    times = (action["commitInfo"].get("timestamp") for action in actions if "commitInfo" in action)
    return (next(times, None) or 0) / 1000


def _start(directory: Directory, upto: int | None) -> tuple[Collection[str], TableVersion]:
    """The names in the log, and the table at the newest checkpoint up to a version; version -1 if none can be read."""
    names = _names(directory, upto)
    found = _load(directory, checkpoints(names, upto))
    if found.version < 0 and not directory.local and checkpoints(names, upto):  # it is damaged: is there another one?
        names = directory.files(LOG)
        found = _load(directory, checkpoints(names, upto))
    return names, found


def _names(directory: Directory, upto: int | None) -> Collection[str]:
    """The names in the log, in a store only those that are needed for a version: from a checkpoint before it on.

    A store lists a thousand names at a time, and the log may have tens of thousands.
    """
    if directory.local:
        return directory.files(LOG)
    start = -1
    with contextlib.suppress(ValueError, KeyError, TypeError):
        start = int(json.loads(directory.read(f"{LOG}/{_LAST_CHECKPOINT}") or b"{}")["version"])
    if upto is not None and start > upto:
        start = upto - _LISTED  # the newest checkpoint is too new
    if start > 0:
        end = _GREATEST if upto is None else f"{upto + 1:020d}"
        names = directory.files_between(LOG, f"{start:020d}", end)
        if checkpoints(names, upto):
            return names
    return directory.files(LOG)


def _ahead(
    directory: Directory, known: TableVersion, names: Iterable[str], upto: int | None
) -> Mapping[int, tuple[bytes, Stamp]]:
    """The commits after a version. In a store, they are read several at a time."""
    if directory.local:
        return {}
    found = (int(match[1]) for match in map(COMMIT.match, names) if match is not None)
    wanted = [number for number in found if known.version < number <= (number if upto is None else upto)]
    read = directory.map(lambda number: directory.read_stamped(log_file(number)), wanted)
    return {number: each for number, each in zip(wanted, read, strict=True) if each is not None}


def _forward(
    directory: Directory,
    stamp: Stamp | None,
    known: TableVersion,
    upto: int | None = None,
    ahead: Mapping[int, tuple[bytes, Stamp]] = MappingProxyType({}),
) -> tuple[Stamp | None, TableVersion]:
    """A version after the commits that follow it, and the stamp of the last one. `ahead` was read already."""
    while upto is None or known.version < upto:
        number = known.version + 1
        if (found := ahead.get(number) or directory.read_stamped(log_file(number))) is None:
            break
        actions = _parse(directory, number, found[0])
        try:
            stamp, known = found[1], known.then(number, actions)
        except (KeyError, TypeError, AttributeError):
            raise _unreadable(directory, f"version {number} has actions without required fields") from None
    return stamp, known


def _parse(directory: Directory, version: int, content: bytes) -> list[dict[str, Any]]:
    try:
        actions = [json.loads(line) for line in content.splitlines() if line.strip()]
        if not all(isinstance(action, dict) for action in actions):
            raise ValueError("not an object")
    except ValueError:
        raise _unreadable(directory, f"version {version} is not JSON") from None
    return actions


def _from_checkpoint(directory: Directory) -> tuple[Stamp | None, TableVersion]:
    """The newest version, from the newest checkpoint that can be read; version -1 if there is no table.

    The log is listed, so that it is noticed if commits are missing. `_last_checkpoint` alone may be older than the
    commits that are left, and the version before a gap would look like the newest. (In a store, it says where the list
    begins; what follows is listed.)
    """
    for _ in range(_ATTEMPTS):  # another process may be cleaning up the log
        names, known = _start(directory, None)
        stamp = None if known.version < 0 else directory.stamp(log_file(known.version))
        found = _forward(directory, stamp, known, ahead=_ahead(directory, known, names, None))
        if found[1].version >= max((int(match[1]) for match in map(NUMBERED.match, names) if match), default=-1):
            return found
    raise _unreadable(directory, f"version {found[1].version + 1} is not there, or its checkpoint cannot be read")


def checkpoints(names: Iterable[str], upto: int | None) -> list[tuple[int, int]]:
    """The whole checkpoints up to a version, newest first: the version and number of parts of each."""
    parts: dict[tuple[int, int], int] = {}
    for name in names:
        if (match := _CHECKPOINT.match(name)) is not None and (upto is None or int(match[1]) <= upto):
            which = (int(match[1]), int(match[3] or 1))
            parts[which] = parts.get(which, 0) + 1
    return sorted((which for which, count in parts.items() if count == which[1]), reverse=True)


def _load(directory: Directory, checkpoints: Iterable[tuple[int, int]]) -> TableVersion:
    """The table at the first of these checkpoints that can be read; at version -1 if none can."""
    for checkpoint in checkpoints:
        with contextlib.suppress(*_DAMAGED):
            actions: list[dict[str, Any]] = []
            for kind, contents in _parts(directory, checkpoint, _KINDS):
                actions += [{kind: _plain(content)} for content in contents]
            return replace(TableVersion().then(checkpoint[0], actions), written=0)
    return TableVersion()


def _parts(
    directory: Directory, checkpoint: tuple[int, int], kinds: Iterable[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The actions of these kinds in a checkpoint."""
    for kind, found in _structs(directory, checkpoint, kinds):
        yield kind, found.to_pylist(maps_as_pydicts="strict")


def _structs(
    directory: Directory, checkpoint: tuple[int, int], kinds: Iterable[str]
) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The actions of these kinds in a checkpoint, as Arrow structs."""
    version, parts = checkpoint
    for number in range(1, parts + 1):
        part = "" if parts == 1 else f".{number:010d}.{parts:010d}"
        with directory.filesystem.open_input_file(f"{LOG}/{version:020d}.checkpoint{part}.parquet") as source:
            file = pq.ParquetFile(source)
            if not {"protocol", "metaData"} <= set(file.schema_arrow.names):
                raise KeyError("protocol")  # another file of this name
            present = [kind for kind in kinds if kind in file.schema_arrow.names]
            # without statistics as structs, which Spark writes beside their JSON: a commit cannot repeat these
            fields = [(kind, field.name) for kind in present for field in file.schema_arrow.field(kind).type]
            table = file.read(columns=[f"{kind}.{name}" for kind, name in fields if not name.endswith("_parsed")])
        for kind in present:
            yield kind, table[kind].filter(pc.is_valid(table[kind]))


def _tombstones(removed: pa.ChunkedArray) -> list[Mapping[str, Any]]:
    """What is needed of `remove` actions, column by column: a checkpoint may have a hundred thousand of them."""
    columns = dict(zip((field.name for field in removed.type), removed.flatten(), strict=True))
    vectors: Iterable[Mapping[str, Any] | None] = itertools.repeat(None, len(removed))
    if (found := columns.get("deletionVector")) is not None:
        names = [field.name for field in found.type]
        values = zip(*(column.to_pylist() for column in found.flatten()), strict=True)
        described = (dict(zip(names, each, strict=True)) for each in values)
        vectors = (each if each["storageType"] is not None else None for each in described)
    times = columns["deletionTimestamp"].to_pylist()
    return [
        {"path": path, "deletionTimestamp": time, "deletionVector": vector}
        for path, time, vector in zip(columns["path"].to_pylist(), times, vectors, strict=True)
    ]


def _plain(value: Any) -> Any:
    """An action of a checkpoint as JSON has it: fields without a value are omitted."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return value


def _unreadable(directory: Directory, why: str) -> SinkMismatch:
    return SinkMismatch(
        f"opening the Delta table at {directory.location}",
        f"its log in {directory.location}/{LOG} cannot be read: {why}",
        "repair the log; or move the table's directory, then the table is copied again",
    )
