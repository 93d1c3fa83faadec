"""Deletion vectors, as Spark leaves them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

from walmere.names import TableName
from walmere.sinks.base import StagedFile
from walmere.sinks.delta.sink import DeltaSink


def z85(data: bytes) -> str:
    """Deletion vectors are in Z85, which is base 85 by another alphabet."""
    python = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    theirs = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(data).translate(bytes.maketrans(python, theirs)).decode()


def inline_vector(*deleted: int) -> dict[str, Any]:
    """Spark's deletion vector, inside the log: one Roaring bitmap with one array container."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(deleted) - 1, 16) + struct.pack(f"<{len(deleted)}H", *deleted)
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    data += bytes(-len(data) % 4)
    return {"storageType": "i", "pathOrInlineDv": z85(data), "sizeInBytes": len(data), "cardinality": len(deleted)}


def delete_rows(sink: DeltaSink, table: TableName, file: StagedFile, *places: int) -> int:
    """Delete rows of a file, by their places, as Spark does. Returns the version."""
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    features = ["deletionVectors", *(["timestampNtz"] if _has_timestamps(sink, table) else [])]
    common: dict[str, Any] = {"path": file.path, "size": file.size, "dataChange": True, "partitionValues": {}}
    stats = json.loads(file.stats) | {"tightBounds": False}
    actions: list[dict[str, Any]] = [
        {"protocol": {**protocol, "readerFeatures": features, "writerFeatures": features}},
        {"remove": common | {"deletionTimestamp": 1, "extendedFileMetadata": True}},
        {"add": common | {"modificationTime": 1, "stats": json.dumps(stats), "deletionVector": inline_vector(*places)}},
    ]
    version = sink.version(table) + 1
    log = Path(sink.location(table), "_delta_log", f"{version:020d}.json")
    log.write_text("\n".join(map(json.dumps, actions)))
    return version


def _has_timestamps(sink: DeltaSink, table: TableName) -> bool:
    return "timestampNtz" in (sink.open(table).protocol().reader_features or ())
