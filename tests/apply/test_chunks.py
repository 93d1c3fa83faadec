"""Many changes are applied to a database in chunks, with the same result as all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conftest import Database
from receiving import receive_all
from sinks.subjects import sink_of
from walmere.apply import chunks
from walmere.apply import transaction as applying
from walmere.apply.decode import shape_of
from walmere.apply.jobs import ApplyJob, Batch
from walmere.apply.transaction import apply_batch
from walmere.apply.worker import Applied
from walmere.changelog import plan
from walmere.changelog.plan import Blocks, Planner, TwoPhase
from walmere.changelog.read_ahead import read_blocks
from walmere.changelog.segment_entry import Segment
from walmere.config import Config
from walmere.errors import Conflict
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.sinks.postgres import prepared
from walmere.sinks.postgres.rows import apply as staging
from walmere.sinks.postgres.sink import PostgresSink
from walmere.sinks.postgres.statements import RowSet
from walmere.sinks.postgres.transaction import TargetTransaction

TABLES = ("t", "u")


class Replica:
    """A source with a change log, and a database with the same tables."""

    def __init__(self, source: Database, target: Database, config: Config, **sink: Any) -> None:
        self.source, self.target, self.config = source, target, config
        create = [f"CREATE TABLE {each} (id int PRIMARY KEY, v int UNIQUE, w text)" for each in TABLES]
        source.execute(*create, "CREATE PUBLICATION pub FOR TABLE t, u")
        target.execute(*create)
        receive_all(source, config)
        self.sink: PostgresSink = sink_of(target, **sink)
        self.start = Planner(config.changelog).end_lsn
        for each in TABLES:
            self.sink.begin_copy(TableName("public", each), ["id", "v", "w"]).finish(self.start)

    def write(self, *transactions: str) -> None:
        """Write transactions. Those of each call are in a segment of their own."""
        self.source.execute(*transactions)
        self.end = receive_all(self.source, self.config)

    def apply(self, skip: Lsn | None = None, two_phase: TwoPhase | None = None) -> list[Applied]:
        planner = Planner(self.config.changelog)
        oids = {self.source.value(f"SELECT '{each}'::regclass::oid::int8"): each for each in TABLES}
        made = planner.plan(dict.fromkeys(oids, self.start), planner.end_lsn)
        jobs = []
        for oid, refs in made.blocks.items():
            used = {(ref.block.relation, ref.version) for ref in refs}
            versions = {number: made.definitions[number] for number in used}
            [version] = versions.values()
            name = TableName("public", oids[oid])
            stored = self.sink.standing(name)
            assert stored is not None
            rest: Any = (made.end_lsn, False, None, True, None, stored.version, self.start, two_phase is not None)
            blocks = Blocks(self.config.changelog, refs, versions)
            jobs.append(ApplyJob(oid, name, shape_of(version.relation), blocks, {}, *rest))
        return apply_batch(jobs, Batch(made.end_lsn, None, tuple(oids), skip=skip, two_phase=two_phase), self.sink)

    def assert_equal(self) -> None:
        for each in TABLES:
            query = f"SELECT * FROM {each} ORDER BY id"
            assert self.target.rows(query) == self.source.rows(query), each


@pytest.fixture
def target(database18: Database) -> Iterator[Database]:
    made = Database(database18.server)
    yield made
    sink_of(made).drop()
    made.drop()


@pytest.fixture
def replica(database18: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)  # each segment is a chunk
    return Replica(database18, target, database18.config(tmp_path))


@pytest.fixture
def applied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of changes that were applied so."""
    counts: list[int] = []

    def counted(*arguments: Any) -> int:
        counts.append(chunks.apply_in_chunks(*arguments))
        return counts[-1]

    monkeypatch.setattr(applying, "apply_in_chunks", counted)
    return counts


