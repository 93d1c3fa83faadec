"""Story 21: any Spark query reads the change log, by format `pgoutput`: every change a row, exactly once."""

from __future__ import annotations

import ast
import datetime as dt
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import functions as f

from conftest import Database
from processes import eventually
from querying import Queries
from receiving import changes, logged
from walmere.lsn import Lsn
from walmere.subscription.progress import SinkPositions
from workload import MixedLoad


def test_every_operation_is_a_row_with_typed_columns(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer int, amount numeric(10,2), paid bool, at timestamptz,"
        " day date, local timestamp, tags text[], doc jsonb, raw bytea, note text)",
        "CREATE TABLE audit (id int, note text)",
        "ALTER TABLE audit REPLICA IDENTITY FULL",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute(
        "INSERT INTO orders VALUES (1, 7, 12.50, true, '2026-01-31 12:00+00', '2026-01-31', '2026-01-31 12:00',"
        " '{a,NULL}', '{\"k\": 1}', '\\x00ff', 'first')",
        "INSERT INTO orders (id) VALUES (2)",
        "UPDATE orders SET amount = 13 WHERE id = 1",
        "UPDATE orders SET id = 3 WHERE id = 2",
        "DELETE FROM orders WHERE id = 1",
        "INSERT INTO audit VALUES (1, 'a'), (2, NULL)",
        "UPDATE audit SET note = 'b' WHERE id = 1",
        "DELETE FROM audit WHERE id = 2",
        "TRUNCATE orders, audit",
    )
    queries.receive()
    rows = queries.read("public.orders")
    assert [(row._op, row.id) for row in rows] == [("I", 1), ("I", 2), ("U", 1), ("U", 3), ("D", 1), ("T", None)]
    first = rows[0]
    utc = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    assert (first.customer, first.amount, first.paid) == (7, Decimal("12.50"), True)
    assert first["at"].astimezone(dt.UTC) == utc
    assert (first.day, first.local) == (dt.date(2026, 1, 31), utc.replace(tzinfo=None))
    assert (first.tags, json.loads(first.doc), first.raw, first.note) == (["a", None], {"k": 1}, b"\x00\xff", "first")
    assert not any(rows[1][name] for name in ("customer", "amount", "tags", "raw", "note"))
    # with the default identity, the old tuple is there when the key changed, and of a deleted row; it is the key
    assert [row._before and row._before.asDict()["id"] for row in rows] == [None, None, None, 2, 1, None]
    assert rows[4]._before.note is None
    assert rows[4].note is None
    audit = queries.read("public.audit")
    assert [(row._op, row.id, row.note) for row in audit] == [
        ("I", 1, "a"),
        ("I", 2, None),
        ("U", 1, "b"),
        ("D", 2, None),
        ("T", None, None),
    ]
    assert [row._before and tuple(row._before) for row in audit] == [None, None, (1, "a"), (2, None), None]
    transactions = [each for each in logged(queries.config, table="orders") if each.changes]
    assert {(row._commit_lsn, row._xid) for row in rows} == {(int(t.commit_lsn), t.xid) for t in transactions}
    assert all(row._lsn <= row._commit_lsn and row._commit_ts is not None for row in rows)
    assert rows[5]._seq == audit[4]._seq  # one TRUNCATE of two tables
    # some columns only, and from or up to an LSN
    some = queries.load("orders", columns="_op, id, _commit_lsn, _seq")
    assert some.columns == ["_op", "id", "_commit_lsn", "_seq"]
    assert [tuple(row)[:2] for row in some.orderBy("_seq").collect()] == [(row._op, row.id) for row in rows]
    middle = str(Lsn(rows[3]._commit_lsn))
    assert queries.read("orders", startingLsn=middle) == rows[3:]
    assert queries.read("orders", endingLsn=middle) == rows[:3]
    assert queries.read("orders", startingLsn="latest") == []


def test_values_that_were_not_sent_are_told_from_null(database18: Database, tmp_path: Path) -> None:
    database = database18
    large = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 500) i)"
    for table in ("keyed", "whole"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, doc text, n int, empty text)")
    database.execute("ALTER TABLE whole REPLICA IDENTITY FULL", "CREATE PUBLICATION pub FOR ALL TABLES")
    queries = Queries(database, tmp_path)
    queries.receive()
    for table in ("keyed", "whole"):
        database.execute(
            f"INSERT INTO {table} VALUES (1, {large}, 0)",
            f"UPDATE {table} SET n = 1",
            f"UPDATE {table} SET doc = 'short'",
        )
    queries.receive()
    doc = database.value(f"SELECT {large}")
    keyed, whole = queries.read("keyed"), queries.read("whole")
    assert [row.doc for row in keyed] == [doc, None, "short"]
    # only an update can leave a value out; a number or a NULL is always sent
    assert [row._unchanged and row._unchanged.asDict() for row in keyed] == [
        None,
        {"doc": True, "empty": False},
        {"doc": False, "empty": False},
    ]
    # where the old tuple has the value it is given from there: nothing is missing then
    assert [row.doc for row in whole] == [doc, doc, "short"]
    assert [row._before and row._before.doc for row in whole] == [None, doc, doc]
    assert [row._unchanged and row._unchanged.doc for row in whole] == [None, False, False]
    as_json = [json.loads(row.row) for row in queries.read() if row._table == "keyed"]
    assert [set(row) for row in as_json] == [
        {"id", "doc", "n", "empty"},
        {"id", "n", "empty"},
        {"id", "doc", "n", "empty"},
    ]


