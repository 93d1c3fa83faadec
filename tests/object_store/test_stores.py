"""The contract of a store: the same tests on an S3 server, a directory, and emulators of GCS and Azure's storage."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from object_stores import EVERY_STORE, SECRETS, Bucket
from walmere.errors import StoreRefused, StoreUnavailable
from walmere.object_store import ObjectStore, open_store
from walmere.object_store.filesystem import file_system


@pytest.fixture(params=["s3", "file", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gs", "az"))])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_store(f"file://{tmp_path}/store")
    bucket: Bucket = request.getfixturevalue(f"{request.param}_server").bucket()
    return open_store(f"{bucket.url}/some/prefix/", bucket.options)


def test_create_puts_once(store: ObjectStore) -> None:
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.create("a/b", b"first")  # the answer of the first one may have been lost
    found = store.get("a/b")
    assert found is not None
    assert found[0] == b"first"


def test_one_of_many_who_create_the_same_object_succeeds(store: ObjectStore) -> None:
    for turn in range(5):
        won: list[int] = []
        start = threading.Barrier(6)

        def create(
            number: int, name: str = f"race/{turn}", won: list[int] = won, start: threading.Barrier = start
        ) -> None:
            start.wait()
            if store.create(name, b"%d" % number):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        found = store.get(f"race/{turn}")
        assert found is not None
        assert found[0] == b"%d" % won[0]


def test_replace_if_is_a_compare_and_set(store: ObjectStore) -> None:
    first = store.put("head", b"1")
    second = store.replace_if("head", b"2", first)
    assert second is not None
    assert store.replace_if("head", b"3", first) is None
    assert store.get("head") == (b"2", second)
    assert store.replace_if("nothing", b"1", first) is None
    assert store.get("nothing") is None


def test_no_update_is_lost_by_racing_writers(store: ObjectStore) -> None:
    store.put("count", b"0")

    def add(name: str) -> None:
        done = 0
        while done < 5:
            found = store.get("count")
            assert found is not None
            count = int(found[0].split()[0])
            if store.replace_if("count", f"{count + 1} {name} {done}".encode(), found[1]) is not None:
                done += 1

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.get("count")
    assert found is not None
    assert found[0].startswith(b"15 ")


def test_ranges_end_where_the_object_ends(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    assert store.get_range("a", 2, 3) == b"234"
    assert store.get_range("a", 8, 100) == b"89"
    assert store.get_range("a", 10, 5) == b""
    assert store.get_range("a", 1000, 5) == b""
    assert store.get_range("a", 0, 0) == b""
    with pytest.raises(FileNotFoundError):
        store.get_range("nothing", 0, 1)


def test_objects_are_listed_in_order(store: ObjectStore) -> None:
    for name in ("log/3", "log/1", "log/2", "logs/1", "log/deeper/1", "other"):
        store.put(name, name.encode())
    assert [each.name for each in store.list("log")] == ["log/1", "log/2", "log/3", "log/deeper/1"]
    assert [each.name for each in store.list("log", after="log/2")] == ["log/3", "log/deeper/1"]
    assert [each.name for each in store.list()] == ["log/1", "log/2", "log/3", "log/deeper/1", "logs/1", "other"]
    assert [each.size for each in store.list("logs")] == [6]
    objects, below = store.list_directory("log")
    assert ([each.name for each in objects], list(below)) == (["log/1", "log/2", "log/3"], ["log/deeper"])
    objects, below = store.list_directory()
    assert ([each.name for each in objects], list(below)) == (["other"], ["log", "logs"])
    assert list(store.list("nothing")) == []


def test_head_and_delete(store: ObjectStore) -> None:
    store.put("a", b"12345")
    found = store.head("a")
    assert found is not None
    assert (found.name, found.size) == ("a", 5)
    store.delete(["a", "nothing"])
    store.delete([])
    assert store.head("a") is None
    assert store.get("a") is None


def test_a_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    store.probe()
    store.probe(replaces=True)
    assert list(store.list()) == []


def test_a_store_crosses_processes_without_secrets(store: ObjectStore) -> None:
    store.put("a", b"1")
    pickled = pickle.dumps(store)
    for secret in SECRETS:
        assert secret.encode() not in pickled
        assert secret not in repr(store)
    again = pickle.loads(pickled)
    assert again == store
    assert again.get("a") == store.get("a")


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_a_large_file_is_uploaded_in_parts_and_visible_when_it_is_closed(bucket: Bucket) -> None:
    store = open_store(f"{bucket.url}/some/prefix", bucket.options)
    content = os.urandom(20 << 20)
    with file_system(store).open_output_stream("data/large") as file:
        file.write(content)
        assert store.head("data/large") is None
    assert store.get_range("data/large", (16 << 20) - 5, 10) == content[(16 << 20) - 5 : (16 << 20) + 5]
    with file_system(store).open_input_file("data/large") as file:
        assert file.size() == len(content)
        assert file.read() == content


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_a_missing_bucket_is_refused_everywhere(bucket: Bucket) -> None:
    store = open_store(f"{bucket.url}-of-somebody-else/lake", bucket.options)
    for call in (
        lambda: store.get("a"),
        lambda: store.create("a", b"1"),
        lambda: store.replace_if("a", b"1", '"x"'),
        lambda: list(store.list()),
        lambda: store.get_range("a", 0, 1),
        store.probe,
    ):
        with pytest.raises(StoreRefused, match=r"NoSuchBucket|ContainerNotFound") as caught:
            call()
        assert "create the bucket" in caught.value.hint


def test_a_server_that_does_not_answer_is_unavailable(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walmere.object_store.remote._RETRY", {"max_retries": 1})
    store = open_store(bucket.url, {**bucket.options, "endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StoreUnavailable) as caught:
        store.get("a")
    assert caught.value.transient
    assert "127.0.0.1:1" in str(caught.value)