def write_all(replica: Replica) -> None:
    """Rows are inserted, changed, moved and deleted in different chunks."""
    replica.write("INSERT INTO t SELECT i, i, 'a' FROM generate_series(1, 50) i", "INSERT INTO u VALUES (1, 1, 'u')")
    replica.write(
        "UPDATE t SET w = 'b' WHERE id % 2 = 0",
        "UPDATE t SET id = id + 100 WHERE id % 5 = 0",
        "INSERT INTO t VALUES (5, 500, 'again')",
        "UPDATE u SET w = 'v'",
    )
    replica.write(
        "BEGIN; UPDATE t SET v = -v WHERE id < 10; UPDATE t SET v = 10 + v WHERE id < 10; COMMIT",
        "DELETE FROM t WHERE id % 3 = 0",
        "INSERT INTO u VALUES (2, 2, NULL)",
    )


def test_the_result_is_that_of_the_source(replica: Replica, applied_in_chunks: list[int]) -> None:
    write_all(replica)
    results = replica.apply()
    replica.assert_equal()
    assert sorted(applied_in_chunks) == sorted(each.changes for each in results)
    assert len(applied_in_chunks) == 2
    assert not replica.target.rows("SELECT FROM walmere.conflicts")
    assert {replica.sink.applied(TableName("public", each)) for each in TABLES} == {each.lsn for each in results}
    assert [each.changes for each in replica.apply()] == [0, 0], "it is applied already"


def test_a_chunk_whose_rows_are_missing_is_applied_row_by_row(replica: Replica, applied_in_chunks: list[int]) -> None:
    replica.write("INSERT INTO t SELECT i, i, 'a' FROM generate_series(1, 4) i")
    replica.apply()
    replica.start = Planner(replica.config.changelog).end_lsn
    replica.target.execute("DELETE FROM t WHERE id = 2")
    replica.write("UPDATE t SET w = 'b' WHERE id IN (1, 2)")
    replica.write("DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (2, 2, 'c')")
    replica.write("UPDATE t SET w = 'd' WHERE id > 1")
    replica.apply()
    replica.assert_equal()
    assert applied_in_chunks[-1] == 7
    found = replica.target.rows("SELECT conflict FROM walmere.conflicts ORDER BY id")
    assert found == [("update_missing",), ("delete_missing",)]


def test_conflicts_of_all_chunks_are_recorded_once(replica: Replica) -> None:
    replica.write("INSERT INTO t VALUES (1, 1, 'a')")
    replica.apply()
    replica.start = Planner(replica.config.changelog).end_lsn
    replica.target.execute("DELETE FROM t", "INSERT INTO t VALUES (3, 3, 'mine')")
    replica.write("UPDATE t SET w = 'missing' WHERE id = 1")
    replica.write("INSERT INTO t VALUES (3, 3, 'refused')", "INSERT INTO t VALUES (4, 4, 'new')")
    for _ in range(2):
        with pytest.raises(Conflict):
            replica.apply()
    replica.sink = sink_of(replica.target, on_conflict="skip")
    replica.apply()
    found = replica.target.rows("SELECT conflict FROM walmere.conflicts ORDER BY id")
    assert found == [("multiple_unique_conflicts",), ("update_missing",)]


def test_a_conflict_in_a_later_chunk_leaves_nothing(replica: Replica) -> None:
    replica.target.execute("INSERT INTO t VALUES (-1, 7, 'mine')")
    write_all(replica)
    with pytest.raises(Conflict, match=r"insert_exists in public\.t.*t_v_key"):
        replica.apply()
    assert replica.target.rows("SELECT * FROM t") == [(-1, 7, "mine")]
    assert replica.target.rows("SELECT * FROM u") == []
    assert replica.sink.applied(TableName("public", "t")) == replica.start


def test_a_truncate_of_several_tables_undoes_the_chunks_before_it(
    replica: Replica, applied_in_chunks: list[int]
) -> None:
    write_all(replica)
    replica.write("TRUNCATE t, u", "INSERT INTO t VALUES (1, 1, 'after')")
    replica.write("INSERT INTO u VALUES (9, 9, 'after')")
    replica.apply()
    replica.assert_equal()
    assert applied_in_chunks == []
    assert replica.target.rows("SELECT id FROM u") == [(9,)]


