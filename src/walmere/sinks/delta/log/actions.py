"""The actions of a commit, by the rules of Delta's protocol.

`deltalake` cannot write deletion vectors, so commits are JSON files of our own. The rules that matter here:

- A table with deletion vectors has reader version 3, writer version 7, and `deletionVectors` in both lists. A writer
  version that did not list features yet is replaced by the list of what it implied.
- A file is known by its path and its vector. To change the vector, one commit removes the file with the old vector and
  adds it with the new one. `numRecords` counts deleted rows too, and the bounds are no longer tight.
- `dataChange` is false if the commit only moves rows to other files. Then it is not in the table's change feed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from walmere.errors import SinkMismatch
from walmere.names import TableName
from walmere.sinks.base import StagedFile
from walmere.sinks.delta.files.vectors import Vector
from walmere.sinks.delta.log.replay import TableVersion
from walmere.variant_type import VARIANT

VECTORS: Final = "deletionVectors"
VECTORS_PROPERTY: Final = "delta.enableDeletionVectors"
_NTZ: Final = "timestampNtz"
_VARIANT: Final = "variantType"
_FEATURES_VERSIONS: Final = (3, 7)
"""The reader and writer versions from which on the protocol lists features."""
_IMPLIED: Final[Mapping[int, tuple[str, ...]]] = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
_WRITTEN: Final = frozenset({VECTORS, _NTZ, *(name for names in _IMPLIED.values() for name in names)}) | {
    "allowColumnDefaults",
    "domainMetadata",
    "vacuumProtocolCheck",
    _VARIANT,
}
"""Features whose rules these commits follow, or do not concern. A writer must refuse a table that has others."""
_READ: Final = frozenset({VECTORS, _NTZ, "columnMapping", "vacuumProtocolCheck", _VARIANT})
"""Features of tables whose rows are read right. Column mapping is only named here, and refused if it is in use."""
_COLUMN_RULES: Final = ("delta.invariants", "delta.generationExpression", "delta.identity.start")
"""Keys in the metadata of a column whose values a writer has to check, or to compute."""
_TIGHT: Final = re.compile(r'("tightBounds"\s*:\s*)(?:true|false)(?=\s*[,}])')


def require_supported(table: TableName, found: TableVersion) -> None:
    """Refuse a table that needs what is not written here."""
    doing = f"writing to the Delta table {table}"
    unknown = sorted((found.features - _WRITTEN) | _mapping(found))
    if unknown:
        raise SinkMismatch(
            doing,
            f"it has the table feature {', '.join(unknown)}, which Walmere does not support",
            "drop the feature; or move the table's directory, then the table is copied again",
        )
    if found.metadata.get("partitionColumns"):
        raise SinkMismatch(doing, "the Delta table is partitioned", "create it again, without partitions")
    rules = [name for name in found.properties if name.startswith("delta.constraints.")]
    rules += ["delta.appendOnly"] if found.properties.get("delta.appendOnly", "").lower() == "true" else []
    rules += ["NOT NULL"] if not all(field.nullable for field in found.schema.fields) else []
    rules += [name for name in _COLUMN_RULES if f'"{name}":' in found.metadata["schemaString"]]
    if rules:
        raise SinkMismatch(
            doing,
            f"another program has set {', '.join(rules)}, which rows of the source may violate",
            "remove it; or move the table's directory, then the table is copied again",
        )


def unreadable(found: TableVersion) -> str | None:
    """Why the rows of a table cannot be read here; None if they can be."""
    unknown = sorted((set(found.protocol.get("readerFeatures") or ()) - _READ) | _mapping(found))
    if unknown:
        return f"it has the table feature {', '.join(unknown)}, which Walmere does not read"
    if (version := found.protocol.get("minReaderVersion", 1)) > _FEATURES_VERSIONS[0]:
        return f"it has the reader version {version}, which Walmere does not read"
    return None


def _mapping(found: TableVersion) -> set[str]:
    """The feature by which the names of columns in files are others, if it is in use."""
    return {"columnMapping"} if found.properties.get("delta.columnMapping.mode", "none") != "none" else set()


def new_protocol(schema: pa.Schema, *, vectors: bool) -> dict[str, Any]:
    """The protocol of a new table."""
    features = _needed(schema, vectors=vectors)
    return _protocol(features, features)


def changed_protocol(found: Mapping[str, Any], schema: pa.Schema, *, vectors: bool) -> dict[str, Any] | None:
    """The protocol that a table needs for these columns, with or without vectors; None if it has that already.

    Other features stay.
    """
    readers, writers = set(found.get("readerFeatures") or ()), set(found.get("writerFeatures") or ())
    wanted = _needed(schema, vectors=vectors)
    dropped = set() if vectors else {VECTORS}
    if wanted <= readers & writers and not dropped & (readers | writers):
        return None
    if found["minWriterVersion"] < _FEATURES_VERSIONS[1]:
        implied = [names for version, names in _IMPLIED.items() if version <= found["minWriterVersion"]]
        writers |= {name for names in implied for name in names}
        readers |= {"columnMapping"} if found["minReaderVersion"] == 2 else set()
    return _protocol((readers | wanted) - dropped, (writers | wanted) - dropped)


def _protocol(readers: Iterable[str], writers: Iterable[str]) -> dict[str, Any]:
    reader, writer = _FEATURES_VERSIONS
    readers, writers = sorted(readers), sorted(writers)
    if not readers and set(writers) <= set(_IMPLIED[2]):
        return {"minReaderVersion": 1, "minWriterVersion": 2}
    if not readers:
        return {"minReaderVersion": 1, "minWriterVersion": writer, "writerFeatures": writers}
    return {
        "minReaderVersion": reader,
        "minWriterVersion": writer,
        "readerFeatures": readers,
        "writerFeatures": writers,
    }


def _needed(schema: pa.Schema, *, vectors: bool) -> set[str]:
    """The features that these columns need, and the vectors."""
    needed = {VECTORS} if vectors else set()
    if any(_is_ntz(kind) for kind in schema.types):
        needed.add(_NTZ)
    if VARIANT in schema.types:
        needed.add(_VARIANT)
    return needed


def _is_ntz(kind: Any) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.tz is None
    if pa.types.is_map(kind):
        return _is_ntz(kind.key_type) or _is_ntz(kind.item_type)
    if pa.types.is_struct(kind):
        return any(_is_ntz(field.type) for field in kind)
    return pa.types.is_nested(kind) and _is_ntz(kind.value_type)


def add(file: StagedFile, vector: Vector | None, now: int, *, data_change: bool) -> dict[str, Any]:
    """Add a new file."""
    action: dict[str, Any] = {
        "path": file.path,
        "partitionValues": {},
        "size": file.size,
        "modificationTime": now,
        "dataChange": data_change,
        "stats": file.stats,
    }
    return {"add": action if vector is None else _marked(action, vector, file.rows)}


def mark(found: Mapping[str, Any], vector: Vector, rows: int, *, data_change: bool) -> dict[str, Any]:
    """Add a file of the table, which has so many rows, again with another vector.

    It must be removed in the same commit.
    """
    return {"add": _marked({**found, "dataChange": data_change}, vector, rows)}


def _marked(action: dict[str, Any], vector: Vector, rows: int) -> dict[str, Any]:
    return {**action, "stats": _not_tight(action.get("stats"), rows), "deletionVector": vector.to_action()}


def _not_tight(stats: str | None, rows: int) -> str:
    """Statistics of a file with deleted rows. The text of the bounds stays as it is, so that no digit is lost."""
    stats = stats or "{}"
    if json.loads(stats).get("numRecords") is None:  # a file of another program; with a vector, the number is required
        return f'{{"numRecords":{rows},"tightBounds":false}}'
    found = _TIGHT.sub(r"\1false", stats)
    return found if found != stats or _TIGHT.search(stats) else f'{stats.rstrip()[:-1]},"tightBounds":false}}'


def remove(found: Mapping[str, Any], now: int, *, data_change: bool) -> dict[str, Any]:
    """Remove a file of the table, with its vector."""
    action: dict[str, Any] = {
        "path": found["path"],
        "deletionTimestamp": now,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": found.get("partitionValues") or {},
        "size": found["size"],
    }
    if found.get("deletionVector") is not None:
        action["deletionVector"] = found["deletionVector"]
    return {"remove": action}
