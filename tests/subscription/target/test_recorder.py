"""What is recorded after a batch: versions that belong together, or nothing."""

from __future__ import annotations

import secrets
from pathlib import Path

import pyarrow as pa
import pytest

from walmere.apply.jobs import Batch
from walmere.apply.worker import Applied
from walmere.ledger.entry import now
from walmere.ledger.file import Ledger
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.delta.sink import DeltaSink
from walmere.subscription.state import Phase, TableState
from walmere.subscription.tables import Tables
from walmere.subscription.target.pace import next_batch
from walmere.subscription.target.recorder import Recorder

NAMES = {1: TableName("public", "one"), 2: TableName("public", "two")}
ROWS = pa.table({"id": [1]})


def test_a_table_that_a_crash_has_left_in_front_of_the_others_is_entered_when_they_are_there(tmp_path: Path) -> None:
    """A batch that is repeated after a crash may end earlier."""
    sink = DeltaSink(str(tmp_path / "lake"))
    tables = Tables(tmp_path)
    for oid, name in NAMES.items():
        sink.create(name, ROWS.schema)
        sink.commit(name, sink.stage(name, ROWS.to_batches()), Lsn(500))
        tables.put(TableState(name, oid, Phase.READY, Lsn(100), Lsn(500)))
    sink.commit(NAMES[1], sink.stage(NAMES[1], ROWS.to_batches()), Lsn(520))  # and then the power went

    recorder = Recorder(tmp_path, sink, tables, "shop")
    recorder.record(Batch(Lsn(510), None, (1, 2)), [Applied(1)], now())
    assert Ledger(tmp_path).last() is None
    version = sink.commit(NAMES[2], sink.stage(NAMES[2], ROWS.to_batches()), Lsn(530))
    recorder.record(Batch(Lsn(530), None, (1, 2)), [Applied(2, 1, version=version)], now())
    last = Ledger(tmp_path).last()
    assert last is not None
    assert (last.lsn, last.versions) == (530, {"public.one": 2, "public.two": 2})


def test_the_limit_of_rewriting_counts_batches_and_not_copies(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), deletion_vectors=False)
    tables = Tables(tmp_path)
    rows = pa.table({"text": [secrets.token_hex(500) for _ in range(1000)]})
    sink.create(NAMES[1], rows.schema)

    def write(lsn: int, some: pa.Table) -> int:
        return sink.commit(NAMES[1], sink.stage(NAMES[1], some.to_batches()), Lsn(lsn))

    def batch(lsn: int, some: pa.Table) -> None:
        recorder.skip_written()
        recorder.record(Batch(Lsn(lsn), None, (1,)), [Applied(1, version=write(lsn, some), lsn=Lsn(lsn))], now())

    recorder = Recorder(tmp_path, sink, tables, "shop", rewrite_limit=1 << 20)
    for lsn in (100, 200):  # the second time, the table is copied again
        tables.put(TableState(NAMES[1], 1, Phase.READY, Lsn(lsn), Lsn(lsn), version=write(lsn, rows)))
        batch(lsn + 50, rows.slice(0, 1))
        assert next_batch(tmp_path) is None
    batch(300, rows)
    assert next_batch(tmp_path) is not None


def test_a_batch_that_did_not_reach_the_ledger_of_the_lake_is_there_after_the_next_start(tmp_path: Path) -> None:
    """Its tables and the ledger have it, so no batch follows that would record it."""
    lake = tmp_path / "lake"
    sink = DeltaSink(str(lake))
    tables = Tables(tmp_path)
    sink.create(NAMES[1], ROWS.schema)
    version = sink.commit(NAMES[1], sink.stage(NAMES[1], ROWS.to_batches()), Lsn(500))
    tables.put(TableState(NAMES[1], 1, Phase.READY, Lsn(100), Lsn(500)))
    recorder = Recorder(tmp_path, sink, tables, "shop")
    recorder.open_ledger()
    points = lake / "_walmere"
    kept = points.rename(tmp_path / "kept")
    points.touch()  # a file where the directory should be
    with pytest.raises(Exception, match="_walmere"):
        recorder.record(Batch(Lsn(510), None, (1,)), [Applied(1, 1, version=version, lsn=Lsn(500))], now())
    assert recorder.applied < Lsn(510)
    points.unlink()
    kept.rename(points)
    recorder.open_ledger()
    assert recorder.applied == Lsn(510)
    assert [each.lsn for each in sink.points("shop")] == [510]
