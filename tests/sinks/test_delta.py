"""What is Delta's own: directories, the log, which files a change touches, and what other writers leave there."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from delta_rows import read_delta
from sinks.histories import Change, rows_of, typed
from sinks.vectors import delete_rows
from walmere.apply.fold import fold
from walmere.directory import Directory
from walmere.errors import ConfigError, OwnedByAnother, SinkConflict, SinkError, SinkMismatch
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.owner import Owner
from walmere.sinks.base import OVERWRITE, LakeSink, StagedFile, Upkeep
from walmere.sinks.delta import rewrite
from walmere.sinks.delta.files import parquet
from walmere.sinks.delta.files.parquet import ROW_GROUP_ROWS, row_groups
from walmere.sinks.delta.maintenance import JOIN_FILES
from walmere.sinks.delta.places import quote, unquote
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID

TABLE = TableName("public", "t")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
BY_ID = Identity("d", ("id",))
K, O = ord("K"), ord("O")  # noqa: E741


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


@pytest.fixture
def rewriting(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), deletion_vectors=False)


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table([pa.array(ids, pa.int64()), pa.array([text] * len(ids))], schema=SCHEMA)


def begin(sink: DeltaSink, *parts: pa.Table, schema: pa.Schema = SCHEMA) -> list[StagedFile]:
    sink.create(TABLE, schema)
    staged = [file for part in parts for file in sink.stage(TABLE, part.to_batches())]
    sink.commit(TABLE, staged, Lsn(100), OVERWRITE)
    return staged


def do(sink: LakeSink, *changes: Change, lsn: int = 200, identity: Identity = BY_ID, schema: pa.Schema = SCHEMA) -> int:
    return sink.apply(TABLE, fold(typed(changes, schema), identity), Lsn(lsn), identity)


def update(key: int, text: str = "new") -> Change:
    return Change("U", (key, text))


def delete(key: int) -> Change:
    return Change("D", None, (key, None), K)


def files(sink: DeltaSink) -> set[str]:
    return {uri.rpartition("/")[2] for uri in sink.open(TABLE).file_uris()}


def content(sink: DeltaSink) -> list[tuple[Any, ...]]:
    return sorted(rows_of(pa.table(sink.open(TABLE).scan())))


def test_a_table_of_somebody_else_with_other_columns_is_refused_and_left_alone(sink: DeltaSink) -> None:
    theirs = pa.table({"x": [1, 2]})
    write_deltalake(sink.location(TABLE), theirs)
    with pytest.raises(SinkMismatch, match="which Walmere did not write"):
        sink.create(TABLE, SCHEMA)
    assert read_delta(sink.open(TABLE)) == theirs


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20))
def test_a_quoted_name_is_a_plain_file_name_and_can_be_read_back(name: str) -> None:
    quoted = quote(name)
    assert unquote(quoted) == name
    assert quoted not in {".", "..", "_delta_log"}
    assert all(c.isascii() and (c.isalnum() or c in "_-.~") for c in quoted)
    assert not quoted.startswith(".")


def test_ordinary_names_stay_as_they_are(sink: DeltaSink) -> None:
    assert sink.location(TableName("public", "Order_Lines-2.old")).endswith("/lake/public/Order_Lines-2.old")
    assert quote("a/b") == "a~2Fb"
    assert quote("é") == "~C3~A9"


def test_the_longest_name_fits_a_file_system() -> None:
    assert len(quote("\U0001f40d" * 15)) <= 255


def test_a_table_of_another_name_in_the_same_directory_is_refused(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.sinks.delta.places.quote", lambda name: quote(name).lower())  # as a Mac would
    sink.create(TableName("public", "orders"), SCHEMA)
    with pytest.raises(SinkMismatch, match=r"contains the table public\.orders"):
        sink.create(TableName("public", "Orders"), SCHEMA)


def test_a_path_that_deltalake_would_mistake_is_refused() -> None:
    with pytest.raises(ConfigError, match="%"):
        DeltaSink("/tmp/a%20b")


def test_columns_that_differ_by_capitals_alone_are_refused_with_a_hint(sink: DeltaSink) -> None:
    with pytest.raises(SinkError, match="differ only in case"):
        sink.create(TABLE, pa.schema([("a", pa.int32()), ("A", pa.int32())]))


def test_a_sink_is_small_when_pickled(sink: DeltaSink) -> None:
    assert pickle.loads(pickle.dumps(sink)) == sink
    assert len(pickle.dumps(sink)) < 1000


def test_the_lsn_is_an_app_transaction_in_the_commit_itself(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    version = do(sink, update(1), lsn=0x16_B374D848)
    log = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json").read_text().splitlines()
    actions = [json.loads(line) for line in log]
    [txn] = [action["txn"] for action in actions if "txn" in action]
    assert (txn["appId"], txn["version"]) == (APP_ID, 0x16_B374D848)
    [info] = [action["commitInfo"] for action in actions if "commitInfo" in action]
    assert info["walmere.lsn"] == "16/B374D848"
    assert {next(iter(action)) for action in actions} == {"txn", "commitInfo", "add", "remove"}


def test_another_source_has_its_own_lsns(sink: DeltaSink, tmp_path: Path) -> None:
    begin(sink, rows(1))
    other = DeltaSink(sink.path, app_id="walmere:other")
    assert other.applied(TABLE) is None
    other.commit(TABLE, other.stage(TABLE, rows(2).to_batches()), Lsn(5))
    assert (other.applied(TABLE), sink.applied(TABLE)) == (Lsn(5), Lsn(100))


def test_the_lsn_outlives_checkpoints(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    for number in range(225):
        do(sink, Change("I", (10 + number, "x")), lsn=200 + number)
    log = Path(sink.location(TABLE), "_delta_log")
    assert len(list(log.glob("*.checkpoint.parquet"))) >= 2
    assert DeltaSink(sink.path).applied(TABLE) == 424


def test_only_files_with_a_hit_are_written_anew_and_rows_stay_together(rewriting: DeltaSink) -> None:
    rewriting = DeltaSink(rewriting.path, file_size=1, deletion_vectors=False)  # so that no two are put together
    parts = begin(rewriting, rows(1, 2, 3), rows(11, 12, 13), rows(21, 22, 23))
    do(rewriting, update(12), delete(11))
    after = files(rewriting)
    assert parts[0].path in after
    assert parts[2].path in after
    [new] = after - {file.path for file in parts}
    assert rows_of(pq.read_table(Path(rewriting.location(TABLE), new))) == [(13, "x"), (12, "new")]


def test_files_whose_bounds_exclude_a_key_are_not_opened(rewriting: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = begin(rewriting, rows(1, 2, 3), rows(11, 12, 13), rows(21, 22, 23))
    opened: list[str] = []

    def watched(directory: Any, path: str, schema: pa.Schema) -> Any:
        opened.append(path)
        return row_groups(directory, path, schema)

    monkeypatch.setattr(rewrite, "row_groups", watched)
    do(rewriting, update(12), delete(15))
    assert set(opened) == {parts[1].path}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", ["int", "text", "date", "timestamp", "numeric"])
def test_bounds_of_every_ordered_type_exclude_files_and_never_wrongly(
    rewriting: DeltaSink, monkeypatch: pytest.MonkeyPatch, kind: str, many: bool
) -> None:
    monkeypatch.setattr(rewrite, "_MAX_EXACT_KEYS", 0 if many else 10_000)
    types = {
        "int": pa.int64(),
        "text": pa.string(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "numeric": pa.decimal128(12, 2),
    }
    schema = pa.schema([("id", types[kind]), ("text", pa.string())])

    def keys(*ids: int) -> pa.Array:
        if kind == "text":
            return pa.array([("prefix-longer-than-what-is-kept-" + "\U0010ffff" * (i % 3) + f"{i:05d}") for i in ids])
        numbers = pa.array(ids, pa.int32() if kind == "date" else pa.int64())
        return numbers.cast(pa.decimal128(21, 2)).cast(types[kind]) if kind == "numeric" else numbers.cast(types[kind])

    begin(
        rewriting,
        *[pa.table([keys(*ids), ["x"] * 3], schema=schema) for ids in ((1, 2, 3), (11, 12, 13))],
        schema=schema,
    )
    for number, key in enumerate((1, 2, 3, 11, 13)):
        do(rewriting, Change("U", (keys(key)[0].as_py(), "new")), lsn=200 + number, schema=schema)
    assert len(content(rewriting)) == 6
    assert sum(text == "new" for _, text in content(rewriting)) == 5


def test_bounds_are_bounds_whatever_the_text(sink: DeltaSink) -> None:
    texts = [
        "a" * 99,
        "\U0010ffff" * 40,
        "\U00020000" * 40,
        "a" * 32 + "\U0010ffff" * 9 + "b",
        "é" * 33,
        "",
        "z" * 5000,
    ]
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    begin(sink, *[pa.table([[text], ["x"]], schema=schema) for text in texts], schema=schema)
    do(sink, *[Change("D", None, (text, None), K) for text in texts], schema=schema)
    assert content(sink) == []


def test_the_log_has_statistics_that_other_readers_can_use(sink: DeltaSink) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("f", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.int32())), ("z", pa.int32())]
    )
    table = pa.table([[1, 2], [1.0, float("nan")], ["a" * 40, None], [[1], None], [None, None]], schema=schema)
    [file] = begin(sink, table, schema=schema)
    stats = json.loads(file.stats)
    assert stats["numRecords"] == 2
    assert stats["minValues"] == {"id": 1, "s": "a" * 16}
    assert stats["maxValues"] == {"id": 2, "s": "a" * 16 + "\U0010ffff"}
    assert stats["nullCount"] == {"id": 0, "f": 0, "s": 1, "z": 2}
    assert len(sink.open(TABLE).file_uris(file_pruning_predicate="id > 2")) == 0
    assert len(sink.open(TABLE).file_uris(file_pruning_predicate="id > 1")) == 1


def test_many_row_groups_and_files_are_rewritten_row_by_row_exactly(rewriting: DeltaSink) -> None:
    rewriting = DeltaSink(rewriting.path, file_size=200_000)
    count = 3 * ROW_GROUP_ROWS + 17
    ids = np.arange(count)
    table = pa.table([ids, pa.array(ids).cast(pa.string())], schema=SCHEMA)
    staged = begin(rewriting, table)
    assert len(staged) > 1
    gone, changed = ids[::1000], ids[1::997]
    changed = np.setdiff1d(changed, gone)
    do(rewriting, *[delete(int(i)) for i in gone], *[update(int(i)) for i in changed])
    expected = {int(i): str(i) for i in ids} | {int(i): "new" for i in changed}
    for i in gone:
        del expected[int(i)]
    assert content(rewriting) == sorted(expected.items())


def test_wide_rows_have_small_row_groups_so_that_few_bytes_are_read_for_a_toast_value(sink: DeltaSink) -> None:
    wide = pa.table([range(10_000), ["x" * 4000] * 10_000], schema=SCHEMA)
    [file] = begin(sink, wide)
    groups = list(row_groups(sink.directory(TABLE), file.path, SCHEMA))
    assert max(group.rows for group in groups) * 4000 <= 8 << 20
    assert sum(group.rows for group in groups) == 10_000


def test_a_file_ends_when_its_key_index_takes_much_memory(
    sink: DeltaSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(parquet, "_MAX_INDEX_BYTES", 10_000)
    sink = DeltaSink(sink.path, index=str(tmp_path / "index"))
    begin(sink, rows(0))
    do(sink, *[Change("I", (i, "new")) for i in range(1, 1000)], update(0))
    assert len(files(sink)) == 4  # 40 bytes per row, in whole row groups
    do(sink, update(999, "newer"), delete(0), lsn=300)
    assert content(sink) == [(i, "new") for i in range(1, 999)] + [(999, "newer")]


def test_small_files_that_are_touched_become_one(rewriting: DeltaSink) -> None:
    begin(rewriting, *[rows(i) for i in range(20)])
    do(rewriting, *[update(i) for i in range(20)], Change("I", (99, "x")))
    assert len(files(rewriting)) == 1
    assert len(content(rewriting)) == 21


def test_a_file_that_loses_all_its_rows_is_not_replaced(sink: DeltaSink) -> None:
    parts = begin(sink, rows(1, 2), rows(11, 12))
    do(sink, delete(1), delete(2))
    assert files(sink) == {parts[1].path}


def test_compacting_keeps_rows_and_lsn_and_says_that_no_data_changed(sink: DeltaSink) -> None:
    begin(sink, *[rows(i) for i in range(20)])
    before = content(sink)
    version = sink.optimize(TABLE)
    assert version == sink.version(TABLE)
    assert sink.optimize(TABLE) is None
    assert len(files(sink)) == 1
    assert (content(sink), sink.applied(TABLE)) == (before, Lsn(100))
    log = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json").read_text().splitlines()
    changes = [
        action[kind]["dataChange"] for action in map(json.loads, log) for kind in action if kind in ("add", "remove")
    ]
    assert set(changes) == {False}


def test_tidying_joins_small_files_and_deletes_those_long_out_of_use(sink: DeltaSink) -> None:
    sink.create(TABLE, SCHEMA)
    for number in range(1, 41):
        do(sink, Change("I", (number, "x")), lsn=number)
        sink.optimize(TABLE)
        sink.vacuum(TABLE)
    assert len(files(sink)) <= 2 * JOIN_FILES
    on_disk = {path.name for path in Path(sink.location(TABLE)).glob("*.parquet")}
    assert len(on_disk) > 40, "somebody may still read them"
    [staged] = sink.stage(TABLE, rows(100).to_batches())
    DeltaSink(sink.path, keep_seconds=0).vacuum(TABLE)
    on_disk = {path.name for path in Path(sink.location(TABLE)).glob("*.parquet")}
    assert on_disk == files(sink) | {staged.path}
    assert content(sink) == [(number, "x") for number in range(1, 41)]
    assert sink.applied(TABLE) == Lsn(40)


def test_a_batch_and_a_compaction_at_once_both_come_out(sink: DeltaSink) -> None:
    begin(sink, *[rows(i) for i in range(20)])
    stop = threading.Event()

    def compacting() -> None:
        while not stop.is_set():
            sink.optimize(TABLE, limits=Upkeep(deleted_share=0))

    thread = threading.Thread(target=compacting)
    thread.start()
    try:
        for number in range(15):
            do(sink, update(number), Change("I", (100 + number, "x")), lsn=200 + number)
    finally:
        stop.set()
        thread.join()
    assert content(sink) == sorted(
        [(i, "new") for i in range(15)] + [(i, "x") for i in range(15, 20)] + [(100 + i, "x") for i in range(15)]
    )


def test_others_who_commit_without_end_are_an_error_that_may_pass(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(sink, rows(1))
    real = Directory.create

    def late(self: Directory, name: str, content: bytes) -> bool:
        write_deltalake(sink.location(TABLE), rows(7), mode="append")
        return real(self, name, content)

    monkeypatch.setattr(Directory, "create", late)
    with pytest.raises(SinkConflict, match="10 times") as caught:
        do(sink, update(1))
    assert caught.value.transient
    monkeypatch.undo()
    assert (1, "x") in content(sink)
    assert sink.applied(TABLE) == Lsn(100)


def test_files_of_other_writers_and_other_writers_themselves_get_along(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    write_deltalake(sink.location(TABLE), rows(2, 3), mode="append")
    do(sink, update(2), delete(1))
    assert content(sink) == [(2, "new"), (3, "x")]
    DeltaTable(sink.location(TABLE)).optimize.compact()
    DeltaTable(sink.location(TABLE)).delete("id = 3")
    do(sink, update(2, "newer"), lsn=300)
    assert content(sink) == [(2, "newer")]
    assert sink.applied(TABLE) == Lsn(300)


def test_a_column_added_later_is_null_in_older_files_when_they_are_rewritten(rewriting: DeltaSink) -> None:
    begin(rewriting, rows(1, 2))
    wider = SCHEMA.append(pa.field("more", pa.int32()))
    DeltaTable(rewriting.location(TABLE)).alter.add_columns(Schema.from_arrow(wider).fields[2])
    do(rewriting, Change("U", (1, "new", 5)), schema=wider)
    assert content(rewriting) == [(1, "new", 5), (2, "x", None)]


def test_vacuum_takes_what_nobody_committed_and_nothing_else(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    orphans = sink.stage(TABLE, rows(2).to_batches())
    do(sink, Change("I", (3, "x")))
    taken = sink.open(TABLE).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert taken == [file.path for file in orphans]
    assert content(sink) == [(1, "x"), (3, "x")]


def test_files_with_deletion_vectors_are_read_without_their_dead_rows(rewriting: DeltaSink) -> None:
    parts = begin(rewriting, rows(1, 2, 3, 4), rows(11, 12), rows(21, 22))
    first = parts[0]
    delete_rows(rewriting, TABLE, first, 1, 2)
    assert content(rewriting) == [(1, "x"), (4, "x"), (11, "x"), (12, "x"), (21, "x"), (22, "x")]

    do(rewriting, update(11))  # does not touch it, but no file keeps its vector
    assert first.path not in files(rewriting)
    assert parts[2].path in files(rewriting)
    assert rewriting.open(TABLE).protocol().reader_features in (None, [])
    do(rewriting, update(4), Change("I", (2, "again")), lsn=300)
    expected = [(1, "x"), (2, "again"), (4, "new"), (11, "new"), (12, "x"), (21, "x"), (22, "x")]
    assert content(rewriting) == expected
    do(rewriting, delete(2), lsn=400)
    assert content(rewriting) == [row for row in expected if row[0] != 2]


def test_a_partitioned_table_is_refused(sink: DeltaSink) -> None:
    write_deltalake(sink.location(TABLE), rows(1), partition_by=["id"])
    with pytest.raises(SinkMismatch, match="partitioned"):
        do(sink, update(1))


def configuration(sink: DeltaSink) -> dict[str, str]:
    return sink.open(TABLE).metadata().configuration


def test_the_log_is_kept_for_longer_than_versions_can_be_read(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    assert configuration(sink) == {
        "delta.checkpointInterval": "100",
        "delta.enableDeletionVectors": "true",
        "delta.logRetentionDuration": "interval 6 hours",
        "delta.deletedFileRetentionDuration": "interval 2 hours",
    }
    longer = DeltaSink(sink.path, keep_seconds=7 * 86_400)
    do(longer, update(1), lsn=200)
    assert configuration(sink)["delta.logRetentionDuration"] == "interval 173 hours"
    assert configuration(sink)["delta.deletedFileRetentionDuration"] == "interval 169 hours"
    version = do(longer, update(1, "newer"), lsn=300)
    assert version == 3, "created, copied, two batches: the first sets the properties"
    assert content(sink) == [(1, "newer")]


def test_what_somebody_else_wants_kept_for_longer_stays_so(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    theirs = {"delta.logRetentionDuration": "interval 3 weeks", "delta.deletedFileRetentionDuration": "for ever"}
    sink.open(TABLE).alter.set_table_properties(theirs, raise_if_not_exists=False)
    do(DeltaSink(sink.path, keep_seconds=86_400), update(1))
    assert configuration(sink).items() >= theirs.items()


def test_a_checkpoint_that_cannot_be_written_is_a_warning(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "2"})
    begin(sink, rows(1))

    def full(_: DeltaTable) -> None:
        raise OSError("No space left on device")

    with caplog.at_level("WARNING"), monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_checkpoint", full)
        for number in range(2):
            do(sink, update(1, str(number)), lsn=200 + number)
    assert "checkpoint of the Delta table" in caplog.text
    assert "No space left on device" in caplog.text
    assert rows_of(pa.table(sink.open(TABLE).scan())) == [(1, "1")]


def test_a_version_outlives_a_log_that_is_cleaned_up(sink: DeltaSink) -> None:
    """A table that rests for days, and changes: what it was a minute ago needs entries of the log from days ago."""
    sink = DeltaSink(sink.path, properties={"delta.checkpointInterval": "10"})
    begin(sink, rows(1))
    for number in range(11):
        resting = do(sink, update(1, str(number)), lsn=200 + number)
    log = Path(sink.location(TABLE), "_delta_log")
    before = len(list(log.iterdir()))
    for file in log.iterdir():
        os.utime(file, (time.time() - 9 * 86_400,) * 2)
    for number in range(25):
        do(sink, update(1, "x"), lsn=300 + number)
    assert len(list(log.glob("*.json"))) < before + 25, "it was cleaned up"
    assert rows_of(pa.table(sink.open(TABLE, resting).scan())) == [(1, "10")]


def test_the_schema_and_the_subscription_that_are_called_as_our_own_place_have_one_each(sink: DeltaSink) -> None:
    table = TableName("_walmere", "shop")
    sink.create(table, SCHEMA)
    sink.open_ledger("shop", []).append(Entry(Lsn(1), None, {str(table): 0}))
    assert (sink.subscriptions(), sink.version(table)) == (["shop"], 0)
    latest = json.loads(Path(sink.path, "_walmere/shop/latest.json").read_text())
    assert (latest["lsn"], latest["commit_time"]) == ("0/1", None)
    assert latest["tables"] == [{"schema": "_walmere", "name": "shop", "path": "~5Fwalmere/shop", "version": 0}]


def test_a_lake_that_cannot_be_written_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file")
    with pytest.raises(SinkError, match="writing the newest point"):
        DeltaSink(str(tmp_path / "lake")).open_ledger("shop", [])


OURS, THEIRS = Owner("shop", "7000000000000000000", 16384), Owner("shop", "7000000000000000000", 16385)


def test_a_table_of_another_owner_is_refused_until_it_is_taken_over(sink: DeltaSink) -> None:
    ours, theirs = sink.owned_by(OURS), sink.owned_by(THEIRS)
    begin(ours, rows(1, 2))
    before = ours.version(TABLE)
    attempts: list[Callable[[], object]] = [
        lambda: theirs.create(TABLE, SCHEMA),
        lambda: theirs.claim(TABLE),
        lambda: theirs.commit(TABLE, [], Lsn(900)),
        lambda: theirs.evolve(TABLE, SCHEMA, SCHEMA.names),
    ]
    for attempt in attempts:
        with pytest.raises(OwnedByAnother, match=r"OID 16384(.|\n)*--take-over"):
            attempt()
    assert (ours.version(TABLE), ours.claim(TABLE)) == (before, False)
    assert sink.owned_by(THEIRS, take_over=True).claim(TABLE)
    assert theirs.applied(TABLE) == Lsn(0), "an LSN of another source means nothing"
    assert content(theirs) == [(1, "x"), (2, "x")], "the rows stay until a copy replaces them"
    with pytest.raises(OwnedByAnother, match="OID 16385"):
        do(ours, update(1), lsn=900)
    do(theirs, update(1), lsn=50)
    assert theirs.applied(TABLE) == Lsn(50)


def test_a_table_without_an_owner_is_adopted_if_it_is_ours_and_points_have_an_owner_too(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    assert not sink.owned_by(OURS).claim(TABLE)
    assert sink.owned_by(OURS).applied(TABLE) == sink.applied(TABLE)
    with pytest.raises(OwnedByAnother):
        sink.owned_by(THEIRS).claim(TABLE)
    sink.owned_by(OURS).open_ledger("shop", [])
    with pytest.raises(OwnedByAnother, match="the name shop belongs to"):
        sink.owned_by(THEIRS).open_ledger("shop", [])
    sink.owned_by(THEIRS, take_over=True).open_ledger("shop", [])
    sink.owned_by(THEIRS).claim_points("shop")


def test_commits_of_others_are_told_from_ours_and_from_those_that_change_no_rows(sink: DeltaSink) -> None:
    begin(sink, rows(1))
    made = sink.version(TABLE)
    do(sink, update(1), lsn=200)
    sink.evolve(TABLE, SCHEMA.append(pa.field("n", pa.int64())), [*SCHEMA.names, pa.scalar(7, pa.int64())])
    for _ in range(3):
        DeltaTable(sink.location(TABLE)).alter.set_table_properties({"delta.appendOnly": "false"})
    DeltaTable(sink.location(TABLE)).optimize.compact()
    sink.optimize(TABLE, limits=Upkeep(deleted_share=0))
    assert sink.changed_by_others(TABLE, made, sink.version(TABLE)) is None
    before = sink.version(TABLE)
    DeltaTable(sink.location(TABLE)).restore(made)
    assert sink.changed_by_others(TABLE, made, sink.version(TABLE)) == f"version {before + 1}, RESTORE"
    assert sink.changed_by_others(TABLE, before, before + 2) is not None, "what the log does not have may be anything"


@pytest.mark.parametrize("content", [b'{"add": ', b"\x00\x01", b"\xff\xfe"])
def test_a_log_that_cannot_be_read_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    sink = DeltaSink(str(tmp_path / "lake"))
    begin(sink, rows(1))
    path = Path(sink.location(TABLE)) / "_delta_log"
    (path / f"{sink.version(TABLE):020d}.json").write_bytes(content)
    with pytest.raises(SinkMismatch, match=r"_delta_log cannot be read") as caught:
        sink.standing(TABLE)
    assert "\n" not in caught.value.wrong
