"""The proof: every table of the target is compared with its source at one LSN, and what is wrong is found and named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import Here, eventually, running
from walmere.api import Subscription
from walmere.lsn import Lsn
from walmere.verify.proof import Proof, Verdict, VerifyOptions


@pytest.fixture
def mirror(database_under_test: Database, tmp_path: Path) -> Mirror:
    database_under_test.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text, price numeric(10,2), seen timestamptz, ratio float8,"
        " tags text[])",
        "INSERT INTO t SELECT i, 'note ' || i, i / 7.0, '2026-01-01'::timestamptz + i * interval '1 min', sqrt(i),"
        " ARRAY['a', NULL, i::text] FROM generate_series(1, 2000) i",
        "CREATE TABLE other (code text PRIMARY KEY, day date, body bytea, doc jsonb)",
        "INSERT INTO other SELECT 'c' || i, '2026-01-01'::date + i, decode('00ff', 'hex'), '{\"a\": 1}'"
        " FROM generate_series(1, 300) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    return Mirror(database_under_test, tmp_path)


def verify(mirror: Mirror, *tables: str, **options: Any) -> Proof:
    return Subscription(mirror.file).verify(tables, VerifyOptions(**options))


def verdict(mirror: Mirror, table: str, **options: Any) -> Verdict:
    [found] = verify(mirror, table, **options).tables
    return found


AS_OURS = CommitProperties(custom_metadata={"walmere.lsn": "0/0"})
"""Of a commit that looks like the subscription's own: one of another program is noticed, and the table copied again."""