def test_a_transaction_is_skipped(replica: Replica) -> None:
    write_all(replica)
    before = Planner(replica.config.changelog).end_lsn
    replica.write("BEGIN; INSERT INTO t VALUES (1000, 1000, 'skipped'); DELETE FROM t WHERE id < 5; COMMIT")
    replica.write("UPDATE t SET w = 'later' WHERE id = 7")
    planner = Planner(replica.config.changelog)
    oid = replica.source.value("SELECT 't'::regclass::oid::int8")
    [(_, messages), *_] = plan.messages(
        replica.config.changelog, planner.plan({oid: before}, planner.end_lsn).blocks[oid]
    )
    replica.apply(skip=Lsn(messages["commit_lsn"][0].as_py()))
    assert replica.target.rows("SELECT id FROM t WHERE id < 5 OR id >= 1000 ORDER BY id") == [(1,), (2,), (4,)]
    assert replica.target.value("SELECT w FROM t WHERE id = 7") == "later"


TRIGGER = (
    "CREATE TABLE log (n int GENERATED ALWAYS AS IDENTITY, what text)",
    "CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN INSERT INTO public.log (what) VALUES (TG_OP || ' ' || TG_RELNAME); RETURN coalesce(NEW, OLD); END $$",
    *(
        f"CREATE TRIGGER log BEFORE INSERT OR UPDATE OR DELETE ON {t} FOR EACH ROW EXECUTE FUNCTION log()"
        for t in TABLES
    ),
    *(f"ALTER TABLE {t} ENABLE ALWAYS TRIGGER log" for t in TABLES),
)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much memory Arrow has used, each time that changes were sent to be applied row by row."""
    sizes: list[int] = []
    before = pa.total_allocated_bytes()
    send = staging._copy

    def measured(*arguments: Any) -> None:
        sizes.append(pa.total_allocated_bytes() - before)
        send(*arguments)

    monkeypatch.setattr(staging, "_copy", measured)
    return sizes


def test_memory_does_not_grow_with_changes_that_are_applied_row_by_row(replica: Replica, in_memory: list[int]) -> None:
    replica.target.execute(*TRIGGER)
    peaks = []
    for segments in (2, 12):
        del in_memory[:]
        for _ in range(segments):
            replica.write(
                "INSERT INTO t SELECT i, NULL, repeat(md5(i::text), 300) FROM"
                " (SELECT coalesce(max(id), 0) AS last FROM t) m, generate_series(last + 1, last + 200) i"
            )
        replica.apply()
        replica.start = Planner(replica.config.changelog).end_lsn
        peaks.append(max(in_memory))
    replica.assert_equal()
    assert replica.target.value("SELECT count(*) FROM log") == 14 * 200
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_tables_that_are_applied_row_by_row_in_pieces_are_changed_in_order(replica: Replica) -> None:
    replica.target.execute(*TRIGGER)
    for i in range(4):
        replica.write(f"BEGIN; INSERT INTO u VALUES ({i}, {i}, 'u'); INSERT INTO t VALUES ({i}, {i}, 't'); COMMIT")
        replica.write("BEGIN; UPDATE t SET w = w || 't'; DELETE FROM u; COMMIT")
    results = replica.apply()
    replica.assert_equal()
    expected = []
    for i in range(4):
        expected += ["INSERT u", "INSERT t", *["UPDATE t"] * (i + 1), "DELETE u"]
    assert replica.target.rows("SELECT what FROM log ORDER BY n") == [(each,) for each in expected]
    assert sum(each.changes for each in results) == len(expected)


def test_a_prepared_transaction_whose_segments_are_deleted_while_it_is_applied_waits_for_its_end(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROLLBACK PREPARED lets the receiver delete them. Row by row, they are read again, chunk after chunk."""
    replica.target.execute(*TRIGGER)
    for i in range(3):
        replica.write(f"INSERT INTO t VALUES ({i}, {i}, 't')")
    send = staging._copy

    def deleted_meanwhile(*arguments: Any) -> None:
        send(*arguments)
        for each in replica.config.changelog.iterdir():
            each.unlink()

    monkeypatch.setattr(staging, "_copy", deleted_meanwhile)
    assert replica.apply(two_phase=TwoPhase("prepare", "gid", replica.start)) == []
    assert replica.target.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 1
    replica.sink.finish_prepared(prepared.gid_of(replica.sink.state, "gid"), commit=False, end_lsn=replica.end)
    assert not replica.target.rows("SELECT FROM pg_prepared_xacts WHERE database = current_database()")
    assert not replica.target.rows("SELECT FROM t")
    assert not replica.target.rows("SELECT FROM log")


