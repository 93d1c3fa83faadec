"""The ledger: what a writer leaves is what readers find, whatever is torn, trimmed or written at the same time."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from object_stores import Bucket
from walmere.directory import Directory
from walmere.errors import ChangeLogDamaged, ChangeLogVersion, SinkError
from walmere.ledger import entry as points
from walmere.ledger import file as history
from walmere.ledger.entry import Entry
from walmere.ledger.file import Ledger
from walmere.ledger.lake import LakeLedger, read_latest
from walmere.lsn import Lsn

HOUR = 3_600_000_000
SECOND = 1_000_000


def entry(lsn: int, began: int | None = None, **versions: int) -> Entry:
    return Entry(Lsn(lsn), lsn * SECOND, versions, points.now() if began is None else began)


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]


def test_what_is_appended_is_found_by_others_and_by_the_next_writer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.last() is None
    assert list(ledger.entries()) == []
    written = [entry(1, a=1, b=1), entry(2, a=2, b=1), entry(3, a=2, b=1), entry(4, b=5), entry(5, a=9, b=5)]
    for each in written:
        ledger.append(each)
    for reader in (ledger, Ledger(tmp_path)):
        assert list(reader.entries()) == written
        assert reader.last() == written[-1]
    Ledger(tmp_path).append(entry(6, a=9, b=6))
    assert list(Ledger(tmp_path).entries()) == [*written, entry(6, a=9, b=6)]


def test_an_entry_has_only_what_is_new_and_the_first_one_has_all(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for each in (entry(1, a=1, b=1), entry(2, a=2, b=1), entry(3, a=2), entry(4, a=2)):
        ledger.append(each)
    header, *entries = lines(tmp_path)
    assert (header["format"], header["version"]) == ("walmere ledger", 1)
    assert [(each["versions"], each["left"]) for each in entries] == [
        ({"a": 1, "b": 1}, []),
        ({"a": 2}, []),
        ({}, ["b"]),
        ({}, []),
    ]


def test_an_entry_is_found_by_its_lsn_and_the_newest_of_several(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for each in (entry(10, a=1), entry(20, a=2), entry(20, a=2, b=1), entry(30, a=3, b=1)):
        ledger.append(each)
    assert ledger.at(Lsn(10)) == entry(10, a=1)
    assert ledger.at(Lsn(20)) == entry(20, a=2, b=1)
    assert ledger.at(Lsn(15)) is None
    assert ledger.at(Lsn(31)) is None
    assert Ledger(tmp_path / "elsewhere").at(Lsn(1)) is None


def test_a_batch_without_a_transaction_has_the_commit_time_before(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(Entry(Lsn(1), None, {}))
    ledger.append(Entry(Lsn(2), 7, {}))
    assert ledger.append(Entry(Lsn(3), None, {})).commit_time == 7
    assert [each.commit_time for each in Ledger(tmp_path).entries()] == [None, 7, 7]


@pytest.mark.parametrize("torn", [b"{", b'{"lsn":"0/3","commit', b"\0\0\0\0", b"\0\0\0\0\n", b'{"lsn": "0/3"}\n'])
def test_a_torn_line_is_none_a_reader_leaves_it_and_the_writer_mends_it(tmp_path: Path, torn: bytes) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(entry(1, a=1))
    ledger.append(entry(2, a=2))
    file = tmp_path / "ledger.jsonl"
    content = file.read_bytes() + torn
    file.write_bytes(content)
    assert Ledger(tmp_path).last() == entry(2, a=2)
    assert file.read_bytes() == content
    Ledger(tmp_path).append(entry(3, a=3))
    assert list(Ledger(tmp_path).entries()) == [entry(1, a=1), entry(2, a=2), entry(3, a=3)]


def test_a_damaged_line_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for lsn in (1, 2, 3):
        ledger.append(entry(lsn, a=lsn))
    file = tmp_path / "ledger.jsonl"
    text = file.read_text().splitlines()
    file.write_text("\n".join([*text[:2], "{", *text[3:], ""]))
    with pytest.raises(ChangeLogDamaged, match="line 3"):
        Ledger(tmp_path).last()


def test_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    file.write_text('{"format": "walmere ledger", "version": 2, "keep_seconds": 1}\n')
    with pytest.raises(ChangeLogVersion, match="format version 2"):
        Ledger(tmp_path).append(entry(1))
    file.write_text('{"lsn": "0/1", "commit_time": null, "versions": {}}\n')
    with pytest.raises(ChangeLogVersion, match="no format version"):
        Ledger(tmp_path).last()
    file.write_text("something else\n")
    with pytest.raises(ChangeLogDamaged, match="not a ledger"):
        Ledger(tmp_path).last()


def test_an_append_that_failed_half_way_is_mended_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(entry(1, a=1))

    def fills_the_disk(descriptor: int) -> None:
        with (tmp_path / "ledger.jsonl").open("r+b") as file:
            file.seek(-9, 2)
            file.truncate()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fills_the_disk)
        with pytest.raises(OSError, match="No space"):
            ledger.append(entry(2, a=2))
    ledger.append(entry(3, a=3))
    assert list(Ledger(tmp_path).entries()) == [entry(1, a=1), entry(3, a=3)]


def test_what_nobody_can_read_any_more_goes_and_the_state_before_the_oldest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "TRIM_AFTER", 10)
    ledger = Ledger(tmp_path, keep_seconds=3600)
    start = points.now() - 3 * HOUR
    sizes = []
    for number in range(200):
        began = start + number * 3 * HOUR // 200
        ledger.append(entry(number + 1, began, a=number, b=1 if number < 100 else 2))
        sizes.append(len(lines(tmp_path)))
    assert max(sizes) < 160
    kept = list(Ledger(tmp_path).entries())
    assert kept[-1] == entry(200, a=199, b=2)
    needed = [each for each in kept if each.began > points.now() - HOUR]
    assert 66 <= len(needed) <= 68
    assert len(kept) > len(needed), "the one before it was the state until it began"
    assert [each.versions["a"] for each in kept] == list(range(int(kept[0].lsn) - 1, 200))
    assert {each.versions["b"] for each in kept} == {2}
    assert lines(tmp_path)[1]["versions"] == dict(kept[0].versions)
    reopened = Ledger(tmp_path, keep_seconds=3600)
    rest = reopened.open()
    assert rest == kept[len(kept) - len(rest) :]
    assert len(rest) == len(needed) + 1


def test_the_newest_entry_stays_however_old_it_is(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep_seconds=1)
    ledger.append(entry(1, points.now() - 9 * HOUR, a=1))
    ledger.append(entry(2, points.now() - 8 * HOUR, a=2))
    assert Ledger(tmp_path, keep_seconds=1).open() == [entry(2, a=2)]


def test_a_longer_time_to_keep_brings_nothing_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep_seconds=3600)
    for hours in (4, 3, 2):
        ledger.append(entry(10 - hours, points.now() - hours * HOUR, a=hours))
    longer = Ledger(tmp_path, keep_seconds=36_000)
    assert [each.lsn for each in longer.open()] == [8], "the others' files may be gone"
    assert lines(tmp_path)[0]["keep_seconds"] == 36_000


def _write(directory: Path, count: int) -> None:
    history.TRIM_AFTER = 5  # type: ignore[misc]
    ledger = Ledger(directory, keep_seconds=0)
    for number in range(1, count + 1):
        ledger.append(entry(number, a=number, b=number // 3))


def test_a_reader_beside_a_writer_that_trims_finds_whole_entries_that_rise(tmp_path: Path) -> None:
    count = 300
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(tmp_path, count))
    writer.start()
    seen = {0}
    try:
        while writer.is_alive() or max(seen) < count:
            found = list(Ledger(tmp_path).entries())
            assert (
                [int(each.lsn) for each in found] == list(range(int(found[0].lsn), int(found[-1].lsn) + 1))
                if found
                else True
            )
            for each in found:
                assert each.versions == {"a": each.lsn, "b": each.lsn // 3}
            if found:
                assert found[-1].lsn >= max(seen)
                seen.add(int(found[-1].lsn))
                assert Ledger(tmp_path).at(found[-1].lsn) in (found[-1], None), "or trimmed meanwhile"
            assert writer.is_alive() or writer.exitcode == 0
    finally:
        writer.join()
    assert len(lines(tmp_path)) < 50


def point(lsn: int, version: int | None = None) -> Entry:
    return entry(lsn, **{"public.a": lsn if version is None else version})


def place(bucket: Bucket) -> Directory:
    return Directory(f"{bucket.url}/lake/_walmere/shop", bucket.options)


def lake(bucket: Bucket) -> LakeLedger:
    return LakeLedger(place(bucket), "shop", str, 3600.0)


def stored(bucket: Bucket) -> list[Entry]:
    return list(history.History(place(bucket)).entries())


def test_a_ledger_in_a_store_grows_in_pieces_and_reads_as_one(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walmere.ledger.lines.PIECE_BYTES", 500)
    written = [point(number) for number in range(1, 40)]
    writer = lake(bucket)
    writer.begin(written[:10])
    for each in written[10:30]:
        writer.append(each)
        assert stored(bucket)[-1] == each
        assert read_latest(place(bucket)) == each
    assert stored(bucket) == written[:30]
    assert len(place(bucket).files("")) > 5
    again = lake(bucket)
    again.begin(written[20:30])  # a restart: older points can no longer be read
    for each in written[30:]:
        again.append(each)
    assert stored(bucket) == written[20:]
    begin, end = json.loads((place(bucket).read("ledger.jsonl") or b"").splitlines()[0])["pieces"]
    assert len(place(bucket).files("")) == 2 + end - begin, "old pieces are deleted"


def test_the_points_of_a_process_that_was_thought_dead_are_refused(bucket: Bucket) -> None:
    zombie = lake(bucket)
    zombie.begin([point(1)])
    zombie.append(point(2))
    other = lake(bucket)
    other.begin([point(1), point(2), point(3)])
    for lsn in (3, 4):
        with pytest.raises(SinkError, match="another process has become the writer") as caught:
            zombie.append(point(lsn, 100))
        assert not caught.value.transient
    other.append(point(4))
    assert [each.versions["public.a"] for each in stored(bucket)] == [1, 2, 3, 4]
    latest = read_latest(place(bucket))
    assert latest is not None
    assert latest.versions == {"public.a": 4}


def test_a_reader_in_a_store_always_finds_all_points(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walmere.ledger.lines.PIECE_BYTES", 500)
    written = [point(number) for number in range(1, 30)]
    writer = lake(bucket)
    writer.begin(written)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            lake(bucket).begin(written)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(20):
            assert stored(bucket) == written
    finally:
        stop.set()
        thread.join()
