"""What retention deletes of a log in a store, and how damage is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from changelog.stored import begin_stored_log, elsewhere, numbers, open_cache
from changelog.walsender import T, U, Walsender, insert, read, relation
from walmere.changelog import retention
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Transactions
from walmere.changelog.store import upload
from walmere.changelog.store.claim import WINDOW
from walmere.changelog.store.log_store import LogStore, read_head
from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.lsn import Lsn
from walmere.object_store import ObjectStore

# Retention


def test_retention_deletes_objects_and_a_follower_never_sees_a_gap(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    follower = open_cache(store, tmp_path / "b")
    ends: list[Lsn] = []
    for number in range(10):
        assembly.feed(source.inserts(number, oid=U if number % 2 else T))
        writer.flush()
        ends.append(source.lsn)
    follower.follow()
    retention.submit(writer, ends[6], -1)
    writer.flush()
    left = [[str(number)] for number in range(7, 10)]
    assert numbers(store) == numbers(store)[-3:]
    assert read(tmp_path / "a") == elsewhere(store, tmp_path / "c") == left
    assert follower.refresh()
    assert read(tmp_path / "b") == left
    assembly.feed(source.inserts(10, oid=U))  # its definition was in an object that is gone
    writer.flush()
    while follower.follow():
        pass
    assert read(tmp_path / "b") == [*left, ["10"]]
    assert not follower.refresh()
    writer.close()


def test_retention_keeps_the_objects_of_prepared_transactions(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    assembly.feed(source.prepared(b"p", relation(), insert(1)))
    writer.flush()
    for number in range(2, 5):
        assembly.feed(source.inserts(number))
        writer.flush()
    retention.submit(writer, source.lsn, -1)
    writer.flush()
    assert len(numbers(store)) == 1
    writer.close()
    writer, assembly = begin_stored_log(store, tmp_path / "b")
    assembly.feed(source.commit_prepared(b"p"))
    writer.flush()
    writer.close()
    assert elsewhere(store, tmp_path / "c") == [["1"]]


def test_a_start_reads_few_objects(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MANIFEST_EVERY", 5)
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    for number in range(23):
        assembly.feed(source.inserts(number))
        writer.flush()
    writer.close()
    found = read_head(store)
    assert found is not None
    assert numbers(store)[-1] - found[0].number < 5
    assert len(list(store.list(f"{found[0].generation}/manifest"))) == 1
    assert elsewhere(store, tmp_path / "b") == [[str(number)] for number in range(23)]
    for _ in range(4):  # receivers that have nothing to put
        begin_stored_log(store, tmp_path / "a")[0].close()
    assert len(numbers(store)) < 23 + 2 * WINDOW
    assert elsewhere(store, tmp_path / "c") == [[str(number)] for number in range(23)]


def test_a_manifest_keeps_the_objects_of_a_transaction_in_progress(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MANIFEST_EVERY", 2)
    monkeypatch.setattr("walmere.changelog.assembly.SPOOL_BYTES", 1)
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a", segment_bytes=1 << 10)
    assembly.feed(source.prepared(b"p", relation(), insert(1)))
    writer.flush()
    frames = source.transaction(relation(U), *(insert(number, U) for number in range(500)))
    rest: list[memoryview] = []
    for at in range(0, len(frames), 50):  # each piece is an object without a line
        rest = assembly.feed([*rest, *frames[at : at + 50]])
    for number in range(1000, 1010):
        assembly.feed(source.inserts(number))
        writer.flush()
    assembly.feed(source.commit_prepared(b"p"))
    writer.flush()
    writer.close()
    whole = [[str(number) for number in range(500)], *([str(number)] for number in range(1000, 1010)), ["1"]]
    assert elsewhere(store, tmp_path / "b") == whole


# Damage


def test_a_damaged_object_is_named(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    assembly.feed(source.inserts(1))
    writer.flush()
    writer.close()
    found = read_head(store)
    assert found is not None
    name = LogStore(store, found[0].generation).name(numbers(store)[-1])
    whole = store.get(name)
    assert whole is not None
    with Manifest(tmp_path / "a") as log:
        [segment] = [record.segment for record in log.entries() if isinstance(record, Transactions)]
    assert segment.stored is not None
    at = segment.stored.offset + segment.blocks[-1].offset
    content = bytearray(whole[0])
    content[at + 10] ^= 1
    store.put(name, bytes(content))
    open_cache(store, tmp_path / "b")
    with pytest.raises(ChangeLogDamaged, match=f"{store.url}/{name}: the block at byte .* fails its checksum"):
        read(tmp_path / "b")
    store.put(name, bytes(content[: at + 5]))
    with pytest.raises(ChangeLogDamaged, match=f"{name}: it ends before byte"):
        read(tmp_path / "b")
    content = bytearray(whole[0])
    content[200] ^= 1  # in a line
    store.put(name, bytes(content))
    with pytest.raises(ChangeLogDamaged, match=f"{name}: .*fails its checksum"):
        open_cache(store, tmp_path / "c")
    store.delete([name])
    with pytest.raises(ChangeLogDamaged, match=f"{name}: the object is missing"):
        read(tmp_path / "b")
    store.put("head", b"{}")
    with pytest.raises(ChangeLogDamaged, match="head: it is not the head of a change log"):
        open_cache(store, tmp_path / "d")


def test_another_version_of_the_format_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    open_cache(store, tmp_path / "a")
    found = store.get("head")
    assert found is not None
    store.put("head", found[0].replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(ChangeLogVersion, match="format version 2"):
        open_cache(store, tmp_path / "b")
