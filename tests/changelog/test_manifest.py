"""The manifest: what is torn at its end is cut off, what is damaged before is named, what is unknown is refused."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from changelog.walsender import START, Walsender, begin_log, read
from walmere.changelog.manifest import Manifest, Summary, summarise
from walmere.changelog.manifest_file import NAME
from walmere.changelog.records import Position, Prepared
from walmere.changelog.writer import header_of
from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.lsn import Lsn


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three segments of one transaction each."""
    source = Walsender()
    writer, assembly = begin_log(tmp_path / "log")
    for number in (1, 2, 3):
        assembly.feed(source.inserts(number))
        writer.flush()
    writer.close()
    return tmp_path / "log"


def line(content: object) -> bytes:
    text = json.dumps(content).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_prefix_of_the_last_line_is_cut_off_with_its_segment(log: Path) -> None:
    path = log / NAME
    whole = contents(log)
    lines = whole[NAME].splitlines(keepends=True)
    start = len(whole[NAME]) - len(lines[-1])
    with Manifest(log) as manifest:
        *_, third = (entry for entry in manifest.entries() if not isinstance(entry, Position))
    for length in range(len(lines[-1])):
        for name, data in whole.items():
            (log / name).write_bytes(data)
        path.write_bytes(whole[NAME][: start + length])
        assert read(log) == [["1"], ["2"]], "a reader sees what is whole"
        assert contents(log)[NAME] == whole[NAME][: start + length], "and changes nothing"
        writer, assembly = begin_log(log, START)
        assert writer.durable < third.end_lsn  # type: ignore[union-attr]
        if length % 50 == 0:
            source = Walsender()
            for number in (1, 2, 3):
                assembly.feed(source.inserts(number))
            writer.flush()
            assert read(log) == [["1"], ["2"], ["3"]]
        else:
            assert path.read_bytes() == whole[NAME][:start]
            assert set(contents(log)) == set(whole) - {third.segments[0].file}  # type: ignore[union-attr]
        writer.close()


def test_a_torn_end_that_was_confirmed_is_an_error_and_nothing_is_touched(log: Path) -> None:
    with Manifest(log) as manifest:
        end = summarise(manifest).end_lsn
    path = log / NAME
    path.write_bytes(path.read_bytes()[:-5])
    before = contents(log)
    with pytest.raises(ChangeLogDamaged, match=f"manifest.jsonl.* damaged after .* confirmed to {end}"):
        begin_log(log, end)
    assert contents(log) == before


def test_a_flipped_bit_before_the_last_line_is_named_and_nothing_is_touched(log: Path) -> None:
    path = log / NAME
    good = path.read_bytes()
    last = good[:-1].rindex(b"\n") + 1
    for at in range(0, last - 1, 11):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 7]) + good[at + 1 :])
        before = contents(log)
        with pytest.raises(ChangeLogDamaged, match=r"manifest\.jsonl.*fails its checksum"):
            begin_log(log)
        with pytest.raises(ChangeLogDamaged):
            read(log)
        assert contents(log) == before


def test_a_flipped_bit_of_the_last_line_is_as_if_it_were_torn(log: Path) -> None:
    path = log / NAME
    good = path.read_bytes()
    path.write_bytes(good[:-10] + bytes([good[-10] ^ 4]) + good[-9:])
    assert read(log) == [["1"], ["2"]]
    writer, _ = begin_log(log)
    writer.close()
    assert read(log) == [["1"], ["2"]]


@pytest.mark.parametrize("content", [b"", b"0", b"00000000 {}", b"\n", b"\0" * 4096], ids=len)
def test_a_manifest_without_a_first_line_is_damaged(log: Path, content: bytes) -> None:
    (log / NAME).write_bytes(content)
    with pytest.raises(ChangeLogDamaged, match="first line"):
        read(log)
    with pytest.raises(ChangeLogDamaged):
        header_of(log)


def test_a_file_that_is_no_manifest_is_not_taken_for_one(log: Path) -> None:
    (log / NAME).write_bytes(line({"format": "shopping list", "version": 1}))
    with pytest.raises(ChangeLogDamaged, match="not the manifest"):
        read(log)


def test_another_version_is_refused_by_reader_and_writer(log: Path) -> None:
    path = log / NAME
    first, _, rest = path.read_bytes().partition(b"\n")
    header = json.loads(first[9:])
    path.write_bytes(line({**header, "version": 2}) + rest)
    before = contents(log)
    with pytest.raises(ChangeLogVersion, match="version 2, this version of Walmere reads format version 1"):
        read(log)
    with pytest.raises(ChangeLogVersion):
        begin_log(log)
    with pytest.raises(ChangeLogVersion):
        header_of(log)
    assert contents(log) == before


def test_an_unknown_kind_of_entry_is_of_a_newer_version(log: Path) -> None:
    with (log / NAME).open("ab") as file:
        file.write(line({"snapshot": {"end_lsn": "0/1", "last_sequence": 1}}))
    with pytest.raises(ChangeLogVersion, match="'snapshot'"):
        read(log)


def test_segments_without_a_manifest_are_not_mistaken_for_a_new_log(log: Path) -> None:
    (log / NAME).unlink()
    before = contents(log)
    with pytest.raises(ChangeLogDamaged, match="there are segments, but no manifest"):
        header_of(log)
    assert contents(log) == before


def test_there_is_no_header_where_there_is_no_log(tmp_path: Path) -> None:
    assert header_of(tmp_path) is None
    assert header_of(tmp_path / "nowhere") is None


def test_a_prepared_transaction_older_than_the_log_does_not_turn_the_sequence_back(log: Path) -> None:
    with Manifest(log) as manifest:
        summary = Summary(manifest.header, Lsn(0x9000), last_sequence=500)
    summary.add(Prepared("g", 1, Lsn(0x2000), 10, ()))
    assert (summary.end_lsn, summary.last_sequence) == (Lsn(0x9000), 500)