class Gathered(Replica):
    """The partitions of `p` are published each under its own name, and are one table of the target."""

    def __init__(self, source: Database, target: Database, config: Config) -> None:
        super().__init__(source, target, config)
        columns = "id int PRIMARY KEY, v int, w text"
        source.execute(
            f"CREATE TABLE p ({columns}) PARTITION BY RANGE (id)",
            # in the log, blocks are in the order of their OIDs: this is not the order of the changes
            "CREATE TABLE high PARTITION OF p FOR VALUES FROM (1000) TO (2000000)",
            "CREATE TABLE low PARTITION OF p FOR VALUES FROM (-2000000) TO (1000)",
            "ALTER PUBLICATION pub ADD TABLE low, high",
        )
        target.execute(f"CREATE TABLE p ({columns}, UNIQUE (v))")  # so changes of both partitions depend on each other
        self.start = receive_all(source, config)
        self.table = TableName("public", "p")
        self.sink.begin_copy(self.table, ["id", "v", "w"]).finish(self.start)

    def apply(self, skip: Lsn | None = None, two_phase: TwoPhase | None = None) -> list[Applied]:
        planner = Planner(self.config.changelog)
        root, *leaves = (self.source.value(f"SELECT '{each}'::regclass::oid::int8") for each in ("p", "low", "high"))
        made = planner.plan(dict.fromkeys(leaves, self.start), planner.end_lsn, dict.fromkeys(leaves, root))
        refs = made.blocks[root]
        versions = {number: made.definitions[number] for number in {(r.block.relation, r.version) for r in refs}}
        shape = shape_of(next(iter(versions.values())).relation)._replace(table=self.table)
        stored = self.sink.standing(self.table)
        assert stored is not None
        rest: Any = (made.end_lsn, False, Identity("d", ("id",)), True, None, stored.version, self.start)
        job = ApplyJob(root, self.table, shape, Blocks(self.config.changelog, refs, versions, 2), {}, *rest)
        return apply_batch([job], Batch(made.end_lsn, None, (root,), skip=skip, two_phase=two_phase), self.sink)

    def assert_equal(self) -> None:
        query = "SELECT * FROM p ORDER BY id"
        assert self.target.rows(query) == self.source.rows(query)


