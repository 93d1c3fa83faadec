"""An error of a task is the error that the caller gets: its class, its fields, its hint."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from processes import eventually
from walmere.changelog.plan import BlockRef, messages
from walmere.changelog.segment_entry import Block, Segment
from walmere.errors import ChangeLogDamaged, ProtocolError, SinkError, SinkFull, SourceUnavailable, WalmereError
from walmere.lsn import Lsn
from walmere.spark.session import session
from walmere.spark.shuffle import SparkShuffle
from walmere.spark.tasks import SparkTasks


@pytest.fixture(scope="module")
def tasks() -> SparkTasks:
    return SparkTasks(session("test", "local[2]", {}), "test")


def raising(error: Exception) -> Callable[[Any], Any]:
    def run(_: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("decoding a message", "it ends too early", "report this", 17),
        SinkError("writing s: t", "the disk: of the target", "make room\nor give another path"),
        WalmereError("doing this: and that", "no"),
        SourceUnavailable("copying t", "gone"),  # transient: Spark tries it four times before it is returned
    ],
)
def test_the_error_of_a_task_comes_back_as_it_was_raised(tasks: SparkTasks, error: WalmereError) -> None:
    with pytest.raises(WalmereError) as caught:
        tasks.map(raising(error), [1, 2])
    assert type(caught.value) is type(error)
    assert caught.value.args == error.args
    assert str(caught.value) == str(error)


def test_an_unexpected_exception_is_one_line_and_its_traceback_is_in_the_log(
    tasks: SparkTasks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pyspark"), "propagate", True)
    with pytest.raises(WalmereError) as caught:
        tasks.map(raising(ZeroDivisionError("two\nlines")), [1])
    assert str(caught.value) == "running a task on Spark: ZeroDivisionError: two"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[lines.index("    raise error") - 1].endswith("in run")


def test_a_full_disk_is_known_by_its_error_number_in_any_task(tasks: SparkTasks) -> None:
    with pytest.raises(SinkFull):
        tasks.map(raising(OSError(28, "No space left on device")), [1])


def test_a_task_that_is_killed_again_and_again_is_named_by_spark(tasks: SparkTasks) -> None:
    def end(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WalmereError, match=r"running a job on Spark: .*failed 4 times") as caught:
        tasks.map(end, [1])
    assert "\n" not in str(caught.value)


def test_an_error_of_all_tasks_comes_back_from_a_sum_of_many(tasks: SparkTasks) -> None:
    error = SourceUnavailable("copying t", "gone")
    with pytest.raises(SourceUnavailable, match="copying t: gone"):
        tasks.add(raising(error), list(range(65)), 0, lambda *_: None)


def test_a_failure_ends_the_other_tasks_of_its_job(tasks: SparkTasks, tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    def run(item: int) -> None:
        if item == 0:
            raise SinkError("writing t", "no")
        time.sleep(120)
        ended.touch()

    began = time.monotonic()
    with pytest.raises(SinkError, match="writing t: no"):
        tasks.map(run, [0, 1])
    assert time.monotonic() - began < 60
    assert not ended.exists()


def test_cancelling_ends_the_jobs_of_these_tasks_and_no_others(tasks: SparkTasks, tmp_path: Path) -> None:
    others = SparkTasks(session("test", "local[2]", {}), "others")
    go = tmp_path / "go"

    def wait(name: str) -> str:
        (tmp_path / name).touch()
        while not go.exists():
            time.sleep(0.05)
        return name

    found: dict[str, Any] = {}

    def run(mine: SparkTasks, name: str) -> None:
        try:
            found[name] = mine.map(wait, [name])
        except WalmereError as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=each) for each in ((tasks, "cancelled"), (others, "kept"))]
    for thread in threads:
        thread.start()
    eventually(lambda: (tmp_path / "cancelled").exists() and (tmp_path / "kept").exists(), 60)
    tasks.cancel()
    threads[0].join(60)
    assert isinstance(found["cancelled"], WalmereError)
    go.touch()
    threads[1].join(60)
    assert found["kept"] == ["kept"]


def test_a_shuffle_raises_the_error_of_its_pieces(tasks: SparkTasks, tmp_path: Path) -> None:
    shuffle = SparkShuffle(session("test", "local[2]", {}), tasks)
    block = Block(
        relation=1, version=1, rows=1, first_sequence=0, last_sequence=0, offset=0, length=1, checksum=0, inserts=True
    )
    reference = BlockRef(Segment("gone.arrow", 1, False, (block,)), 1, Lsn(1), None, None, frozenset())
    piece = SimpleNamespace(rows=functools.partial(messages, tmp_path, [reference]))
    with pytest.raises(ChangeLogDamaged, match=r"gone\.arrow"):
        shuffle.reduce([piece, piece], "a int", "a", lambda rows: rows, "a int")