def damage(mirror: Mirror, table: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write the target's table anew, changed behind the subscription's back."""
    opened = mirror.delta(table)
    write_deltalake(opened, change(read_delta(opened)), mode="overwrite", commit_properties=AS_OURS)


def put(rows: pa.Table, column: str, where: str, key: Any, value: Any) -> pa.Table:
    """The same rows, with another value in one place."""
    place = rows.column_names.index(column)
    values = [
        value if mine == key else old
        for mine, old in zip(rows[where].to_pylist(), rows[column].to_pylist(), strict=True)
    ]
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))


@pytest.mark.long
def test_without_a_run_it_goes_up_to_the_point_itself(mirror: Mirror) -> None:
    mirror.run_once()
    mirror.database.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    assert verify(mirror).equal
    mirror.database.execute("UPDATE t SET note = 'new' WHERE id <= 10", "DELETE FROM t WHERE id > 1990")
    before = Lsn.parse(mirror.database.value("SELECT pg_current_wal_insert_lsn()::text"))
    proof = verify(mirror)
    assert proof.equal
    assert proof.lsn >= before, "what was committed before is compared"
    assert {each.name: (each.source_rows, each.target_rows) for each in proof.tables} == {
        "public.late": (1, 1),
        "public.other": (300, 300),
        "public.t": (1990, 1990),
    }
    mirror.assert_equal("t", "other")


def test_a_run_goes_on_while_it_is_compared_with(mirror: Mirror) -> None:
    database = mirror.database
    ended = threading.Event()

    def write() -> None:
        number = 10_000
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            while not ended.is_set():
                number += 1
                connection.execute("INSERT INTO t (id, note) VALUES (%s, 'load')", [number])
                connection.execute("UPDATE t SET ratio = -ratio WHERE id = 1 + %s %% 2000", [number])
                connection.execute("UPDATE other SET day = day + 1 WHERE code = 'c' || 1 + %s %% 300", [number])

    writer = threading.Thread(target=write)
    with mirror.following():
        mirror.becomes_equal("t", "other")
        writer.start()
        try:
            proofs = [verify(mirror) for _ in range(2)]
        finally:
            ended.set()
            writer.join()
        mirror.becomes_equal("t", "other")
    assert all(proof.equal for proof in proofs), proofs
    counts = [proof.tables[1].source_rows for proof in proofs]
    assert counts == sorted(set(counts)), "rows came in between: it was not the same point each time"
    mirror.assert_equal("t", "other")


@pytest.mark.long
def test_any_other_value_is_found_and_named(mirror: Mirror) -> None:
    mirror.run_once()
    damage(mirror, "t", lambda rows: put(rows, "price", "id", 77, pa.scalar(1).as_py()))
    other, found = verify(mirror, show_values=True).tables
    assert other.equal, "the other table is as it was"
    assert (found.missing, found.extra, found.different) == (0, 0, 1), found
    [row] = found.examples
    assert (row.what, row.key, row.columns) == ("different", {"id": "77"}, ("price",))
    assert (row.source, row.target) == ({"price": "11.00"}, {"price": "1.00"})
    damage(mirror, "t", lambda rows: put(rows, "price", "id", 77, pa.scalar(11).as_py()))
    wrong: list[tuple[int, str, Any]] = [
        (1, "note", None),
        (2, "note", ""),
        (4, "ratio", -2.0),
        (5, "tags", []),
        (6, "tags", None),
        (7, "seen", None),
        # as a wrong cast would make them
        (8, "price", Decimal("1.10")),
        (9, "seen", datetime(2026, 1, 1, 1, 9, tzinfo=UTC)),
        (10, "ratio", struct.unpack("f", struct.pack("f", 10**0.5))[0]),
        (11, "tags", ["11", None, "a"]),
        (12, "note", "note 12 "),
    ]

    def change(rows: pa.Table) -> pa.Table:
        for key, column, value in wrong:
            rows = put(rows, column, "id", key, value)
        return rows

    damage(mirror, "t", change)

    def change_other(rows: pa.Table) -> pa.Table:
        rows = put(put(rows, "body", "code", "c4", b"\x00\xfe"), "doc", "code", "c5", "{}")
        return put(put(rows, "body", "code", "c6", b"00ff"), "day", "code", "c7", date(2026, 1, 7))

    damage(mirror, "other", change_other)
    other, found = verify(mirror).tables
    assert [(row.key["id"], row.columns) for row in found.examples] == sorted(
        (str(key), (name,)) for key, name, _ in wrong
    )
    assert [(row.key["code"], row.columns) for row in other.examples] == [
        ("c4", ("body",)),
        ("c5", ("doc",)),
        ("c6", ("body",)),
        ("c7", ("day",)),
    ]
    assert all(row.source is row.target is None for row in other.examples), "values are for who asks for them"


BROKEN = """
from walmere.types.date import TimestampTz
import pyarrow as pa

right = TimestampTz._cast

def an_hour_late(self, text):
    cast = right(self, text)
    late = pa.compute.add(cast.values.view(pa.int64()), 3_600_000_000)
    return type(cast)(late.view(cast.values.type), cast.rejected)

TimestampTz._cast = an_hour_late
"""


@pytest.mark.long
def test_a_wrong_cast_is_found_although_verify_has_it_too(mirror: Mirror, tmp_path: Path) -> None:
    """Every process has the broken codec: the driver, the tasks that copy, and the tasks that compare."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BROKEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def walmere(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "walmere", *arguments, "-c", str(mirror.file)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    copied = walmere("run", "--once")
    assert copied.returncode == 0, copied.stderr
    [seen] = read_delta(mirror.delta("t")).filter(pc.field("id") == 60)["seen"].to_pylist()
    assert seen == datetime(2026, 1, 1, 2, tzinfo=UTC), "the codec is broken"
    compared = walmere("verify", "--json")
    assert compared.returncode == 1, compared.stderr
    found = {each["name"]: each for each in json.loads(compared.stdout)["tables"]}
    assert found["public.other"]["equal"]
    assert (found["public.t"]["missing"], found["public.t"]["extra"], found["public.t"]["different"]) == (0, 0, 2000)
    assert {tuple(each["columns"]) for each in found["public.t"]["examples"]} == {("seen",)}


def test_rows_too_few_too_many_twice_or_all_wrong_are_found_and_named(mirror: Mirror) -> None:
    mirror.run_once()
    whole = read_delta(mirror.delta("t"))
    missing = whole.filter(pa.compute.equal(whole["id"], 500))
    damage(mirror, "t", lambda rows: rows.filter(pa.compute.not_equal(rows["id"], 500)))
    found = verdict(mirror, "t")
    assert (found.source_rows, found.target_rows, found.missing, found.extra, found.different) == (2000, 1999, 1, 0, 0)
    assert [(row.what, row.key) for row in found.examples] == [("missing", {"id": "500"})]

    def one_more(rows: pa.Table) -> pa.Table:
        row = rows.filter(pa.compute.equal(rows["code"], "c5"))
        return pa.concat_tables([rows, put(row, "code", "code", "c5", "c999")])

    damage(mirror, "other", one_more)
    found = verdict(mirror, "other")
    assert (found.missing, found.extra, found.different) == (0, 1, 0)
    assert [(row.what, row.key) for row in found.examples] == [("extra", {"code": "c999"})]
    damage(mirror, "t", lambda rows: pa.concat_tables([rows, missing]))
    damage(mirror, "t", lambda rows: pa.concat_tables([rows, rows.filter(pa.compute.equal(rows["id"], 41))]))
    found = verdict(mirror, "t")
    assert (found.target_rows, found.missing, found.extra, found.different) == (2001, 0, 1, 0)
    assert [(row.what, row.key) for row in found.examples] == [("extra", {"id": "41"})]
    damage(mirror, "t", lambda rows: rows.set_column(1, rows.schema.field(1), pa.nulls(len(rows), pa.string())))
    found = verdict(mirror, "t", examples=5)
    assert (found.missing, found.extra, found.different) == (0, 1, 2000), "all of it is counted, and some named"
    assert len(found.examples) == 5
    assert {row.columns for row in found.examples} == {("note",)}


@pytest.mark.long
def test_a_multiset_has_no_keys_but_is_compared_all_the_same(mirror: Mirror) -> None:
    database = mirror.database
    database.execute(
        "CREATE TABLE bag (a int, b text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT i % 10, NULLIF(i % 3, 0)::text FROM generate_series(1, 100) i",
    )
    mirror.run_once()
    database.execute(
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 3)", "INSERT INTO bag VALUES (3)"
    )
    assert verdict(mirror, "bag").equal
    damage(mirror, "bag", lambda rows: pa.concat_tables([rows.slice(1), rows.slice(5, 1), rows.slice(5, 1)]))
    found = verdict(mirror, "bag", show_values=True)
    assert (found.missing, found.extra, found.different) == (1, 2, 0)
    assert all(row.key == {} and (row.source or row.target) for row in found.examples)