@pytest.fixture
def gathered(database18: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gathered:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    return Gathered(database18, target, database18.config(tmp_path))


@pytest.fixture
def in_memory_by_sets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much memory Arrow has used, each time that changes were applied by sets of rows."""
    sizes: list[int] = []
    before = pa.total_allocated_bytes()
    apply = TargetTransaction.apply_set

    def measured(transaction: TargetTransaction, rows: RowSet) -> bool:
        sizes.append(pa.total_allocated_bytes() - before)
        return apply(transaction, rows)

    monkeypatch.setattr(TargetTransaction, "apply_set", measured)
    return sizes


@pytest.fixture
def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The blocks of the log that were read, by segment and place, each as often as it was."""
    found: list[tuple[str, int]] = []

    def noted(directory: Path, segments: Sequence[Segment], store: Any = None) -> Any:
        found.extend((each.file, each.blocks[0].offset) for each in segments)
        return read_blocks(directory, segments, store)

    monkeypatch.setattr(plan, "read_blocks", noted)
    return found


def test_rows_of_a_gathered_table_that_move_between_partitions_are_applied_in_pieces_in_order(
    gathered: Gathered, in_memory_by_sets: list[int], applied_in_chunks: list[int], blocks_read: list[tuple[str, int]]
) -> None:
    for i in range(4):
        gathered.write(f"INSERT INTO p SELECT i, i, 'a' FROM generate_series({i * 10}, {i * 10 + 9}) i")
        gathered.write(
            "UPDATE p SET id = id + 1000, w = w || 'b' WHERE id < 1000 AND id % 3 = 0",
            f"INSERT INTO p VALUES ({5001 + 2 * i}, {-1 - i}, 'new')",
        )
        gathered.write(
            "BEGIN; UPDATE p SET id = id - 1000, w = w || 'c' WHERE id >= 1000 AND id % 2 = 0;"
            " UPDATE p SET id = id + 1000, w = w || 'd' WHERE id < 1000 AND id % 5 = 0; COMMIT",
            f"DELETE FROM p WHERE id % 7 = {i}",
        )
    [result] = gathered.apply()
    gathered.assert_equal()
    assert not gathered.target.rows("SELECT FROM walmere.conflicts")
    assert len(in_memory_by_sets) > 4
    assert applied_in_chunks == [result.changes]
    assert len(blocks_read) == len(set(blocks_read)), "each block is read once"


def test_a_gathered_table_is_truncated_between_pieces(gathered: Gathered, applied_in_chunks: list[int]) -> None:
    gathered.write("INSERT INTO p SELECT i, i, 'a' FROM generate_series(990, 1010) i")
    gathered.write("BEGIN; DELETE FROM p WHERE id < 995; TRUNCATE p; INSERT INTO p VALUES (1, 1, 'after'); COMMIT")
    gathered.write("UPDATE p SET id = 1001", "INSERT INTO p VALUES (1, 2, 'later')")
    gathered.apply()
    gathered.assert_equal()
    assert not gathered.target.rows("SELECT FROM walmere.conflicts")
    assert applied_in_chunks == []


def test_memory_does_not_grow_with_changes_of_a_gathered_table(
    gathered: Gathered, in_memory_by_sets: list[int]
) -> None:
    peaks = []
    for segments in (2, 12):
        del in_memory_by_sets[:]
        for _ in range(segments):
            gathered.write(
                "INSERT INTO p SELECT CASE i % 2 WHEN 0 THEN i ELSE -i END, NULL, repeat(md5(i::text), 300) FROM"
                " (SELECT coalesce(max(id), 1000) AS last FROM p) m, generate_series(last + 1, last + 200) i"
            )
        gathered.apply()
        gathered.start = Planner(gathered.config.changelog).end_lsn
        peaks.append(max(in_memory_by_sets))
    gathered.assert_equal()
    assert peaks[1] < 1.5 * peaks[0], peaks


@pytest.mark.parametrize("fires", [False, True], ids=["by sets", "row by row"])
def test_changes_around_truncates_are_applied_in_pieces(replica: Replica, in_memory: list[int], fires: bool) -> None:
    if fires:
        replica.target.execute(*TRIGGER)
    write_all(replica)
    replica.write("TRUNCATE t", "INSERT INTO t VALUES (1, 1, 'between')")
    replica.write("TRUNCATE t, u", "INSERT INTO t VALUES (1, 1, 'after'), (2, 2, 'after')")
    replica.write("UPDATE t SET v = v + 100, w = 'changed' WHERE id = 2", "INSERT INTO u VALUES (9, 9, 'after')")
    results = replica.apply()
    replica.assert_equal()
    assert not replica.target.rows("SELECT FROM walmere.conflicts")
    assert [each.changes > 3 for each in results] == [True, True]
    assert len(in_memory) > 2 or not fires
