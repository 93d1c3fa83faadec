"""The log in a store: nothing is durable before it is there, it has one writer, and another machine has all of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from changelog.crashing import TRUTH, stream
from changelog.stored import begin_stored_log, open_cache
from changelog.walsender import START, T, U, Walsender, assert_sound, begin_log, insert, read, relation
from object_stores import Bucket, VersityServer, versitygw
from processes import eventually
from s3_proxy import Asked, LoseAnswer, Refuse, S3Proxy, lose_every, refuse_every, slow
from walmere.changelog import retention
from walmere.changelog.manifest import Manifest
from walmere.changelog.records import Transactions
from walmere.changelog.store import upload
from walmere.changelog.store.cache import Cache
from walmere.changelog.store.claim import WINDOW, Claim
from walmere.changelog.store.importing import import_log
from walmere.changelog.store.log_store import LogStore, read_head
from walmere.changelog.store.objects import numbers_before
from walmere.errors import ChangeLogDamaged, ChangeLogError, ChangeLogVersion, TakenOver
from walmere.lsn import Lsn
from walmere.object_store import ObjectStore, open_store


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[S3Proxy]:
    with S3Proxy(bucket) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: S3Proxy) -> ObjectStore:
    return open_store(f"{proxy.bucket.url}/log", proxy.bucket.options)


def elsewhere(store: ObjectStore, directory: Path) -> list[list[str]]:
    """The transactions of the log, as a machine with an empty directory reads them."""
    open_cache(store, directory)
    assert not list(directory.glob("*.arrow"))
    return read(directory)


def numbers(store: ObjectStore) -> list[int]:
    """The numbers of the objects of the log."""
    found = read_head(store)
    assert found is not None
    return numbers_before(LogStore(store, found[0].generation), 1 << 60)


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


# One writer


def test_a_writer_that_was_only_believed_to_be_dead_changes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    source = Walsender()
    zombie, zombie_assembly = begin_stored_log(store, tmp_path / "zombie")
    zombie_assembly.feed(source.inserts(1))
    zombie.flush()
    writer, assembly = begin_stored_log(store, tmp_path / "a")
    later = Walsender(source.lsn)
    zombie_assembly.feed(later.inserts(2))
    with pytest.raises(TakenOver, match="another receiver has taken over: "):
        zombie.flush()
    assert zombie.durable == source.lsn
    retention.submit(zombie, None, -1)
    zombie.close()
    assembly.feed(source.inserts(3))
    writer.flush()
    assert elsewhere(store, tmp_path / "b") == [["1"], ["3"]]
    assert read(tmp_path / "zombie") == [["1"]]
    writer.close()


def test_what_the_writer_before_has_put_last_is_adopted(store: ObjectStore, tmp_path: Path) -> None:
    """Its answer may be on its way, so its writer may have confirmed it."""
    source = Walsender()
    before, before_assembly = begin_stored_log(store, tmp_path / "a")
    cache = open_cache(store, tmp_path / "b")
    claim = Claim(store, cache.head.generation)
    before_assembly.feed(source.inserts(1))
    before.flush()
    assert before.durable == source.lsn
    uploader = upload.Uploader(cache, claim, seconds=1, max_bytes=1)
    assert uploader.durable == source.lsn
    uploader.close()
    before.close()
    assert read(tmp_path / "b") == [["1"]]


def test_retention_of_the_writer_before_during_a_take_over_loses_nothing(store: ObjectStore, tmp_path: Path) -> None:
    """It deletes objects that the next writer has not read yet. Then their numbers are free, and must not be used."""
    source = Walsender()
    before, before_assembly = begin_stored_log(store, tmp_path / "a")
    cache = open_cache(store, tmp_path / "b")
    for number in range(1, 4):
        before_assembly.feed(source.inserts(number))
        before.flush()
    retention.submit(before, source.lsn, -1)
    before.flush()
    before_assembly.feed(source.inserts(4))
    before.flush()
    uploader = upload.Uploader(cache, Claim(store, cache.head.generation), seconds=1, max_bytes=1)
    assert uploader.durable == before.durable == source.lsn
    uploader.close()
    before.close()
    assert read(tmp_path / "b") == elsewhere(store, tmp_path / "c") == [["4"]]


def test_a_put_that_overtakes_the_fence_is_void(store: ObjectStore, proxy: S3Proxy, tmp_path: Path) -> None:
    """Of three puts under way, the first is late, and meets the fence; the others were there before it."""
    source = Walsender()
    zombie, zombie_assembly = begin_stored_log(store, tmp_path / "zombie")
    first = numbers(store)[-1] + 1
    let = threading.Event()

    def hold_first(request: Asked) -> None:
        if request.method == "PUT" and request.path.endswith(f"/log/{first:020d}") and not let.is_set():
            assert let.wait(30)

    proxy.rule = hold_first
    for number in range(WINDOW):
        zombie_assembly.feed(source.inserts(number))
        zombie.cut()
    eventually(lambda: numbers(store)[-1] == first + WINDOW - 1)
    assert first not in numbers(store)
    direct = open_store(store.url, {**store.options, "endpoint": proxy.origin})
    writer, assembly = begin_stored_log(direct, tmp_path / "a")
    let.set()
    with pytest.raises(TakenOver):
        zombie.flush()
    assert zombie.durable == START
    zombie.close()
    again = Walsender()
    for number in range(WINDOW):  # PostgreSQL sends them again
        assembly.feed(again.inserts(number))
        writer.flush()
    writer.close()
    assert elsewhere(direct, tmp_path / "b") == read(tmp_path / "a") == [["0"], ["1"], ["2"]]


def race(store: ObjectStore, directory: Path, turns: int) -> None:
    """Two writers take over and write, again and again; each confirms what it is told is durable."""
    confirmed = START
    confirming = threading.Lock()
    expected = [[str(number)] for number in range(turns)]
    won: list[str] = []
    open_cache(store, directory / "first")
    for turn in range(turns):
        shutil.rmtree(directory / "reader", ignore_errors=True)
        barrier = threading.Barrier(2)

        def write(name: str, turn: int = turn, barrier: threading.Barrier = barrier) -> None:
            nonlocal confirmed
            barrier.wait()
            try:
                writer, assembly = begin_stored_log(store, directory / name, seconds=0.001)
            except TakenOver:
                return
            try:
                source = Walsender()
                for number in range(turn + 1):
                    assembly.feed(source.inserts(number))
                writer.flush()
                with confirming:
                    assert writer.durable == source.lsn
                    confirmed = max(confirmed, writer.durable)
                    won.append(name)
            except TakenOver:
                pass
            finally:
                writer.close()

        threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert won, "one of them was not fenced off"
        won.clear()
        assert elsewhere(store, directory / "reader") == expected[: turn + 1]


def test_of_two_racing_writers_one_wins(store: ObjectStore, tmp_path: Path) -> None:
    race(store, tmp_path, 4)


@pytest.fixture
def frequent_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads all objects since the last manifest: without this, turns take longer and longer."""
    monkeypatch.setattr(upload, "MANIFEST_EVERY", 20)