def test_types_of_any_kind_and_what_they_cannot_hold(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN price AS numeric(8,2)",
        "CREATE TABLE odd (id int PRIMARY KEY, m mood, ms mood[], p price, d date, n numeric(5,1), a int[])",
        "ALTER TABLE odd REPLICA IDENTITY FULL",
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute(
        "INSERT INTO odd VALUES (1, 'ok', '{sad,ok}', 1.5, '2026-02-01', 2.5, '{1,2}')",
        "INSERT INTO odd VALUES (2, 'ok', '{}', 1.5, 'infinity', 'NaN', '{{1},{2}}')",
        "UPDATE odd SET d = '2026-02-01', n = 1 WHERE id = 2",
        "INSERT INTO plain VALUES (1)",
    )
    queries.receive()
    with pytest.raises(AnalysisException, match=r"type of column m(?s:.*)the source is not known(?s:.*)dsn"):
        queries.load("odd")
    assert [row.id for row in queries.read("plain")] == [1]
    rows = queries.read("odd", dsn=database.dsn)
    assert [tuple(row)[:7] for row in rows] == [
        (1, "ok", ["sad", "ok"], Decimal("1.50"), dt.date(2026, 2, 1), Decimal("2.5"), [1, 2]),
        (2, "ok", [], Decimal("1.50"), None, None, None),
        (2, "ok", [], Decimal("1.50"), dt.date(2026, 2, 1), Decimal("1.0"), None),
    ]
    assert [row._rejects for row in rows] == [
        None,
        {"d": "infinity", "n": "NaN", "a": "{{1},{2}}"},
        {"a": "{{1},{2}}", "_before.d": "infinity", "_before.n": "NaN", "_before.a": "{{1},{2}}"},
    ]


def test_all_tables_as_json_that_spark_parses(database18: Database, tmp_path: Path) -> None:
    database = database18
    odd = '"quotes", back\\slash, tab\t, line\n, bell\a, größe, 😀'
    database.execute(
        'CREATE TABLE "Odd ""names""" (id int PRIMARY KEY, "a ""b"" c" text, f float8, n numeric, b bool, j jsonb,'
        " raw bytea, tags text[], grid int[], at timestamptz)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queries = Queries(database, tmp_path)
    queries.receive()
    database.connection.execute(
        'INSERT INTO "Odd ""names""" VALUES (1, %s, \'1e300\', 0.10, true, %s, %s, %s, %s, %s),'
        " (2, '', 'NaN', 'Infinity', false, 'null', '', '{}', '{{1},{2}}', 'infinity')",
        [odd, json.dumps({"k": [1, {"deep": odd}]}), b"\x00\xff", [odd, None, "NULL"], [1, 2], "2026-01-31 12:00+00"],
    )
    database.execute("INSERT INTO other VALUES (5)", "UPDATE other SET id = 6", "DELETE FROM other", "TRUNCATE other")
    queries.receive()
    rows = queries.load().orderBy("_commit_lsn", "_seq").withColumn("variant", f.parse_json("row"))
    rows = rows.withColumn("number", f.variant_get("variant", "$.id", "int"))
    found = rows.drop("variant").collect()
    assert [(row._schema, row._table, row._op, row.number) for row in found] == [
        ("public", 'Odd "names"', "I", 1),
        ("public", 'Odd "names"', "I", 2),
        ("public", "other", "I", 5),
        ("public", "other", "U", 6),
        ("public", "other", "D", 6),
        ("public", "other", "T", None),
    ]
    assert json.loads(found[0].row, parse_float=str) == {
        "id": 1,
        'a "b" c': odd,
        "f": "1e+300",
        "n": "0.10",
        "b": True,
        "j": {"k": [1, {"deep": odd}]},
        "raw": "\\x00ff",
        "tags": [odd, None, "NULL"],
        "grid": [1, 2],
        "at": "2026-01-31 12:00:00+00",
    }
    assert json.loads(found[1].row) == {
        "id": 2,
        'a "b" c': "",
        "f": "NaN",
        "n": "Infinity",
        "b": False,
        "j": None,
        "raw": "\\x",
        "tags": [],
        "grid": "{{1},{2}}",
        "at": "infinity",
    }
    assert [row.before for row in found] == [None, None, None, '{"id":5}', '{"id":6}', None]
    assert found[5].row is None


@pytest.mark.long
def test_a_query_that_is_killed_goes_on_and_has_every_change_once(database18: Database, tmp_path: Path) -> None:
    database = database18
    MixedLoad.create(database)
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute(
        "DO $$ BEGIN FOR i IN 1..60 LOOP INSERT INTO ledger (account, amount) SELECT i, generate_series(1, 20);"
        " COMMIT; END LOOP; END $$",
        "INSERT INTO ledger (account, amount, note) SELECT 0, i, md5(i::text) FROM generate_series(1, 5000) i",
    )
    with MixedLoad(database, seed=1):
        for _ in range(6):  # so that the log has several records
            queries.receive()
            database.execute("UPDATE accounts SET balance = balance + 1", "DELETE FROM ledger WHERE account = 3")
    queries.receive()
    # killed in the middle of a batch: a task of its second batch says that it runs, and never ends
    held = tmp_path / "held"
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from querying import Queries
from walmere.spark.session import session

spark = session("killed", "local[2]", {{}})
stream = (spark.readStream.format("pgoutput").option("directory", {str(queries.directory)!r})
          .option("table", "ledger").option("maxBytesPerTrigger", "1").option("availableNow", "false").load())

def hold(batches):
    import pathlib, time
    for batch in batches:
        yield batch
        if pathlib.Path({str(tmp_path / "ledger.checkpoint" / "commits" / "0")!r}).exists():
            pathlib.Path({str(held)!r}).touch()
            time.sleep(600)

held = stream.mapInArrow(hold, stream.schema)
writer = held.writeStream.format("parquet").option("path", {str(queries.sink("ledger"))!r})
writer.option("checkpointLocation", {str(tmp_path / "ledger.checkpoint")!r}).start().awaitTermination()
"""
    output = (tmp_path / "output").open("wb")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=output, stderr=output, start_new_session=True)
    try:
        eventually(lambda: held.exists() or process.poll() is not None, 120)
        assert held.exists(), (tmp_path / "output").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # then stopped between batches, and gone on to the end
    stream = queries.stream("ledger", maxBytesPerTrigger="1", availableNow="false")
    query = queries.start(stream, "ledger")
    try:
        eventually(lambda: query.lastProgress and query.lastProgress["batchId"] >= 3, 90)
    finally:
        query.stop()
    # a stopped query may have a batch that is not committed; AvailableNow does it first, and then, so told, the rest
    queries.spark.conf.set("spark.sql.streaming.triggerAvailableNowWrapper.enabled", "true")
    try:
        queries.available_now(queries.stream("ledger", maxBytesPerTrigger="1"), "ledger")
    finally:
        queries.spark.conf.unset("spark.sql.streaming.triggerAvailableNowWrapper.enabled")
    landed = [(row._commit_lsn, row._seq) for row in queries.landed("ledger")]
    expected = [(row._commit_lsn, row._seq) for row in queries.read("ledger")]
    assert landed == expected
    assert len(set(landed)) == len(landed) == len(changes(queries.config, "ledger"))
    # and their fold is the table: of each key, what its last change has left
    for table, value in (("ledger", "amount"), ("accounts", "balance")):
        rows = queries.load(table)
        last = rows.groupBy("id").agg(f.max_by(f.struct("_op", value), f.struct("_commit_lsn", "_seq")).alias("last"))
        kept = {(row["id"], Decimal(row["last"][1])) for row in last.where("last._op <> 'D'").collect()}
        touched = {row["id"] for row in rows.select("id").distinct().collect()}
        source = {(key, amount) for key, amount in database.rows(f"SELECT id, {value} FROM {table}") if key in touched}
        assert kept == source


def test_available_now_has_all_there_is_and_other_triggers_are_limited(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    queries = Queries(database, tmp_path)
    queries.receive()
    for part in range(4):
        database.execute(f"INSERT INTO t SELECT generate_series({part * 10}, {part * 10 + 9})")
        queries.receive()  # each a record of the log
    limited = queries.stream("t", maxBytesPerTrigger="1")
    assert queries.available_now(limited, "all") == [40]
    assert queries.available_now(limited, "all") == []
    database.execute("INSERT INTO t VALUES (100)")
    queries.receive()
    database.execute("INSERT INTO t VALUES (101)")
    queries.receive()
    assert queries.available_now(limited, "all") == [2]  # also from a checkpoint
    assert [row.id for row in queries.landed("all")] == [*range(40), 100, 101]
    promised = queries.stream("t", maxBytesPerTrigger="1", availableNow="false")
    query = queries.start(promised, "limited", processingTime="0 seconds")
    try:
        eventually(lambda: sum(each["numInputRows"] for each in query.recentProgress) == 42, 90)
    finally:
        query.stop()
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [10, 10, 10, 10, 1, 1]
    ends = [ast.literal_eval(each["sources"][0]["endOffset"])["lsn"] for each in query.recentProgress]
    assert ends == sorted(ends, key=Lsn.parse)


@pytest.mark.long
def test_a_query_receives_by_itself_and_the_log_is_kept_for_it_alone(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE t (id int PRIMARY KEY, m mood)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queries = Queries(database, tmp_path)
    own = {"dsn": database.dsn, "publications": "pub", "slot": database.slot}
    # the slot is new: nothing before it is sent, but the columns are known from the catalogs
    stream = queries.stream("public.t", **own)
    assert stream.columns[:2] == ["id", "m"]
    assert queries.available_now(stream, "t") == []
    database.execute("INSERT INTO t VALUES (1, 'ok')", "INSERT INTO t VALUES (2, 'sad')")
    assert queries.available_now(queries.stream("public.t", **own), "t") == [2]
    changelog = queries.directory / "changelog"
    kept = set(changelog.glob("*.arrow"))
    assert kept
    database.execute("DELETE FROM t WHERE id = 1")
    assert [row._op for row in queries.read("t", **own)] == ["I", "I", "D"]  # a batch read frees nothing
    assert kept <= set(changelog.glob("*.arrow"))
    assert queries.available_now(queries.stream("public.t", **own), "t") == [1]  # and this one commits the first two
    assert [(row._op, row.id, row.m) for row in queries.landed("t")] == [
        ("I", 1, "ok"),
        ("I", 2, "sad"),
        ("D", 1, None),
    ]
    database.execute("INSERT INTO t VALUES (3, 'ok')")
    query = queries.start(queries.stream("public.t", **own), "t")  # a stream that follows
    try:
        eventually(lambda: not kept & set(changelog.glob("*.arrow")), 90, lambda: str(query.exception()))
        database.execute("INSERT INTO t VALUES (4, 'ok')")
        eventually(lambda: len(queries.landed("t")) == 5, 90, lambda: str(query.exception()))
        with pytest.raises(StreamingQueryException, match=r"reader pgoutput(?s:.*)option\(\"reader\""):
            queries.available_now(queries.stream("public.t", **own), "second")
    finally:
        query.stop()
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    eventually(lambda: database.rows(active, database.slot) == [(False,)])
    with pytest.raises(AnalysisException, match=r"it begins at(?s:.*)new checkpoint"):
        queries.read("t", dsn=database.dsn, startingLsn="0/1")


@pytest.mark.long
def test_a_log_is_kept_for_a_query_that_asks_for_it(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute("INSERT INTO t VALUES (1)")
    queries.receive()
    positions = SinkPositions(queries.directory)
    queries.available_now(queries.stream("t"), "unnamed")
    assert positions.applied() is None
    queries.available_now(queries.stream("t", reader="report"), "named")
    assert positions.applied() == 0
    database.execute("INSERT INTO t VALUES (2)")
    queries.receive()
    queries.available_now(queries.stream("t", reader="report"), "named")
    first = queries.read("t")[0]
    assert first._commit_lsn < (positions.applied() or 0) <= queries.read("t")[1]._commit_lsn


@pytest.mark.long
def test_a_definition_that_changes_ends_the_query_and_its_next_start_has_it(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v varchar(10), w int)", "CREATE PUBLICATION pub FOR ALL TABLES"
    )
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute("INSERT INTO t VALUES (1, 'one', 1)")
    queries.receive()
    some = queries.stream("t", columns="id, _op, _commit_lsn, _seq")
    stream = queries.stream("t").drop("w", "_before", "_unchanged")
    query = queries.start(stream, "t")
    try:
        eventually(lambda: query.lastProgress and query.lastProgress["batchId"] >= 0, 90)
        database.execute(
            "ALTER TABLE t ALTER v TYPE varchar(50)", "INSERT INTO t VALUES (2, 'two', 2)"
        )  # the same type to a query
        queries.receive()
        eventually(lambda: len(queries.landed("t")) == 2, 90, lambda: str(query.exception()))
        database.execute("ALTER TABLE t ADD n numeric(4,1), DROP w", "INSERT INTO t VALUES (3, 'three', 3.5)")
        queries.receive()
        with pytest.raises(
            StreamingQueryException, match=r"its columns were altered there: n, w(?s:.*)start the query again"
        ):
            query.awaitTermination(90)
    finally:
        query.stop()
    queries.available_now(queries.stream("t").drop("_before", "_unchanged"), "t")
    schema = queries.stream("t").drop("_before", "_unchanged").schema
    landed = queries.spark.read.schema(schema).parquet(str(queries.sink("t"))).orderBy("_seq").collect()
    assert [(row.id, row.v, row.n) for row in landed] == [
        (1, "one", None),
        (2, "two", None),
        (3, "three", Decimal("3.5")),
    ]
    queries.available_now(some, "some")  # it never had that column, and does not mind
    assert [row.id for row in queries.landed("some")] == [1, 2, 3]
    # a former type that the new one does not read: the text is kept
    database.execute("ALTER TABLE t ALTER v TYPE int USING id * 10", "INSERT INTO t VALUES (4, 40)")
    queries.receive()
    rows = queries.read("t")
    assert [(row.v, row._rejects) for row in rows] == [
        (None, {"v": "one"}),
        (None, {"v": "two"}),
        (None, {"v": "three"}),
        (40, None),
    ]


WRONG: list[tuple[dict[str, str], str]] = [
    ({}, r"option directory is missing(?s:.*)directory(?s:.*)dsn, publications and slot"),
    ({"directory": "/nonexistent", "table": "t"}, r"change log in /nonexistent/changelog: there is no change log"),
    ({"slot": "s"}, r"option slot needs options dsn and publications"),
    ({"directory": "{log}", "startingLsn": "soon"}, r"not an LSN(?s:.*)earliest or latest"),
    ({"directory": "{log}", "table": "missing"}, r"public.missing(?s:.*)it has public.t(?s:.*)first change"),
    (
        {"directory": "{log}", "table": "t", "columns": "id, idd"},
        r"no column idd(?s:.*)the columns are id, _op",
    ),
    ({"directory": "{log}", "tabel": "t"}, r"no option tabel(?s:.*)the options are"),
    ({"directory": "{log}", "maxBytesPerTrigger": "much"}, r"'much' is not a size"),
    ({"directory": "{log}", "table": "taken"}, r"a column _op, which is a name that the format itself uses"),
]


def test_what_is_wrong_is_said_with_what_to_do(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE taken (_op int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    queries = Queries(database, tmp_path)
    queries.receive()
    database.execute("INSERT INTO t VALUES (1)", "INSERT INTO taken VALUES (1)")
    queries.receive()
    for given, expected in WRONG:
        options = {name: value.replace("{log}", str(queries.directory)) for name, value in given.items()}
        with pytest.raises(AnalysisException, match=expected):
            queries.spark.read.format("pgoutput").options(**options).load()
    later: Any = {"startingLsn": "0/1"}, {"endingLsn": "FFFF/0"}
    for options, expected in zip(later, (r"it begins at", r"it ends at"), strict=True):
        with pytest.raises(AnalysisException, match=expected):
            queries.read("t", **options)
    for only_streams in ({"maxBytesPerTrigger": "1m"}, {"availableNow": "true"}):
        with pytest.raises(AnalysisException, match=r"option \w+ is only for streams"):
            queries.read("t", **only_streams)
    with pytest.raises(StreamingQueryException, match="endingLsn is only for batch reads"):
        queries.available_now(queries.stream("t", endingLsn="0/1"), "ending")
    dsn = database.dsn.replace("postgres@", "postgres:s3cret@").replace(f":{database.server.port}", ":1")
    own = {"dsn": dsn, "publications": "pub", "slot": "other", "directory": str(tmp_path / "own"), "table": "t"}
    with pytest.raises(AnalysisException, match="onnecting to") as refused:
        queries.spark.read.format("pgoutput").options(**own).load()
    assert "s3cret" not in str(refused.value)
    lined = queries.load("t", dsn=dsn)
    shown = lined._jdf.queryExecution().toString()
    assert "s3cret" not in shown
