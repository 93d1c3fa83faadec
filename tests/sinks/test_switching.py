"""Tables switch between deletion vectors and rewriting in place, also those of the previous release."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction, RemoveAction

from sinks.histories import Change
from sinks.text_table import BY_ID, SCHEMA, TABLE, begin, content, delete, do, insert, rows, update
from walmere.lsn import Lsn
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.log import actions, replay
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID

WITH_TIME = SCHEMA.append(pa.field("at", pa.timestamp("us")))
LEGACY = {"appendOnly", "invariants"}  # writer version 2 implies them, and a list of features has to name them


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def without_vectors(sink: DeltaSink) -> DeltaSink:
    return replace(sink, deletion_vectors=False)


def check_switched(sink: DeltaSink, schema: pa.Schema, *, vectors: bool) -> None:
    """Features, protocol and property, as we and deltalake read them; and whether readers without vectors can read."""
    ntz = ["timestampNtz"] if schema is WITH_TIME else []
    features = sorted([*(["deletionVectors"] if vectors else []), *ntz])
    opened = DeltaTable(sink.location(TABLE))
    protocol = opened.protocol()
    expected = (3, 7, features, features) if features else (1, 2, [], [])
    assert (
        protocol.min_reader_version,
        protocol.min_writer_version,
        sorted(protocol.reader_features or ()),
        sorted({*(protocol.writer_features or ())} - LEGACY),
    ) == expected
    assert sink.current(TABLE).features - LEGACY == set(features)
    assert opened.metadata().configuration.get(actions.VECTORS_PROPERTY) in (["true"] if vectors else ["false", None])
    if vectors:
        assert any(file.vector for file in sink.current(TABLE).files)
    else:
        found = opened.to_pyarrow_table()
        assert sorted(found["id"].to_pylist()) == [row[0] for row in content(sink)]


SWITCHES = ["update", "delete", "insert", "truncate", "copy", "upkeep"]


@pytest.mark.parametrize("schema", [SCHEMA, WITH_TIME], ids=["plain", "timestamps"])
@pytest.mark.parametrize("by", SWITCHES)
def test_a_table_switches_to_vectors_and_back_several_times(sink: DeltaSink, schema: pa.Schema, by: str) -> None:
    """What comes first after a switch may be any batch, a copy, or upkeep."""
    more = (None,) * (len(schema) - 2)

    def wide(change: Change) -> Change:
        new, old = (row and (*row, *more) for row in (change.new, change.old))
        return Change(change.kind, new, old, change.old_kind)

    table = pa.table([[1, 2, 3, 4], ["x"] * 4, *([None] * 4 for _ in more)], schema=schema)
    plain = without_vectors(sink)
    begin(plain, table)
    check_switched(sink, schema, vectors=False)
    for number in range(3):
        do(sink, wide(delete(1 + number)), wide(update(4, str(number))), wide(insert(100 + number)))
        do(sink, wide(update(100 + number, "again")))
        check_switched(sink, schema, vectors=True)
        before = [row[0] for row in content(sink)]
        match by:
            case "update":
                do(plain, wide(update(100 + number, "third")))
            case "delete":
                do(plain, wide(delete(4000)))
            case "insert":
                do(plain, wide(insert(200 + number)))
                before.append(200 + number)
            case "truncate":
                do(plain, Change("T"), *(wide(insert(key)) for key in (2, 3, 4, 9)))
                before = [2, 3, 4, 9]
            case "copy":
                staged = plain.stage(TABLE, table.to_batches())
                plain.commit(TABLE, staged, Lsn((plain.applied(TABLE) or 0) + 1), OVERWRITE)
                before = [1, 2, 3, 4]
            case "upkeep":
                plain.optimize(TABLE, BY_ID, Upkeep(deleted_share=1))
        check_switched(sink, schema, vectors=False)
        assert sorted({row[0] for row in content(sink)}) == sorted(set(before))
        assert len(content(sink)) == plain.count(TABLE) == len(set(before))


def test_upkeep_switches_vectors_off_only_when_no_file_has_one(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2, 3), rows(4, 5, 6))
    do(sink, delete(1), delete(4))
    plain = replace(without_vectors(sink), file_size=1)  # so that each file is rewritten alone
    first, second = (plain.rewrite_files(work) for work in plain.plan_upkeep(TABLE, BY_ID, Upkeep()))
    plain.replace_files(TABLE, [first])
    check_switched(sink, SCHEMA, vectors=True)
    plain.replace_files(TABLE, [second])
    check_switched(sink, SCHEMA, vectors=False)
    assert content(sink) == [(2, "x"), (3, "x"), (5, "x"), (6, "x")]


@pytest.mark.long
def test_a_table_switches_between_processes_that_are_running_and_new_ones(sink: DeltaSink, tmp_path: Path) -> None:
    """The running process has the table, its protocol and its indexes open; the other one writes in between."""
    script = tmp_path / "other.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from sinks.test_switching import *\n"
        "sink = DeltaSink(sys.argv[1], index=sys.argv[2], deletion_vectors=sys.argv[3] == 'True')\n"
        "do(sink, update(1, sys.argv[4]), insert(int(sys.argv[4])))\n"
    )
    running = replace(sink, index=str(tmp_path / "index"))
    begin(running, rows(1, 2, 3))
    expected = {1: "x", 2: "x", 3: "x"}
    for number, (theirs, ours) in enumerate([(True, False), (False, True), (True, True), (False, False)]):
        key = 10 + number
        args = [sys.executable, str(script), sink.path, str(tmp_path / "index"), str(theirs), str(key)]
        subprocess.run(args, check=True, timeout=120)
        expected |= {1: str(key), key: "x"}
        assert content(sink) == sorted(expected.items())
        check_switched(sink, SCHEMA, vectors=theirs)
        do(replace(running, deletion_vectors=ours), update(2, str(key)), update(key, "ours"))
        expected |= {2: str(key), key: "ours"}
        assert content(sink) == sorted(expected.items())
        check_switched(sink, SCHEMA, vectors=ours)


def by_the_previous_release(sink: DeltaSink) -> None:
    """A table with some batches, as the release before deletion vectors has written it: through deltalake."""
    path = sink.location(TABLE)
    properties = {"delta.checkpointInterval": "10", "delta.logRetentionDuration": "interval 2 hours"}
    DeltaTable.create(path, rows().schema, name=str(TABLE), configuration=properties)
    staging = DeltaSink(sink.path, deletion_vectors=False)
    live: dict[str, int] = {}
    for lsn in range(1, 14):
        opened = DeltaTable(path)
        staged = staging.stage(TABLE, rows(*range(lsn * 10, lsn * 10 + 10)).to_batches())
        removed = [next(iter(live))] if lsn % 4 == 0 else []
        write: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, 1_700_000_000_000, True, file.stats) for file in staged
        ]
        write += [RemoveAction(name, True, 1_700_000_000_000, live.pop(name), {}) for name in removed]
        opened.create_write_transaction(
            write,
            "append",
            opened.schema(),
            commit_properties=CommitProperties(
                custom_metadata={"walmere.lsn": str(Lsn(lsn))},
                max_commit_retries=0,
                app_transactions=[Transaction(APP_ID, lsn, 1_700_000_000_000)],
            ),
        )
        live |= {file.path: file.size for file in staged}


@pytest.mark.parametrize("vectors", [True, False])
def test_a_table_of_the_previous_release_continues_in_place(sink: DeltaSink, vectors: bool) -> None:
    by_the_previous_release(sink)
    replay._kept.clear()
    sink = replace(sink, deletion_vectors=vectors)
    before = content(sink)
    last = sink.version(TABLE)
    assert (sink.applied(TABLE), len(before)) == (Lsn(13), 100)
    assert sink.create(TABLE, SCHEMA) == last
    assert sink.changed_by_others(TABLE, 0, last) is None
    assert do(sink, update(45), delete(46), insert(1)) == last + 1
    expected = {**dict(before), 45: "new", 1: "x"}
    del expected[46]
    assert content(sink) == sorted(expected.items())
    check_switched(sink, SCHEMA, vectors=vectors)
    sink.optimize(TABLE, BY_ID, Upkeep(deleted_share=0))
    replace(sink, keep_seconds=0).vacuum(TABLE)
    assert content(sink) == sorted(expected.items())
    assert len(sink.current(TABLE).files) <= 2
