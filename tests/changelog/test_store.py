"""The log in a store: nothing is durable before it is there, and another machine has all of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from changelog.crashing import TRUTH, stream
from changelog.stored import begin_stored_log, elsewhere, numbers, open_cache
from changelog.walsender import START, Walsender, assert_sound, begin_log, insert, read, relation
from processes import eventually
from s3_proxy import Asked, S3Proxy, lose_every, refuse_every, slow
from walmere.changelog import retention
from walmere.changelog.store.cache import Cache
from walmere.changelog.store.claim import WINDOW
from walmere.changelog.store.importing import import_log
from walmere.errors import ChangeLogError
from walmere.object_store import ObjectStore

# Durable


def test_nothing_is_durable_or_visible_before_it_is_in_the_store(
    store: ObjectStore, proxy: S3Proxy, tmp_path: Path
) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    let, asked = threading.Event(), threading.Event()

    def hold(request: Asked) -> None:
        if request.method == "PUT":
            asked.set()
            assert let.wait(30)

    proxy.rule = hold
    assembly.feed(source.inserts(1))
    writer.cut()
    assert asked.wait(30)
    assert (writer.durable, writer.settled, read(tmp_path / "a")) == (START, False, [])
    let.set()
    writer.flush()
    assert (writer.durable, writer.settled) == (source.lsn, True)
    assert read(tmp_path / "a") == elsewhere(store, tmp_path / "b") == [["1"]]
    writer.close()


def test_objects_are_acknowledged_in_order(store: ObjectStore, proxy: S3Proxy, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    first = numbers(store)[-1] + 1
    let, put = threading.Event(), threading.Semaphore(0)

    def hold_first(request: Asked) -> None:
        if request.method == "PUT" and request.path.endswith(f"/log/{first:020d}"):
            assert let.wait(30)
        elif request.method == "PUT":
            put.release()

    proxy.rule = hold_first
    for number in range(WINDOW):
        assembly.feed(source.inserts(number))
        writer.cut()
        if number:
            assert put.acquire(timeout=30)
    eventually(lambda: numbers(store)[-1] == first + WINDOW - 1)
    assert (writer.durable, read(tmp_path / "a")) == (START, [])
    let.set()
    writer.flush()
    assert writer.durable == source.lsn
    assert elsewhere(store, tmp_path / "b") == [["0"], ["1"], ["2"]]
    writer.close()


def test_a_store_that_stops_answering_makes_the_receiver_pause(
    store: ObjectStore, proxy: S3Proxy, tmp_path: Path
) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    let = threading.Event()

    def hold(_: Asked) -> None:
        assert let.wait(60)

    proxy.rule = hold
    fed = 0

    def busy() -> bool:
        nonlocal fed
        assembly.feed(source.inserts(fed))
        writer.cut()
        fed += 1
        return writer.busy

    eventually(busy)
    assert writer.durable == START
    let.set()
    writer.flush()
    eventually(lambda: not writer.busy)
    assert elsewhere(store, tmp_path / "b") == [[str(number)] for number in range(fed)]
    writer.close()


@pytest.mark.parametrize("rule", [slow(0.05), refuse_every(10), lose_every(5)], ids=["slow", "refused", "lost"])
def test_nothing_is_lost_or_doubled_by_a_bad_store(
    store: ObjectStore, proxy: S3Proxy, tmp_path: Path, rule: object
) -> None:
    proxy.rule = rule  # type: ignore[assignment]
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a", seconds=0.001)
    for number in range(40):
        assembly.feed(source.inserts(number))
        writer.cut()
    writer.flush()
    assert writer.durable == source.lsn
    retention.submit(writer, None, -1)
    writer.flush()
    assembly.feed(source.inserts(40))
    writer.flush()
    writer.close()
    assert elsewhere(store, tmp_path / "b") == [["40"]]
    assert read(tmp_path / "a") == [["40"]]
    assert_sound(tmp_path / "a")


# Another machine


def test_another_machine_has_all_kinds_of_transactions(store: ObjectStore, tmp_path: Path) -> None:
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    for frames in stream():
        assembly.feed(frames)
        writer.flush()
    writer.close()
    assert read(tmp_path / "a") == elsewhere(store, tmp_path / "b") == TRUTH
    for place in ("a", "b"):
        assert_sound(tmp_path / place)


@pytest.mark.parametrize("step", range(1, 8))
def test_another_machine_goes_on_between_any_two_messages(store: ObjectStore, tmp_path: Path, step: int) -> None:
    """Also with a transaction that is prepared: its segments are in objects of the machine before."""
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    pieces = stream()
    for frames in pieces[:step]:
        assembly.feed(frames)
        writer.flush()
    writer.close()
    writer, assembly = begin_stored_log(store, tmp_path / "b")
    for frames in pieces:  # PostgreSQL sends again what was not confirmed; here, all of it
        assembly.feed(frames)
        writer.flush()
    writer.close()
    assert read(tmp_path / "b") == elsewhere(store, tmp_path / "c") == TRUTH


def test_a_transaction_that_is_prepared_and_rolled_back_in_one_upload(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a", seconds=60)
    assembly.feed(source.prepared(b"p", relation(), insert(1)))
    assembly.feed(source.rollback_prepared(b"p"))
    assembly.feed(source.inserts(2))
    assembly.feed(source.prepared(b"p", insert(3)))
    writer.flush()
    assembly.feed(source.rollback_prepared(b"p"))
    assembly.feed(source.prepared(b"p", insert(4)))
    assembly.feed(source.commit_prepared(b"p"))
    writer.flush()
    retention.submit(writer, source.lsn, -1)
    writer.flush()
    assert numbers(store) == [], "no object is kept for what was rolled back"
    assembly.feed(source.inserts(5))
    writer.flush()
    writer.close()
    assert read(tmp_path / "a") == elsewhere(store, tmp_path / "b") == [["5"]]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_all_kinds_of_transactions_in_one_upload(store: ObjectStore, tmp_path: Path, seconds: float) -> None:
    writer, assembly = begin_stored_log(store, tmp_path / "a", seconds=seconds)
    for frames in stream():
        assembly.feed(frames)
    writer.flush()
    writer.close()
    assert read(tmp_path / "a") == elsewhere(store, tmp_path / "b") == TRUTH


def test_a_large_transaction_is_put_while_it_is_in_progress(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.changelog.assembly.SPOOL_BYTES", 1)
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a", segment_bytes=1 << 10)
    before = len(numbers(store))
    frames = source.transaction(relation(), *(insert(number) for number in range(2000)))
    rest: list[memoryview] = []
    for at in range(0, len(frames), 100):
        rest = assembly.feed([*rest, *frames[at : at + 100]])
    eventually(lambda: writer.settled)
    writer.flush()
    assert len(numbers(store)) > before + 3
    assert elsewhere(store, tmp_path / "b") == [[str(number) for number in range(2000)]]
    writer.close()


def test_a_cache_is_used_and_repaired(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    for number in range(3):
        assembly.feed(source.inserts(number))
        writer.flush()
    writer.close()
    first, second, third = sorted((tmp_path / "a").glob("*.arrow"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    damaged = bytearray(third.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    third.write_bytes(damaged)
    stray = tmp_path / "a" / "00000000000000009999.arrow"
    stray.write_bytes(b"never put")
    assert read(tmp_path / "a") == [["0"], ["1"], ["2"]]
    open_cache(store, tmp_path / "a")
    assert not stray.exists()
    (tmp_path / "a" / "manifest.jsonl").write_bytes(b"torn")
    open_cache(store, tmp_path / "a")
    assert read(tmp_path / "a") == [["0"], ["1"], ["2"]]


def test_a_small_cache_keeps_the_newest_segments(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    for start in range(2):
        writer, assembly = begin_stored_log(store, tmp_path / "a", cache_bytes=4000)
        for number in range(5 * start, 5 * start + 5):
            assembly.feed(source.inserts(number))
            writer.flush()
        writer.close()
        sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.arrow")]
        assert 0 < sum(sizes) <= 4000
    assert read(tmp_path / "a") == [[str(number)] for number in range(10)]


def test_a_local_log_is_moved_to_the_store(store: ObjectStore, tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path / "a")
    pieces = stream()
    for frames in pieces[:5]:  # the last of these is prepared
        assembly.feed(frames)
        writer.flush()
    writer.close()
    assert not Cache(store, tmp_path / "a").fill()
    assert import_log(store, "shop", tmp_path / "a", max_bytes=1)
    files = sorted((tmp_path / "a").glob("*.arrow"))
    assert elsewhere(store, tmp_path / "b") == TRUTH[:3]
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    assert sorted((tmp_path / "a").glob("*.arrow")) == files
    for frames in pieces:
        assembly.feed(frames)
        writer.flush()
    writer.close()
    assert elsewhere(store, tmp_path / "c") == TRUTH


def test_a_rolled_back_transaction_is_not_missed_when_a_log_is_moved(store: ObjectStore, tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path / "a")
    for frames in stream():
        assembly.feed(frames)
        writer.flush()
    writer.close()
    assert import_log(store, "shop", tmp_path / "a", max_bytes=1 << 20)
    assert elsewhere(store, tmp_path / "b") == TRUTH


def test_a_local_log_that_is_not_in_the_store_is_not_replaced(store: ObjectStore, tmp_path: Path) -> None:
    writer, assembly = begin_log(tmp_path / "a")
    assembly.feed(Walsender().inserts(1))
    writer.flush()
    writer.close()
    open_cache(store, tmp_path / "b")
    with pytest.raises(ChangeLogError, match="received without a store"):
        open_cache(store, tmp_path / "a")
    assert read(tmp_path / "a") == [["1"]]
