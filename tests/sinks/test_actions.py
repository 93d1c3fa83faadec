"""The actions of commits follow Delta's protocol, also on tables and files of other programs; switching vectors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sinks.histories import Change
from sinks.text_table import SCHEMA, TABLE, begin, content, delete, do, insert, rows, update
from walmere.errors import LakeError, SinkMismatch
from walmere.sinks.delta.files.vectors import Vector
from walmere.sinks.delta.log import actions, replay
from walmere.sinks.delta.log.snapshot import Pinned
from walmere.sinks.delta.sink import DeltaSink

WITH_TIME = SCHEMA.append(pa.field("at", pa.timestamp("us")))


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def commit_by_hand(sink: DeltaSink, *lines: dict[str, Any]) -> None:
    """A commit as another program makes it."""
    version = sink.version(TABLE) + 1
    path = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json")
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("stats", [None, "", "{}", '{"numRecords":null}', '{ "minValues": {"id": 1} }'])
def test_rows_of_a_file_without_statistics_are_marked_with_the_number_of_its_rows(
    sink: DeltaSink, stats: str | None
) -> None:
    begin(sink, rows(1))
    [file] = sink.stage(TABLE, rows(2, 3, 4).to_batches())
    add = {"path": file.path, "size": file.size, "partitionValues": {}, "modificationTime": 1, "dataChange": True}
    commit_by_hand(sink, {"add": add if stats is None else {**add, "stats": stats}})
    do(sink, delete(3), update(1))
    assert json.loads(sink.current(TABLE).adds[file.path]["stats"]) == {"numRecords": 3, "tightBounds": False}
    assert content(sink) == [(1, "new"), (2, "x"), (4, "x")]
    assert (sink.count(TABLE), len(sink.current(TABLE).files)) == (3, 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"numRecords":3}', '{"numRecords":3,"tightBounds":false}'),
        ('{"numRecords":3,"tightBounds":true}', '{"numRecords":3,"tightBounds":false}'),
        ('{"tightBounds" : true , "numRecords":3} ', '{"tightBounds" : false , "numRecords":3} '),
        ('{"numRecords":3,"tightBounds":false}', '{"numRecords":3,"tightBounds":false}'),
        (
            '{"numRecords":3,"minValues":{"a":123456789012345678901.10}}\n',
            '{"numRecords":3,"minValues":{"a":123456789012345678901.10},"tightBounds":false}',
        ),
        (
            '{"numRecords":3,"minValues":{"a":"\\"tightBounds\\":true,"}}',
            '{"numRecords":3,"minValues":{"a":"\\"tightBounds\\":true,"},"tightBounds":false}',
        ),
    ],
)
def test_the_statistics_of_a_marked_file_keep_their_text(before: str, after: str) -> None:
    vector = Vector("i", "", 0, 0)
    action = actions.mark({"path": "f", "stats": before}, vector, 3, data_change=True)
    assert action["add"]["stats"] == after


def test_a_marked_file_is_removed_with_its_old_vector_and_added_with_the_new_one(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2, 3))
    do(sink, delete(1))
    [first] = sink.current(TABLE).adds.values()
    version = do(sink, delete(2))
    log = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json").read_text().splitlines()
    [removed] = [action["remove"] for action in map(json.loads, log) if "remove" in action]
    [added] = [action["add"] for action in map(json.loads, log) if "add" in action]
    assert (removed["path"], removed["deletionVector"]) == (first["path"], first["deletionVector"])
    assert (added["path"], added["deletionVector"]["cardinality"]) == (first["path"], 2)
    assert {key: added[key] for key in ("size", "partitionValues", "modificationTime")} == {
        key: first[key] for key in ("size", "partitionValues", "modificationTime")
    }


PROTOCOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"minReaderVersion": 1, "minWriterVersion": 1},
        {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]},
    ),
    (
        {"minReaderVersion": 1, "minWriterVersion": 2},
        {"readerFeatures": ["deletionVectors"], "writerFeatures": ["appendOnly", "deletionVectors", "invariants"]},
    ),
    (
        {"minReaderVersion": 1, "minWriterVersion": 3},
        {
            "readerFeatures": ["deletionVectors"],
            "writerFeatures": ["appendOnly", "checkConstraints", "deletionVectors", "invariants"],
        },
    ),
    (
        {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly"]},
        {"readerFeatures": ["deletionVectors"], "writerFeatures": ["appendOnly", "deletionVectors"]},
    ),
    (
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {
            "readerFeatures": ["columnMapping", "deletionVectors"],
            "writerFeatures": [
                "appendOnly",
                "changeDataFeed",
                "checkConstraints",
                "columnMapping",
                "deletionVectors",
                "generatedColumns",
                "invariants",
            ],
        },
    ),
    (
        {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": ["timestampNtz"],
            "writerFeatures": ["timestampNtz", "domainMetadata"],
        },
        {
            "readerFeatures": ["deletionVectors", "timestampNtz"],
            "writerFeatures": ["deletionVectors", "domainMetadata", "timestampNtz"],
        },
    ),
]


@pytest.mark.parametrize(("before", "after"), PROTOCOLS)
def test_a_table_of_any_protocol_gets_vectors_and_keeps_its_features(
    sink: DeltaSink, before: dict[str, Any], after: dict[str, Any]
) -> None:
    begin(replace(sink, deletion_vectors=False), rows(1, 2, 3))
    commit_by_hand(sink, {"protocol": before})
    do(sink, insert(4))
    assert dict(sink.current(TABLE).protocol) == before, "not before it is needed"
    do(sink, delete(2))
    assert dict(sink.current(TABLE).protocol) == {"minReaderVersion": 3, "minWriterVersion": 7, **after}
    assert sink.current(TABLE).properties[actions.VECTORS_PROPERTY] == "true"
    replay._kept.clear()
    if before["minReaderVersion"] != 2:  # deltalake cannot open it, with or without vectors
        assert content(sink) == [(1, "x"), (3, "x"), (4, "x")]


@pytest.mark.parametrize(
    "feature", ["rowTracking", "inCommitTimestamp", "icebergCompatV2", "v2Checkpoint", "catalogManaged", "unheardOf"]
)
def test_a_table_with_a_feature_that_is_not_written_is_refused_by_its_name(sink: DeltaSink, feature: str) -> None:
    begin(sink, rows(1))
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", feature]}
    commit_by_hand(sink, {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}})
    before = sink.version(TABLE)
    with pytest.raises(SinkMismatch, match=f"table feature {feature}"):
        do(sink, insert(2))
    assert sink.version(TABLE) == before


def test_a_table_whose_columns_are_mapped_is_refused(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    properties = {**metadata["configuration"], "delta.columnMapping.mode": "name"}
    commit_by_hand(sink, {"metaData": {**metadata, "configuration": properties}})
    with pytest.raises(SinkMismatch, match="table feature columnMapping"):
        do(sink, insert(2))


@pytest.mark.parametrize(
    ("properties", "protocol", "why"),
    [
        ({"delta.columnMapping.mode": "name"}, {"minReaderVersion": 2, "minWriterVersion": 5}, "columnMapping"),
        ({}, {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["unheardOf"]}, "unheardOf"),
        ({}, {"minReaderVersion": 4, "minWriterVersion": 7}, "reader version 4"),
    ],
)
def test_a_table_that_cannot_be_read_right_is_refused_by_readers(
    sink: DeltaSink, properties: dict[str, str], protocol: dict[str, Any], why: str
) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    configuration = {**metadata["configuration"], **properties}
    commit_by_hand(sink, {"metaData": {**metadata, "configuration": configuration}}, {"protocol": protocol})
    version = sink.version(TABLE)
    with pytest.raises(SinkMismatch, match=why):
        sink.scan(TABLE, version)
    with pytest.raises(LakeError, match=why):
        Pinned(sink, TABLE, version)
    assert sink.scan(TABLE, version - 1).rows == 1


@pytest.mark.parametrize("name", ["delta.appendOnly", "delta.constraints.positive"])
def test_a_table_with_a_rule_that_rows_may_violate_is_refused(sink: DeltaSink, name: str) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    value = "true" if name == "delta.appendOnly" else "id > 0"
    commit_by_hand(sink, {"metaData": {**metadata, "configuration": {**metadata["configuration"], name: value}}})
    before = sink.version(TABLE)
    with pytest.raises(SinkMismatch, match=name):
        do(sink, update(1))
    assert sink.version(TABLE) == before


@pytest.mark.parametrize("name", ["delta.invariants", "delta.generationExpression"])
def test_a_table_with_a_rule_of_a_column_is_refused(sink: DeltaSink, name: str) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    schema = json.loads(metadata["schemaString"])
    schema["fields"][1]["metadata"][name] = "text <> ''"
    commit_by_hand(sink, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})
    before = sink.version(TABLE)
    with pytest.raises(SinkMismatch, match=name):
        do(sink, update(1))
    assert sink.version(TABLE) == before


def test_a_table_with_a_column_that_another_program_has_set_not_null_is_refused(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    schema = json.loads(metadata["schemaString"])
    schema["fields"][1]["nullable"] = False
    commit_by_hand(sink, {"metaData": {**metadata, "schemaString": json.dumps(schema)}})
    with pytest.raises(SinkMismatch, match="NOT NULL"):
        do(sink, Change("U", (1, None)))


def test_an_append_only_property_that_is_false_does_not_matter(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    metadata = dict(sink.current(TABLE).metadata)
    configuration = {**metadata["configuration"], "delta.appendOnly": "false"}
    commit_by_hand(sink, {"metaData": {**metadata, "configuration": configuration}})
    do(sink, update(1))
    assert content(sink) == [(1, "new")]