@pytest.mark.long
@pytest.mark.since(15, "row filters and column lists")
def test_only_what_is_published_is_compared(database_under_test: Database, tmp_path: Path) -> None:
    database_under_test.execute(
        "CREATE TABLE f (id int PRIMARY KEY, a int, hidden text)",
        "INSERT INTO f SELECT i, i, 'h' FROM generate_series(1, 100) i",
        "CREATE PUBLICATION pub FOR TABLE f (id, a) WHERE (id % 2 = 0)",
    )
    mirror = Mirror(database_under_test, tmp_path)
    mirror.run_once()
    database_under_test.execute("UPDATE f SET hidden = 'other', a = a + 1")
    found = verdict(mirror, "f")
    assert found.equal
    assert found.source_rows == 50
    mirror.assert_equal("f", columns="id, a", where="id % 2 = 0")


@pytest.mark.long
def test_partitions_are_compared_as_the_table_they_are_parts_of(database_under_test: Database, tmp_path: Path) -> None:
    database = database_under_test
    database.execute(
        "CREATE TABLE p (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (1000)",
        "INSERT INTO p SELECT i, i::text FROM generate_series(1, 200) i",
        "CREATE TABLE empty (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE PUBLICATION pub FOR TABLE p, empty WITH (publish_via_partition_root)",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute("UPDATE p SET id = id + 200 WHERE id < 50")
    found = {each.name: each for each in verify(mirror).tables}
    assert all(each.equal for each in found.values()), found
    assert (found["public.p"].source_rows, found["public.empty"].source_rows) == (200, 0)
    mirror.assert_equal("p", "empty")


@pytest.mark.long
def test_two_at_once_and_both_without_a_run(mirror: Mirror) -> None:
    mirror.run_once()
    mirror.database.execute("DELETE FROM t WHERE id % 3 = 0")
    with ThreadPoolExecutor(2) as pool:
        proofs = list(pool.map(lambda _: verify(mirror), range(2)))
    assert all(proof.equal for proof in proofs)
    mirror.assert_equal("t", "other")


@pytest.mark.long
def test_it_can_be_interrupted_while_it_waits_for_a_transaction(mirror: Mirror) -> None:
    mirror.run_once()
    database = mirror.database
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%verify%' AND wait_event_type = 'Lock'"
    )
    with psycopg.connect(database.dsn) as other:
        other.execute("DELETE FROM t WHERE id = 1")  # and no COMMIT: no snapshot before that
        with running("verify", "-c", mirror.file, output=mirror.file.with_suffix(".log")) as process:
            eventually(lambda: database.value(waiting) > 0, 90)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) != 0
    assert not list((mirror.config.subscription.directory / "cuts").glob("*")), "nobody is held"
    assert verdict(mirror, "t").equal


@pytest.mark.long
def test_rejects_are_null_on_both_sides_and_must_be_recorded(mirror: Mirror) -> None:
    database = mirror.database
    database.execute(
        "CREATE TABLE r (id int PRIMARY KEY, d date)",
        "INSERT INTO r VALUES (1, 'infinity'), (2, '2026-01-01'), (3, '4713-01-01 BC')",
    )
    mirror.run_once()
    database.execute("INSERT INTO r VALUES (4, '-infinity')")
    assert verdict(mirror, "r").equal
    rejects = DeltaTable(str(tmp_of(mirror) / "lake" / "_rejects.public" / "r"))
    write_deltalake(rejects, read_delta(rejects).slice(1), mode="overwrite")
    found = verdict(mirror, "r")
    assert not found.equal
    assert (found.missing, found.extra, found.different, found.unrecorded_rejects) == (0, 0, 0, 1)


def tmp_of(mirror: Mirror) -> Path:
    return mirror.file.parent


