"""Whatever is received, and whoever takes over when: the log in the store is the log on a local disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from changelog.stored import begin_stored_log, open_cache
from changelog.walsender import U, Walsender, assert_sound, begin_log, insert, read, relation
from walmere.changelog import retention
from walmere.changelog.store import upload
from walmere.object_store import open_store

STEPS = st.lists(
    st.sampled_from(
        [
            "insert",
            "insert",
            "large",
            "prepare",
            "commit",
            "roll back",
            "message",
            "cut",
            "flush",
            "take over",
            "remove",
        ]
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(steps=["insert", "prepare", "roll back", "remove"], seconds=60.0, max_bytes=1)
@given(steps=STEPS, seconds=st.sampled_from([0.0, 60.0]), max_bytes=st.sampled_from([1, 1 << 20]))
def test_the_log_in_a_store_equals_a_local_one(
    monkeypatch: pytest.MonkeyPatch, steps: list[str], seconds: float, max_bytes: int
) -> None:
    monkeypatch.setattr("walmere.changelog.assembly.SPOOL_BYTES", 1000)
    monkeypatch.setattr(upload, "MANIFEST_EVERY", 7)
    with tempfile.TemporaryDirectory() as name:
        _compare(Path(name), steps, seconds, max_bytes)


def _compare(place: Path, steps: list[str], seconds: float, max_bytes: int) -> None:
    store = open_store(f"file://{place}/store")
    source = Walsender()
    sent: list[list[memoryview]] = []
    prepared: list[bytes] = []
    removed_before = source.lsn
    machine = 0
    writer, assembly = begin_stored_log(store, place / "0", seconds=seconds, max_bytes=max_bytes, segment_bytes=500)
    rest: list[memoryview] = []

    def feed(frames: list[memoryview]) -> None:
        nonlocal rest
        for at in range(0, len(frames), 20):
            rest = assembly.feed([*rest, *frames[at : at + 20]])

    for number, step in enumerate(steps):
        frames: list[memoryview] = []
        match step:
            case "insert":
                frames = source.inserts(number)
            case "large":
                frames = source.transaction(relation(U), *(insert(number * 1000 + i, U) for i in range(60)))
            case "prepare":
                prepared.append(b"%d" % (number % 2))  # a gid may be used again
                if len(set(prepared)) < len(prepared):
                    prepared.pop()
                    continue
                frames = source.prepared(prepared[-1], relation(), insert(number))
            case "commit" if prepared:
                frames = source.commit_prepared(prepared.pop(0))
            case "roll back" if prepared:
                frames = source.rollback_prepared(prepared.pop(0))
            case "message":
                frames = source.message(b"message %d" % number)
            case "cut":
                writer.cut()
            case "flush":
                writer.flush()
            case "take over":
                machine += 1
                if machine % 2:
                    writer.flush()  # otherwise it dies with what is on its way
                writer.close()
                writer, assembly = begin_stored_log(
                    store, place / f"{machine}", seconds=seconds, max_bytes=max_bytes, segment_bytes=500
                )
                rest = []
                for some in sent:
                    feed(some)
            case "remove":
                writer.flush()
                removed_before = writer.durable
                retention.submit(writer, removed_before, -1)
                writer.flush()
        if frames:
            sent.append(frames)
            feed(frames)
    writer.flush()
    writer.close()
    local, local_assembly = begin_log(place / "local")
    for frames in sent:
        local_assembly.feed(frames)
    local.flush()
    local.close()
    open_cache(store, place / "reader")
    assert read(place / "reader") == read(place / f"{machine}") == read(place / "local", removed_before)
    assert_sound(place / f"{machine}")
