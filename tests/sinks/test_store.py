"""Delta tables in an object store: how many requests they cost; checkpoints and old versions are read there, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from delta_rows import read_delta
from object_stores import Bucket
from s3_proxy import Asked, LoseAnswer, S3Proxy
from walmere.errors import SinkMismatch
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.base import OVERWRITE, Net
from walmere.sinks.delta.files import vectors
from walmere.sinks.delta.log import replay
from walmere.sinks.delta.log.names import log_file
from walmere.sinks.delta.sink import DeltaSink

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
BY_ID = Identity("d", ("id",))


class Requests:
    """A rule that only looks."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, asked: Asked) -> None:
        self.seen.append((asked.method, asked.path))

    def kinds(self) -> list[str]:
        return sorted(method for method, _ in self.seen)


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table([pa.array(ids, pa.int64()), pa.array([text] * len(ids))], schema=SCHEMA)


def updated(*ids: int, text: str = "y") -> Net:
    none = SCHEMA.empty_table()
    return Net(False, none.select(["id"]), None, rows(*ids, text=text), (None, None), None, none)


def table_of(proxy: S3Proxy, tmp_path: Path, interval: int = 100) -> DeltaSink:
    """A sink, and a table with 2,000 rows."""
    properties = {"delta.checkpointInterval": str(interval)}
    sink = DeltaSink(
        f"{proxy.bucket.url}/lake",
        storage_options=proxy.bucket.options,
        index=str(tmp_path / "index"),
        properties=properties,
    )
    sink.create(TABLE, SCHEMA)
    staged = sink.stage(TABLE, rows(*range(2000)).to_batches(), SCHEMA, BY_ID)
    sink.commit(TABLE, staged, Lsn(1), OVERWRITE, SCHEMA)
    return sink


def read(sink: DeltaSink, bucket: Bucket) -> dict[int, str]:
    """By `deltalake`, which holds Python's lock while it reads: so not through the proxy."""
    found = read_delta(replace(sink, storage_options=bucket.options).open(TABLE))
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def as_new_process() -> None:
    """Forget what this process knows of tables."""
    replay._kept.clear()
    vectors._kept._vectors.clear()


def test_a_batch_costs_three_puts_and_few_reads(proxy: S3Proxy, tmp_path: Path) -> None:
    sink = table_of(proxy, tmp_path)
    places = np.random.default_rng(7).permutation(2000).tolist()
    for turn in range(3):
        proxy.rule = requests = Requests()
        sink.apply(TABLE, updated(*places[turn * 500 : turn * 500 + 500]), Lsn(10 + turn), BY_ID)
        assert requests.kinds().count("PUT") == 3, "rows, vectors, and the commit"
        assert len(requests.seen) <= 8, requests.seen


def test_a_log_is_read_from_its_last_checkpoint_with_few_requests(
    proxy: S3Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    sink = table_of(proxy, tmp_path, interval=10)
    for number in range(2, 33):
        sink.apply(TABLE, updated(number, text=str(number)), Lsn(number), BY_ID)
    expected = {**dict.fromkeys(range(2000), "x"), **{number: str(number) for number in range(2, 33)}}
    assert read(sink, bucket) == expected
    names = sink.directory(TABLE).files("_delta_log")
    assert sorted(name for name in names if "checkpoint.parquet" in name) == [
        f"{version:020d}.checkpoint.parquet" for version in (10, 20, 30)
    ]
    as_new_process()
    proxy.rule = requests = Requests()
    assert sink.version(TABLE) == 32
    # the hint, a list, the checkpoint, the two commits after it; then whether there are more
    assert len(requests.seen) <= 8, requests.seen
    found = [replay.at(sink.directory(TABLE), version) for version in (0, 5, 10, 17, 31)]
    assert [each.transactions.get(sink.app_id) for each in found] == [None, 5, 10, 17, 31]


def test_a_checkpoint_that_is_damaged_or_missing_is_replaced_by_an_older_one(
    proxy: S3Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    sink = table_of(proxy, tmp_path, interval=10)
    for number in range(2, 25):
        sink.apply(TABLE, updated(number, text=str(number)), Lsn(number), BY_ID)
    log = sink.directory(TABLE).below("_delta_log")
    log.replace(f"{20:020d}.checkpoint.parquet", b"not a file of Parquet")
    as_new_process()
    assert sink.version(TABLE) == 24
    log.remove(f"{20:020d}.checkpoint.parquet")
    as_new_process()
    assert sink.version(TABLE) == 24
    log.remove("_last_checkpoint")
    as_new_process()
    assert (sink.version(TABLE), sink.applied(TABLE)) == (24, Lsn(24))
    log.remove(f"{22:020d}.json")
    as_new_process()
    with pytest.raises(SinkMismatch, match="version 22 is not there"):
        sink.version(TABLE)


def test_a_commit_whose_answer_is_lost_is_one_commit(proxy: S3Proxy, bucket: Bucket, tmp_path: Path) -> None:
    sink = table_of(proxy, tmp_path)
    lost: list[str] = []

    def rule(asked: Asked) -> None:
        if asked.method == "PUT" and asked.path.endswith(".json") and asked.path not in lost:
            lost.append(asked.path)
            raise LoseAnswer

    proxy.rule = rule
    assert sink.apply(TABLE, updated(1, 2), Lsn(2), BY_ID) == 2
    wider = pa.schema([*SCHEMA, ("new", pa.string())])
    assert sink.evolve(TABLE, wider, ["id", "v", pa.scalar(None, pa.string())]) == 3, "it does not conflict with itself"
    sink.commit(TABLE, [], Lsn(3), OVERWRITE, SCHEMA)
    assert len(lost) == 3
    log = sink.directory(TABLE)
    commits = [json.loads((log.read(log_file(version)) or b"").splitlines()[0]) for version in range(5)]
    assert len({each["commitInfo"]["txnId"] for each in commits}) == 5
    assert log.read(log_file(5)) is None
    assert read(sink, bucket) == {}


def test_vacuum_deletes_objects_in_few_requests(proxy: S3Proxy, bucket: Bucket, tmp_path: Path) -> None:
    sink = replace(table_of(proxy, tmp_path), keep_seconds=0.0)
    for number in range(2, 12):
        sink.apply(TABLE, updated(*range(number * 100, number * 100 + 90)), Lsn(number), BY_ID)
    sink.optimize(TABLE, BY_ID)
    before = len(sink.directory(TABLE).files(""))
    proxy.rule = requests = Requests()
    sink.vacuum(TABLE)
    assert len(sink.directory(TABLE).files("")) < before - 8
    assert sum(method in ("DELETE", "POST") for method, _ in requests.seen) <= 2
    assert len(read(sink, bucket)) == 2000
