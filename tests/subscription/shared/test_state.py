"""The driver's state in a store: all of it at once, on any machine, and written by one driver only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from changelog.stored import open_cache
from s3_proxy import Asked, S3Proxy, lose_every
from walmere.errors import ChangeLogDamaged, NotMirrored, TakenOver
from walmere.ledger.entry import Entry
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.object_store import ObjectStore, open_store
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.requests import resync, skipping
from walmere.subscription.shared import state
from walmere.subscription.shared.requests import Request, SharedRequests
from walmere.subscription.shared.state import SharedState, read_state
from walmere.subscription.state import Phase, TableState, applied
from walmere.subscription.tables import Tables

ORDERS = TableName("public", "orders")


@pytest.fixture
def store(proxy: S3Proxy, tmp_path: Path) -> ObjectStore:
    """A store with an empty log."""
    made = open_store(f"{proxy.bucket.url}/shop", proxy.bucket.options)
    open_cache(made, tmp_path / "log")
    return made


def driver(store: ObjectStore, directory: Path) -> tuple[SharedState, Tables]:
    """A driver that has just started."""
    shared = SharedState(store, directory)
    tables = Tables(directory, shared)
    assert shared.take_over()
    tables.reload()
    return shared, tables


def table(oid: int, lsn: int = 100) -> TableState:
    return TableState(TableName("public", f"t{oid}"), oid, Phase.READY, Lsn(lsn), Lsn(lsn))


def test_another_machine_has_the_same_state(store: ObjectStore, tmp_path: Path) -> None:
    shared, tables = driver(store, tmp_path / "a")
    ledger, positions = Ledger(tmp_path / "a"), SinkPositions(tmp_path / "a")
    tables.put(table(1), table(2))
    for lsn in range(200, 260, 10):
        with shared.together():
            tables.change({oid: lambda known, lsn=lsn: applied(known, Lsn(lsn)) for oid in (1, 2)})  # type: ignore[misc]
            ledger.append(Entry(Lsn(lsn), lsn, {"public.t1": lsn}))
            positions.advance(TARGET, Lsn(lsn))
    skipping.request(tmp_path / "a", Lsn(300))
    shared.put()
    _, again = driver(store, tmp_path / "b")
    assert list(again) == list(tables)
    assert list(Ledger(tmp_path / "b").entries()) == list(ledger.entries())
    assert SinkPositions(tmp_path / "b").positions() == {TARGET: Lsn(250)}
    assert skipping.requested(tmp_path / "b") == Lsn(300)


def test_a_batch_is_one_put(store: ObjectStore, proxy: S3Proxy, tmp_path: Path) -> None:
    shared, tables = driver(store, tmp_path / "a")
    ledger = Ledger(tmp_path / "a")
    tables.put(table(1))
    ledger.append(Entry(Lsn(100), 1, {"public.t1": 1}))
    shared.put()
    before = proxy.changing
    for lsn in range(110, 160, 10):
        with shared.together():
            tables.change({1: lambda known, lsn=lsn: applied(known, Lsn(lsn))})  # type: ignore[misc]
            ledger.append(Entry(Lsn(lsn), lsn, {"public.t1": lsn}))
    assert proxy.changing == before + 5


def test_a_long_ledger_is_in_an_object_of_its_own(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_LEDGER_BYTES", 1000)
    shared, _ = driver(store, tmp_path / "a")
    ledger = Ledger(tmp_path / "a")
    for number in range(50):
        ledger.append(Entry(Lsn(number + 1), number, {"public.t1": number}))
        shared.put()
    ledger.restart(list(ledger.entries())[20:])  # as after a long time
    shared.put()
    found = [each.name for each in store.list() if "/ledger/" in each.name]
    assert len(found) == 1
    driver(store, tmp_path / "b")
    assert list(Ledger(tmp_path / "b").entries()) == list(ledger.entries())
    assert len(list(ledger.entries())) == 30


def test_a_driver_that_was_only_believed_to_be_dead_changes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    zombie, zombie_tables = driver(store, tmp_path / "zombie")
    zombie_tables.put(table(1))
    shared, tables = driver(store, tmp_path / "a")
    tables.put(table(2))
    attempts: list[Callable[[], None]] = [
        lambda: zombie_tables.put(table(3)),
        lambda: zombie.check(0.0),
        zombie.put,
    ]
    for attempt in attempts:
        with pytest.raises(TakenOver, match="another driver has taken over: "):
            attempt()
    zombie.check(3600.0)  # not asked again
    shared.check(0.0)
    _, last = driver(store, tmp_path / "b")
    assert [each.oid for each in last] == [1, 2]


def test_answers_that_are_lost_change_nothing(store: ObjectStore, proxy: S3Proxy, tmp_path: Path) -> None:
    proxy.rule = lose_every(3)
    _, tables = driver(store, tmp_path / "a")
    for number in range(1, 12):
        tables.put(table(number))
    _, again = driver(store, tmp_path / "b")
    assert [each.oid for each in again] == sorted(range(1, 12), key=lambda number: f"t{number}")
    with pytest.raises(TakenOver):
        tables.put(table(99))


def test_of_two_drivers_that_start_at_the_same_time_one_goes_on(store: ObjectStore, tmp_path: Path) -> None:
    for turn in range(5):
        outcomes: list[str] = []
        barrier = threading.Barrier(2)

        def start(name: str, barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes) -> None:
            shared = SharedState(store, tmp_path / name)
            tables = Tables(tmp_path / name, shared)
            barrier.wait()
            assert shared.take_over()
            barrier.wait()
            try:
                tables.put(table(1))
                outcomes.append(name)
            except TakenOver:
                pass

        threads = [threading.Thread(target=start, args=(f"{turn}{name}",)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 1


def test_changes_of_several_threads_share_a_put(store: ObjectStore, proxy: S3Proxy, tmp_path: Path) -> None:
    _, tables = driver(store, tmp_path / "a")
    entered, let = threading.Semaphore(0), threading.Event()

    def hold(asked: Asked) -> None:
        if asked.method == "PUT":
            entered.release()
            assert let.wait(30)

    proxy.rule = hold
    threads = [threading.Thread(target=tables.put, args=(table(number),)) for number in range(1, 9)]
    threads[0].start()
    assert entered.acquire(timeout=30)
    before = proxy.counts["PUT"]
    for thread in threads[1:]:
        thread.start()
    while len(list(Tables(tmp_path / "a"))) < 8:
        pass
    let.set()
    for thread in threads:
        thread.join(30)
    assert proxy.counts["PUT"] <= before + 2
    assert len(list(driver(store, tmp_path / "b")[1])) == 8


def test_state_of_a_log_that_was_dropped_is_forgotten(store: ObjectStore, tmp_path: Path) -> None:
    _, tables = driver(store, tmp_path / "a")
    tables.put(table(1))
    SinkPositions(tmp_path / "a").advance("query-x", Lsn(7))
    store.delete([each.name for each in store.list()])
    assert not SharedState(store, tmp_path / "a").take_over()
    open_cache(store, tmp_path / "log")
    _, again = driver(store, tmp_path / "a")
    assert list(again) == []
    assert SinkPositions(tmp_path / "a").positions() == {}


def test_local_state_is_moved_to_the_store_and_readers_keep_their_positions(store: ObjectStore, tmp_path: Path) -> None:
    Tables(tmp_path / "a").put(table(1))
    SinkPositions(tmp_path / "a").advance(TARGET, Lsn(5))
    _, tables = driver(store, tmp_path / "a")
    assert [each.oid for each in tables] == [1]
    SinkPositions(tmp_path / "a").join("query-x")  # while no driver runs
    driver(store, tmp_path / "a")
    assert SinkPositions(tmp_path / "a").positions() == {TARGET: Lsn(5), "query-x": Lsn(0)}


def test_a_damaged_state_is_named(store: ObjectStore, tmp_path: Path) -> None:
    driver(store, tmp_path / "a")
    [name] = [each.name for each in store.list() if each.name.endswith("/state")]
    store.put(name, b"nonsense")
    with pytest.raises(ChangeLogDamaged, match=f"{store.url}/{name}: it is not the state"):
        SharedState(store, tmp_path / "b").take_over()


def test_requests_survive_until_the_state_has_their_effect(store: ObjectStore, tmp_path: Path) -> None:
    _, tables = driver(store, tmp_path / "a")
    tables.put(table(1), table(2))
    asked = SharedRequests(store)
    asked.add(Request((tables[1].table,)))
    asked.add(Request(skip=Lsn(300)))
    assert len(SharedRequests(store).read()) == 2
    assert resync.take_shared(tmp_path / "a", tables, SharedRequests(store)) == {1}
    assert SharedRequests(store).read() == []
    _, again = driver(store, tmp_path / "b")
    assert (again[1].phase, again[2].phase) == (Phase.INIT, Phase.READY)
    assert skipping.requested(tmp_path / "b") == Lsn(300)
    assert resync.take_shared(tmp_path / "b", again, SharedRequests(store)) == set()


def test_a_request_without_a_subscription_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotMirrored, match="there is no subscription"):
        SharedRequests(open_store(f"file://{tmp_path}/store")).add(Request((ORDERS,)))


def test_a_refresh_without_taking_over_leaves_the_driver_alone(store: ObjectStore, tmp_path: Path) -> None:
    shared, tables = driver(store, tmp_path / "a")
    tables.put(table(1))
    found = read_state(store, store_generation(store))
    assert found is not None
    state.LocalState(tmp_path / "b").write(store, store_generation(store), found[0])
    assert [each.oid for each in Tables(tmp_path / "b")] == [1]
    shared.check(0.0)
    tables.put(table(2))


def store_generation(store: ObjectStore) -> str:
    return next(each.name.partition("/")[0] for each in store.list() if each.name.endswith("/state"))
