"""VARIANT columns of Delta tables: the protocol, the files, the statistics, and columns that are added."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delta_rows import read_delta
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.delta.sink import DeltaSink
from walmere.types.variant.codec import Variant
from walmere.variant_type import VARIANT

TABLE = TableName("public", "t")
CODEC = Variant("jsonb", VARIANT)
PLAIN = pa.schema([("id", pa.int64())])
WITH_VARIANT = pa.schema([("id", pa.int64()), ("doc", VARIANT)])


def variants(*texts: str | None) -> pa.Array:
    return CODEC.cast(pa.array([None if text is None else text.encode() for text in texts], pa.binary())).values


def one_by_one(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(each) for each in items]


def actions(sink: DeltaSink, version: int) -> dict[str, Any]:
    log = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json")
    return {kind: content for line in log.read_text().splitlines() for kind, content in json.loads(line).items()}


def test_a_file_has_two_required_binary_parts_and_no_bounds(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), deletion_vectors=False)
    sink.create(TABLE, WITH_VARIANT)
    assert actions(sink, 0)["protocol"] == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["variantType"],
        "writerFeatures": ["variantType"],
    }
    [field] = json.loads(actions(sink, 0)["metaData"]["schemaString"])["fields"][1:]
    assert (field["name"], field["type"]) == ("doc", "variant")
    doc = variants('{"a": 1}', None, '{"a": 2.50}', "null", *['{"a": 3}'] * 20)
    rows = pa.RecordBatch.from_arrays([pa.array(range(24)), doc], schema=WITH_VARIANT)
    staged = sink.stage(
        TABLE, [rows, pa.RecordBatch.from_arrays([pa.array([24]), pa.nulls(1, VARIANT)], ["id", "doc"])]
    )
    version = sink.commit(TABLE, staged, Lsn(1))
    stats = json.loads(actions(sink, version)["add"]["stats"])
    assert stats["numRecords"] == 25
    assert stats["minValues"] == {"id": 0}
    assert stats["nullCount"] == {"id": 0}
    file = pq.ParquetFile(Path(sink.location(TABLE), staged[0].path))
    parts = [file.schema.column(number) for number in (1, 2)]
    assert [(part.path, part.physical_type) for part in parts] == [
        ("doc.metadata", "BYTE_ARRAY"),
        ("doc.value", "BYTE_ARRAY"),
    ]
    assert {part.max_definition_level for part in parts} == {1}, "only the struct is nullable"
    assert file.metadata.row_group(0).column(1).dictionary_page_offset is not None, "documents with the same keys"
    found = read_delta(sink.open(TABLE))
    assert found["doc"].to_pylist() == [*doc.to_pylist(), None]
    assert sink.current(TABLE).arrow_schema.equals(WITH_VARIANT)


def test_a_column_that_is_added_changes_the_protocol_and_fills_old_rows(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path))
    sink.create(TABLE, PLAIN)
    sink.commit(TABLE, sink.stage(TABLE, [pa.RecordBatch.from_arrays([pa.array([1, 2])], schema=PLAIN)]), Lsn(1))
    assert "variantType" not in sink.current(TABLE).features
    [value] = variants('{"d": [1.10]}')
    version = sink.evolve(TABLE, WITH_VARIANT, ["id", value], one_by_one)
    assert "variantType" in actions(sink, version)["protocol"]["readerFeatures"]
    more = WITH_VARIANT.append(pa.field("more", VARIANT))
    sink.evolve(TABLE, more, ["id", "doc", pa.scalar(None, VARIANT)], one_by_one)
    found = read_delta(sink.open(TABLE))
    assert found["doc"].to_pylist() == [value.as_py()] * 2
    assert found["more"].null_count == 2
    again = sink.evolve(TABLE, WITH_VARIANT, ["id", "doc"], one_by_one)
    assert again == sink.version(TABLE)
    assert read_delta(sink.open(TABLE))["doc"].to_pylist() == [value.as_py()] * 2
