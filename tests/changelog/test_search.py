"""Records of a manifest are found by LSN, however long it is, as reading all of it would find them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from walmere.changelog import manifest, manifest_file
from walmere.changelog.manifest import Entry, Manifest, render, summarise
from walmere.changelog.records import Header, Position, Prepared, Transaction, Transactions
from walmere.changelog.search import ManifestSearch
from walmere.changelog.segment_entry import Block, Segment
from walmere.errors import ChangeLogDamaged
from walmere.lsn import Lsn
from walmere.pgoutput.messages import Relation, ReplicaIdentity
from walmere.pgoutput.relation import RelationVersion

HEADER = Header("1", "db", "slot", Lsn(1000))
# name public.t, replica identity default, no columns
RELATION = b"R" + (16400).to_bytes(4) + b"public\0t\0d\0\0"


def segment(number: int, *relations: int) -> Segment:
    blocks = tuple(Block(oid, 1, 5, 1, 5, 8, 100, 0, inserts=True) for oid in (0, *relations))
    return Segment(f"{number:020}.arrow", 1000, streamed=False, blocks=blocks)


def transactions(end: int, *relations: int) -> Transactions:
    return Transactions(segment(end, *relations), 3, Lsn(end - 8), Lsn(end), 1_000_000 + end, end)


def entries(seed: int) -> Iterator[Entry]:
    """A manifest as retention may have left it: a prepared transaction in front, definitions in between."""
    choose = random.Random(seed)
    relation = Relation(16400, "public", "t", ReplicaIdentity.DEFAULT, ())
    yield Prepared("g", 5, Lsn(500), 1, (segment(1, 7),))
    end = 1000
    for number in range(200):
        end += choose.randrange(1, 100)
        match choose.randrange(5):
            case 0:
                yield RelationVersion(16400, number, Lsn(end), relation, RELATION, ())
            case 1:
                yield Position(Lsn(end), end)
            case 2:
                aborted = frozenset({7, 8, 9})  # which must not be taken for relations
                segments = (segment(end, choose.randrange(20, 25)), segment(end, choose.randrange(20, 25)))
                yield Transaction(3, Lsn(end - 8), Lsn(end), 1_000_000 + end, end, segments, aborted)
            case _:
                yield transactions(end, *choose.sample(range(20, 25), choose.randrange(3)))


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_reading_all_finds(tmp_path: Path, seed: int) -> None:
    manifest.create(tmp_path, HEADER, entries(seed))
    with Manifest(tmp_path) as whole:
        records = [each for each in whole.entries() if isinstance(each, Transactions | Transaction)]
    with Manifest(tmp_path) as whole:
        summary = summarise(whole)
    with ManifestSearch(tmp_path) as search:
        assert search.end_lsn == summary.end_lsn
        assert search.last_commit_time == summary.commit_time
        for lsn in [0, 999, 1000, *range(1001, int(summary.end_lsn) + 2, 17)]:
            for wanted in ({20}, {21, 24}, {19}):
                expected = [
                    each
                    for each in records
                    if each.end_lsn > lsn and wanted & {b.relation for s in each.segments for b in s.blocks}
                ]
                assert list(search.records_after(Lsn(lsn), wanted)) == expected
        assert list(search.records_after(Lsn(0), set())) == []


def test_an_empty_log_ends_where_it_begins(tmp_path: Path) -> None:
    manifest.create(tmp_path, HEADER)
    with ManifestSearch(tmp_path) as search:
        assert (search.end_lsn, search.last_commit_time) == (HEADER.start_lsn, None)
        assert list(search.records_after(Lsn(0), {20})) == []


def test_a_torn_end_is_no_record_and_a_wrong_line_before_it_is_damage(tmp_path: Path) -> None:
    last = transactions(3000, 20)
    manifest.create(tmp_path, HEADER, [transactions(2000, 20)])
    path = tmp_path / manifest_file.NAME
    whole = path.read_bytes()
    for torn in (render(last)[:-1], render(last)[:20], render(last).replace(b"00", b"01", 1)):
        path.write_bytes(whole + torn)
        with ManifestSearch(tmp_path) as search:
            assert search.end_lsn == Lsn(2000)
            assert [each.end_lsn for each in search.records_after(Lsn(0), {20})] == [2000]
    path.write_bytes(whole.replace(b'"count":3', b'"count":4') + render(last))
    with ManifestSearch(tmp_path) as search, pytest.raises(ChangeLogDamaged, match="fails its checksum"):
        list(search.records_after(Lsn(0), {20}))


def test_a_long_manifest_is_searched_in_no_time(tmp_path: Path) -> None:
    """A table that has nothing to wait for is looked for in all of the lag; any other is found at once."""
    manifest.create(tmp_path, HEADER)
    line = render(transactions(0x1000_0000, 20, 21, 22, 23))
    with (tmp_path / manifest_file.NAME).open("ab") as file:
        # only lines that are looked at have to have their checksum
        file.writelines(line.replace(b"10000000", b"%08X" % (0x1000_0000 + each)) for each in range(200_000))
        file.write(render(transactions(0x2000_0000, 24)))
    with ManifestSearch(tmp_path) as search:
        began = time.monotonic()
        assert search.end_lsn == 0x2000_0000
        [found] = search.records_after(Lsn(0x1000_0000 + 190_000), {24})
        short = time.monotonic() - began
        assert found.end_lsn == 0x2000_0000
        began = time.monotonic()
        assert len(list(search.records_after(Lsn(0), {24}))) == 1
        assert short < (time.monotonic() - began) / 3, "its cost is that of the lag, here a twentieth"
