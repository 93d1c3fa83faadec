"""Stores and networks that misbehave: nothing is lost, nothing is done twice, and what is unsuitable is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from object_stores import EVERY_STORE
from s3_proxy import AnswerLate, Asked, LoseAnswer, Refuse, S3Proxy
from walmere.errors import StoreUnavailable, StoreUnsuitable
from walmere.object_store import ObjectStore, open_store


def store_of(proxy: S3Proxy, **options: str) -> ObjectStore:
    return open_store(f"{proxy.bucket.url}/some/place", {**proxy.bucket.options, **options})


class Faulty:
    """A rule: one in so many requests that change something, or of all, meets an error. It counts them."""

    def __init__(self, every: int, error: Callable[[], Exception], *, reads: bool = False) -> None:
        self.every, self.error, self.reads = every, error, reads
        self.requests = self.met = 0
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> None:
        if not (asked.changes or self.reads):
            return
        with self._lock:
            self.requests += 1
            if self.requests % self.every:
                return
            self.met += 1
        raise self.error()


@pytest.mark.long
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_store_that_ignores_generations_is_refused(proxy: S3Proxy) -> None:
    store = store_of(proxy)
    store.probe(replaces=True)
    proxy.forget = ("x-goog-if-generation-match",)
    for replaces in (False, True):
        with pytest.raises(StoreUnsuitable, match="created only once"):
            store.probe(replaces=replaces)
    assert list(store.list()) == [], "a probe leaves nothing"


def test_a_store_that_ignores_conditions_is_refused(proxy: S3Proxy) -> None:
    store = store_of(proxy)
    store.probe(replaces=True)
    proxy.forget = ("If-None-Match",)
    for replaces in (False, True):
        with pytest.raises(StoreUnsuitable, match="created only once") as caught:
            store.probe(replaces=replaces)
        assert "If-None-Match" in caught.value.hint
    proxy.forget = ("If-Match",)
    store.probe()
    with pytest.raises(StoreUnsuitable, match="ignores If-Match"):
        store.probe(replaces=True)
    assert list(store.list()) == [], "a probe leaves nothing"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda: Faulty(3, Refuse, reads=True), id="refused"),
        pytest.param(lambda: Faulty(3, LoseAnswer), id="lost"),
        pytest.param(lambda: Faulty(5, lambda: AnswerLate(1.6)), id="late"),
    ],
)
@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_what_is_put_is_put_once_whatever_happens_to_the_answer(proxy: S3Proxy, fault: Callable[[], Faulty]) -> None:
    store = store_of(proxy, timeout="1s")
    proxy.rule = rule = fault()
    names = [f"log/{number:03d}" for number in range(10)]
    for name in names:
        assert store.create(name, f"first {name}".encode())
        assert not store.create(name, b"second")
    etag = store.put("head", b"0")
    for number in range(1, 8):
        replaced = store.replace_if("head", b"%d" % number, etag)
        assert replaced is not None, "nobody else has replaced it"
        etag = replaced
    store.probe(replaces=True)
    assert rule.met > 4
    proxy.rule = lambda _: None
    assert [each.name for each in store.list("log")] == names
    assert all((store.get(name) or (b"",))[0] == f"first {name}".encode() for name in names)
    assert (store.get("head") or (b"",))[0] == b"7"


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_of_two_writers_one_wins_whatever_happens_to_the_answers(proxy: S3Proxy) -> None:
    store = store_of(proxy)
    proxy.rule = rule = Faulty(2, LoseAnswer)
    for turn in range(10):
        won: list[int] = []
        start = threading.Barrier(2)

        def create(number: int, turn: int = turn, won: list[int] = won, start: threading.Barrier = start) -> None:
            start.wait()
            if store.create(f"race/{turn}", b"%d" % number):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert (store.get(f"race/{turn}") or (b"",))[0] == b"%d" % won[0]
    assert rule.met >= 10


def test_a_store_that_only_fails_is_unavailable(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walmere.object_store.remote._RETRY", {"max_retries": 1})
    store = store_of(proxy)
    proxy.rule = Faulty(1, Refuse, reads=True)
    for call in (lambda: store.create("a", b"1"), lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(StoreUnavailable, match="503"):
            call()
