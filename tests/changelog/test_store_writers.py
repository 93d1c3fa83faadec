"""The log in a store has one writer: who takes over, who has lost, and a crash at every request."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from changelog.crashing import TRUTH, stream
from changelog.stored import begin_stored_log, elsewhere, numbers, open_cache
from changelog.walsender import START, Walsender, read
from object_stores import Bucket, VersityServer, versitygw
from processes import eventually
from s3_proxy import Asked, LoseAnswer, Refuse, S3Proxy
from walmere.changelog import retention
from walmere.changelog.store import upload
from walmere.changelog.store.claim import WINDOW, Claim
from walmere.errors import ChangeLogError, TakenOver
from walmere.lsn import Lsn
from walmere.object_store import ObjectStore, open_store

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