@pytest.mark.long
def test_a_sample_compares_the_same_part_of_both_sides(mirror: Mirror) -> None:
    mirror.run_once()
    proof = verify(mirror, sample=20)
    assert proof.equal
    for each in proof.tables:
        whole = {"public.t": 2000, "public.other": 300}[each.name]
        assert each.sample == 20
        assert 0 < each.source_rows == each.target_rows < whole
    damage(mirror, "t", lambda rows: rows.filter(pa.array([key % 10 != 0 for key in rows["id"].to_pylist()])))
    found = verdict(mirror, "t", sample=20)
    assert 0 < found.missing < 200
    assert (found.extra, found.different) == (0, 0)
    assert all(row.what == "missing" and int(row.key["id"] or 1) % 10 == 0 for row in found.examples)


@pytest.mark.long
def test_keys_of_many_types_can_be_sampled(database_under_test: Database, tmp_path: Path) -> None:
    keys = {
        "bigint": "i * 1000000007::bigint",
        "numeric(12,3)": "i / 7.0",
        "date": "'2020-01-01'::date + i",
        "timestamp": "'2020-01-01'::timestamp + i * interval '1 hour'",
        "timestamptz": "'2020-01-01'::timestamptz + i * interval '1.5 s'",
        "uuid": "md5(i::text)::uuid",
        "varchar(20)": "'Zä' || chr(39) || i",
        "bit(10)": "i::bit(10)",
    }
    for number, (definition, value) in enumerate(keys.items()):
        database_under_test.execute(
            f"CREATE TABLE k{number} (id {definition} PRIMARY KEY, n int)",
            f"INSERT INTO k{number} SELECT {value}, i FROM generate_series(1, 1000) i",
        )
    database_under_test.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    mirror = Mirror(database_under_test, tmp_path)
    mirror.run_once()
    *sampled, bits = verify(mirror, sample=30).tables
    for each in [*sampled, bits]:
        assert each.equal, each
    assert all(100 < each.source_rows < 600 for each in sampled), sampled
    assert (bits.sample, bits.source_rows) == (None, 1000), "its order is not known, so it is compared as a whole"
    mirror.assert_equal(*(f"k{number}" for number in range(5)))


@pytest.mark.long
def test_a_table_that_cannot_be_compared_says_why_and_the_others_are(mirror: Mirror) -> None:
    database = mirror.database
    mirror.run_once()
    database.execute('CREATE TABLE bad ("A" int PRIMARY KEY, a int)')  # Delta ignores case
    proof = verify(mirror)
    assert proof.equal is None
    assert {each.name: each.equal for each in proof.tables} == {
        "public.bad": None,
        "public.other": True,
        "public.t": True,
    }
    assert "differ only in case" in (proof.tables[0].error or "")


@pytest.mark.long
def test_a_table_that_lost_a_column_in_the_target_is_different(mirror: Mirror) -> None:
    mirror.run_once()
    opened = mirror.delta("other")
    without = read_delta(opened).drop(["doc"])
    write_deltalake(opened, without, mode="overwrite", schema_mode="overwrite", commit_properties=AS_OURS)
    found = verdict(mirror, "other")
    assert found.equal is False
    assert "doc string" in (found.error or "")


def test_the_command(mirror: Mirror, here: Here) -> None:
    code, _, shown = here("verify", "-c", mirror.file)
    assert (code, "there is no subscription" in shown) == (3, True)
    slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s"
    assert mirror.database.value(slots, mirror.database.slot) == 0, "to look begins nothing"
    mirror.run_once()
    code, said, _ = here("verify", "-c", mirror.file, "--json")
    report = json.loads(said)
    assert (code, report["equal"]) == (0, True)
    assert Lsn.parse(report["lsn"])
    keys = {"name", "equal", "source_rows", "target_rows", "missing", "extra", "different", "seconds"}
    assert all(keys <= table.keys() for table in report["tables"])
    for arguments in ((), ("--json",)):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as closed, contextlib.redirect_stdout(closed):
            code, _, _ = here("verify", "-c", mirror.file, "--table", "t", *arguments)
        assert code == 0, "the tables are equal, although nobody reads it"
    damage(mirror, "t", lambda rows: put(rows, "note", "id", 42, "secret"))
    code, said, shown = here("verify", "-c", mirror.file, "--table", "t")
    assert code == 1
    assert "different (id=42) in note" in said
    assert "secret" not in said + shown, "values are shown to who asks for them"
    away = mirror.file.with_name("away.toml")
    nowhere = 'dsn = "postgresql://postgres@127.0.0.1:1/postgres"'
    away.write_text(re.sub(r"(?m)^dsn = .*$", nowhere, mirror.file.read_text()))
    code, _, shown = here("verify", "-c", away)
    assert (code, "Connection refused" in shown) == (3, True), "1 would say that something differs"
    code, _, shown = here("verify", "-c", mirror.file, "--table", "none")
    assert code == 2
    assert "no published table is called none" in shown
