"""Blocks: what is grouped, what is read back, and that no flipped bit goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from changelog.walsender import T, U, Walsender, begin_log, insert, read, relation, truncate
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Transactions
from walmere.changelog.segment import SCHEMA, Chunk, SegmentWriter, open_segment, read_block
from walmere.changelog.segment_entry import Segment
from walmere.errors import ChangeLogDamaged
from walmere.pgoutput.scan import scan


def chunk_of(frames: list[memoryview], relations: list[int], **more: tuple[tuple[int, int, int], ...]) -> Chunk:
    zeros = np.zeros(len(frames), np.uint32)
    of = np.array(relations, np.uint32)
    return Chunk(
        scan(frames), slice(0, len(frames)), 100, of, (of > 0).astype(np.uint32), zeros, None, None, None, **more
    )


def segments_of(directory: Path) -> list[Segment]:
    with Manifest(directory) as manifest:
        return [entry.segment for entry in manifest.entries() if isinstance(entry, Transactions)]


def test_messages_are_grouped_by_relation_in_their_order() -> None:
    source = Walsender()
    frames = [source.frame(insert(i, oid)) for i, oid in enumerate([T, U, T, U, T])]
    groups = {relation: list(rows) for relation, _, rows in chunk_of(frames, [T, U, T, U, T]).groups()}
    assert groups == {T: [0, 2, 4], U: [1, 3]}


def test_a_truncate_of_several_relations_stands_in_the_block_of_each_under_one_sequence_number(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    source = Walsender()
    bodies = (relation(T), relation(U), insert(1, T), truncate(T, U), insert(2, U), truncate(U), insert(3, T))
    assert assembly.feed(source.transaction(*bodies)) == []
    writer.flush()
    writer.close()
    [segment] = segments_of(tmp_path)
    kinds: dict[int, list[str]] = {}
    sequences: dict[int, list[int]] = {}
    for index, block in enumerate(segment.blocks):
        batch = read_block(tmp_path, segment, index)
        kinds[block.relation] = batch.column("kind").to_pylist()
        sequences[block.relation] = batch.column("sequence").to_pylist()
        assert (block.first_sequence, block.last_sequence) == (
            sequences[block.relation][0],
            sequences[block.relation][-1],
        )
    assert kinds == {0: ["B", "R", "R", "C"], T: ["I", "T", "I"], U: ["T", "I", "T"]}
    assert sequences[T][1] == sequences[U][0]
    assert read(tmp_path) == [["1", f"truncate [{T}, {U}]", "2", f"truncate [{U}]", "3"]]


def test_many_relations_in_one_chunk_are_as_many_blocks_and_one_order(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    oids = range(20_000, 20_300)
    bodies = [body for oid in oids for body in (relation(oid), insert(oid, oid))]
    bodies += [insert(oid + 1000, oid) for oid in reversed(oids)]
    assembly.feed(Walsender().transaction(*bodies))
    writer.flush()
    writer.close()
    [segment] = segments_of(tmp_path)
    assert {block.relation: block.rows for block in segment.blocks} == {0: 302} | dict.fromkeys(oids, 2)
    assert read(tmp_path) == [[str(oid) for oid in oids] + [str(oid + 1000) for oid in reversed(oids)]]


def test_one_relation_under_two_definitions_has_two_blocks(tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path)
    wider = relation(T, columns=(b"id", b"v"))
    assembly.feed(Walsender().transaction(relation(T), insert(1), insert(2), wider, insert(3), relation(T), insert(4)))
    writer.flush()
    writer.close()
    [segment] = segments_of(tmp_path)
    blocks = [(block.version, block.rows) for block in segment.blocks if block.relation == T]
    assert sum(rows for _, rows in blocks) == 4
    assert len({version for version, _ in blocks}) == len(blocks) >= 2
    assert read(tmp_path) == [["1", "2", "3", "4"]]


def test_a_segment_has_its_name_only_when_it_is_published(tmp_path: Path) -> None:
    source = Walsender()
    writer = SegmentWriter(tmp_path, "s.arrow")
    writer.append(chunk_of([source.frame(insert(1))], [T]))
    segment = writer.seal()
    assert [path.name for path in tmp_path.iterdir()] == ["s.arrow.tmp"]
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["s.arrow"]
    assert segment.length == (tmp_path / "s.arrow").stat().st_size
    assert segment.rows == 1
    assert pa.ipc.open_file(str(tmp_path / "s.arrow")).schema.equals(SCHEMA)


def test_a_discarded_segment_leaves_nothing(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "s.arrow")
    writer.append(chunk_of([Walsender().frame(insert(1))], [T]))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    """In a block it is an error that names the file; in the footer, which only other tools need, it changes nothing."""
    writer, assembly = begin_log(tmp_path)
    assembly.feed(Walsender().transaction(relation(), insert(1), insert(2)))
    writer.flush()
    writer.close()
    [segment] = segments_of(tmp_path)
    path = tmp_path / segment.file
    good = path.read_bytes()

    def blocks(segment: Segment) -> list[pa.RecordBatch]:
        return [read_block(tmp_path, segment, index) for index in range(len(segment.blocks))]

    expected = blocks(segment)
    covered = {at for block in segment.blocks for at in range(block.offset, block.offset + block.length)}
    assert set(range(len(covered))) == covered, "blocks follow each other from the beginning"
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        if at in covered:
            with pytest.raises(ChangeLogDamaged, match=f"{segment.file}: block [0-9]+ fails its checksum"):
                blocks(segment)
        else:
            assert blocks(segment) == expected


@pytest.mark.parametrize("length", [0, 1, -1, 100_000])
def test_a_file_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    writer, assembly = begin_log(tmp_path)
    assembly.feed(Walsender().inserts(1))
    writer.flush()
    writer.close()
    [segment] = segments_of(tmp_path)
    path = tmp_path / segment.file
    path.write_bytes(path.read_bytes().ljust(length, b"\0")[: length or None] if length else b"")
    with pytest.raises(ChangeLogDamaged, match=f"{segment.file}: it has [0-9]+ bytes instead of {segment.length}"):
        open_segment(tmp_path, segment)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChangeLogDamaged, match="the file is missing"):
        open_segment(tmp_path, Segment("00001.arrow", 1, streamed=False, blocks=()))
