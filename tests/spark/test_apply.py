"""The apply worker's thread: what ends it is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from processes import eventually
from walmere.errors import SinkError
from walmere.sinks.delta.sink import DeltaSink
from walmere.spark.apply import ApplyWorker
from walmere.spark.late_session import LateSession
from walmere.subscription.tables import Tables
from walmere.subscription.target.recorder import Recorder


def no_session() -> SparkSession:
    raise AssertionError("there is nothing to apply")


def test_a_directory_that_cannot_be_read_ends_the_apply_worker_with_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    directory = disk / "subscription"
    directory.mkdir(parents=True)
    tables = Tables(directory)
    recorder = Recorder(directory, DeltaSink(str(tmp_path / "lake")), tables, "shop")
    shutil.rmtree(disk)
    disk.touch()
    worker = ApplyWorker(LateSession(no_session), directory, tables, recorder)
    eventually(lambda: worker.error() is not None)
    error = worker.error()
    assert isinstance(error, SinkError), error
    assert isinstance(error.__cause__, NotADirectoryError)
    worker.stop()