@pytest.mark.long
@pytest.mark.usefixtures("frequent_manifests")
def test_of_two_racing_writers_one_wins_a_hundred_times(bucket: Bucket, tmp_path: Path) -> None:
    race(open_store(f"{bucket.url}/log", bucket.options), tmp_path, 100)


@pytest.mark.long
@pytest.mark.usefixtures("frequent_manifests")
def test_of_two_racing_writers_one_wins_a_hundred_times_on_another_server(tmp_path: Path) -> None:
    """versitygw serves requests at the same time, where moto serves one after the other."""
    if (program := versitygw()) is None:
        pytest.skip("no versitygw here: scripts/versitygw gets it")
    server = VersityServer(program)
    try:
        its = server.bucket()
        race(open_store(f"{its.url}/log", its.options), tmp_path, 100)
    finally:
        server.stop()


# A crash at every request


def crash_at(proxy: S3Proxy, step: int, *, lost: bool) -> threading.Event:
    """From the given request on that changes something, nothing gets through; `lost`: that one does, unheard."""
    dead = threading.Event()
    count = iter(range(1, 1 << 30))
    counting = threading.Lock()

    def rule(asked: Asked) -> None:
        with counting:
            if dead.is_set():
                raise Refuse
            if not asked.changes:
                return
            if next(count) < step:
                return
            dead.set()
        if lost:
            raise LoseAnswer
        raise Refuse

    proxy.rule = rule
    return dead


def write_all(store: ObjectStore, directory: Path, durable: list[Lsn]) -> None:
    """Write all of the stream, and let retention remove it; says what is durable, as it goes."""
    try:
        writer, assembly = begin_stored_log(store, directory)
    except TakenOver:
        return  # it is a zombie before it has begun
    try:
        for frames in stream():
            assembly.feed(frames)
            writer.flush()
            durable.append(writer.durable)
        retention.submit(writer, None, -1)
        writer.flush()
    except ChangeLogError:
        pass  # it is a zombie
    finally:
        writer.close()


def crash_and_go_on(proxy: S3Proxy, directory: Path, step: int, *, lost: bool) -> bool:
    """Crash at a request, then go on elsewhere. Returns whether there was such a request.

    The writer that has crashed is a zombie: its requests get through again while the other one goes on.
    """
    proxy.rule = lambda _: None
    store = open_store(f"{proxy.bucket.url}/{step}-{lost}", proxy.bucket.options)
    open_cache(store, directory / "zombie")
    dead, durable = crash_at(proxy, step, lost=lost), [START]
    zombie = threading.Thread(target=write_all, args=(store, directory / "zombie", durable), daemon=True)
    zombie.start()
    eventually(lambda: dead.is_set() or not zombie.is_alive())
    proxy.rule = lambda _: None
    confirmed = durable[-1]
    writer, assembly = begin_stored_log(store, directory / "next")
    assert writer.durable >= confirmed
    for frames in stream():
        assembly.feed(frames)
    writer.flush()
    writer.close()
    found = elsewhere(store, directory / "reader")
    # [] if the crash came when retention had removed all of it
    assert found == TRUTH or (found == [] and len(durable) == len(stream()) + 1), step
    zombie.join(60)
    assert not zombie.is_alive()
    return dead.is_set()


@pytest.mark.parametrize(("step", "lost"), [(1, True), (3, False), (6, True), (9, False)])
def test_a_crash_at_a_request_loses_and_doubles_nothing(proxy: S3Proxy, tmp_path: Path, step: int, lost: bool) -> None:
    assert crash_and_go_on(proxy, tmp_path, step, lost=lost)


@pytest.mark.long
@pytest.mark.parametrize("lost", [False, True])
def test_a_crash_at_any_request_loses_and_doubles_nothing(proxy: S3Proxy, tmp_path: Path, lost: bool) -> None:
    steps = 0
    while crash_and_go_on(proxy, tmp_path / f"{steps}", steps + 1, lost=lost):
        steps += 1
    assert steps > 12


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
