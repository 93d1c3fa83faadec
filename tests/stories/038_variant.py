"""Story 37: json and jsonb as VARIANT, in a lake that Spark reads: by copy and stream, exact, or in the rejects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from bench.delta_spark import DeltaSpark, delta_spark
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import walmere
from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere import Subscription
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.sinks.base import OVERWRITE, Upkeep
from walmere.sinks.delta.sink import DeltaSink
from walmere.types.variant.codec import Variant
from walmere.variant_type import VARIANT

TYPES = """
[types]
jsonb = "variant"
[[table]]
match = "public.docs"
columns = { raw = { type = "variant" } }
"""
MANY = "1" * 39
"""More digits than a decimal has."""


@pytest.fixture
def mirror(database18: Database, tmp_path: Path) -> Mirror:
    database18.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, doc jsonb, raw json, note text)",
        "ALTER TABLE docs ALTER doc SET STORAGE EXTERNAL",
        "INSERT INTO docs SELECT i, jsonb_build_object('id', i, 'price', 1.50, 'tags', jsonb_build_array('a', NULL, i),"
        " 'big', repeat('x', 5000)), json_build_object('n', i), 'copied' FROM generate_series(1, 20) i",
        # id 21 on: JSON's null and SQL's NULL, numbers with all their digits, keys in another order, odd characters
        """INSERT INTO docs VALUES (21, 'null', 'null'), (22, NULL, NULL),
        (23, '[1, 1.0, 1.00, -0, 12345678901234567890123456789.012345678, 1e2]', '[1e2, -0, 1.50e1]'),
        (24, '{"bb": 1, "a": {"é😀": "\\u0001\\n\\"\\\\/"}}', E'{ "b" : 1,\t"a" : "\\\\u0000\\\\ud83d\\\\ude00" }')""",
        f"INSERT INTO docs VALUES (25, '[{MANY}]', '{{\"a\": 1, \"a\": 2}}'), (26, '1e400', '\"\\ud800\"')",
        "CREATE TABLE keyed (doc jsonb PRIMARY KEY, n int)",
        "INSERT INTO keyed VALUES ('{\"k\": 1}', 1), ('{\"k\": 2}', 2), ('[]', 3)",
        "CREATE TABLE bag (doc jsonb, n int)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT jsonb_build_object('n', i % 3), 1 FROM generate_series(1, 12) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    made = Mirror(database18, tmp_path)
    made.file.write_text(made.file.read_text() + TYPES)
    made.run_once()
    return made


def assert_equal(mirror: Mirror) -> None:
    proof = Subscription(mirror.file).verify()
    assert proof.equal, proof


def rejects(mirror: Mirror) -> set[tuple[str, str]]:
    found = read_delta(mirror.delta("docs", "_rejects.public")).to_pylist()
    return {(each["column"], each["value"]) for each in found}


def actions(mirror: Mirror, kind: str) -> list[dict[str, Any]]:
    """The actions of this kind in the table's log."""
    log = Path(mirror.delta("docs").table_uri.removeprefix("file://"), "_delta_log")
    lines = [json.loads(line) for file in sorted(log.glob("*.json")) for line in file.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


def overwrite(mirror: Mirror, rows: pa.Table) -> None:
    """Replace all rows of the table, as a commit of Walmere."""
    sink, table = DeltaSink(str(mirror.file.parent / "lake")), TableName("public", "docs")
    staged = sink.stage(table, rows.to_batches())
    sink.commit(table, staged, Lsn((sink.applied(table) or 0) + 1), OVERWRITE, rows.schema)


def test_copy_and_stream_make_a_variant_that_spark_and_duckdb_read(mirror: Mirror) -> None:
    database = mirror.database
    copied = {("doc", f"[{MANY}]"), ("doc", "1" + "0" * 400), ("raw", '{"a": 1, "a": 2}'), ("raw", '"\\ud800"')}
    assert rejects(mirror) == copied
    database.execute(
        "UPDATE docs SET note = 'doc is not sent' WHERE id IN (1, 2)",  # it is TOASTed
        "UPDATE docs SET id = 103 WHERE id = 3",
        "UPDATE docs SET doc = doc || '{\"price\": 2.0}' WHERE id = 4",
        "UPDATE docs SET doc = '[0.{}1]', raw = NULL WHERE id = 5".format("0" * 38),
        "DELETE FROM docs WHERE id = 6",
        "INSERT INTO docs VALUES (200, '{\"s\": 1}', '[]', NULL)",
        "ALTER TABLE docs ADD more jsonb DEFAULT '{\"d\": [1.10]}'",
        "INSERT INTO docs (id, more) VALUES (201, 'null')",
        "UPDATE keyed SET n = 20 WHERE doc = '{\"k\": 2}'",
        "UPDATE keyed SET doc = '{\"k\": 4}' WHERE n = 1",
        "DELETE FROM keyed WHERE doc = '[]'",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE doc = '{\"n\": 1}' LIMIT 2)",
        "UPDATE bag SET doc = '1.0' WHERE doc = '{\"n\": 2}'",
    )
    mirror.run_once()
    assert_equal(mirror)
    assert rejects(mirror) == copied | {("doc", f"[0.{'0' * 38}1]")}

    protocol = actions(mirror, "protocol")[-1]
    assert (protocol["minReaderVersion"], protocol["minWriterVersion"]) == (3, 7)
    assert all("variantType" in protocol[f"{side}Features"] for side in ("reader", "writer"))
    fields = {
        each["name"]: each["type"] for each in json.loads(actions(mirror, "metaData")[-1]["schemaString"])["fields"]
    }
    assert fields == {"id": "integer", "doc": "variant", "raw": "variant", "note": "string", "more": "variant"}
    for each in actions(mirror, "add"):
        assert not {"doc", "raw", "more"} & json.loads(each["stats"])["minValues"].keys()
    assert any(each.get("deletionVector") for each in actions(mirror, "add")), "rows were replaced"

    spark = SparkSession.getActiveSession()
    assert spark is not None
    rows = walmere.read(spark, mirror.file, "docs")
    assert rows.schema.simpleString() == "struct<id:int,doc:variant,raw:variant,note:string,more:variant>"
    found = rows.select(
        "id",
        f.variant_get("doc", "$.price", "decimal(5,2)").cast("string").alias("price"),
        f.length(f.variant_get("doc", "$.big", "string")).alias("big"),
        f.to_json("doc").alias("doc"),
        f.to_json("raw").alias("raw"),
        f.to_json("more").alias("more"),
        f.col("doc").isNull().alias("missing"),
        f.is_variant_null("doc").alias("null"),
    )
    by_id = {each.id: each for each in found.collect()}
    assert (by_id[1].price, by_id[1].big, by_id[103].big, by_id[4].price) == ("1.50", 5000, 5000, "2.00")
    assert (by_id[21].missing, by_id[21].null) == (False, True), "JSON's null"
    assert all(by_id[number].missing for number in (5, 22, 25, 26)), "SQL's NULL, and what was rejected"
    assert by_id[23].doc == "[1,1,1,0,12345678901234567890123456789.012345678,100]", "Spark writes no zeros at the end"
    assert by_id[24].doc == '{"a":{"é😀":"\\u0001\\n\\"\\\\/"},"bb":1}'
    assert by_id[24].raw == '{"a":"\\u0000😀","b":1}'
    assert (by_id[7].more, by_id[200].more, by_id[201].more) == ('{"d":[1.1]}', '{"d":[1.1]}', "null")

    point = walmere.lake(str(mirror.file.parent / "lake")).latest()
    connection = duckdb.connect()
    point.duckdb("docs", connection).create_view("docs")
    relation = connection.sql(
        "SELECT doc::JSON, doc.tags[3]::INT, raw::JSON, doc IS NULL FROM docs WHERE id IN (7, 21, 22, 23) ORDER BY id",
    )
    assert relation.fetchall()[1:] == [
        ("null", None, "null", False),
        (None, None, None, True),
        ("[1,1.0,1.00,0,12345678901234567890123456789.012345678,100]", None, "[100,0,15.0]", False),
    ]
    arrow = point.arrow("docs")
    assert arrow.schema.field("doc").type == VARIANT
    assert arrow.num_rows == len(by_id)

    # verify compares every document: one digit of one, and NULL instead of JSON's null, are different
    wrong = {7: b'{"id": 8}', 23: b"[1, 1.0, 1.0, 0, 12345678901234567890123456789.012345678, 100]", 21: None}
    place = arrow.column_names.index("doc")
    texts = Variant("jsonb", VARIANT).cast(pa.array(list(wrong.values()), pa.binary())).values.to_pylist()
    values = dict(zip(wrong, texts, strict=True))
    pairs = zip(arrow["id"].to_pylist(), arrow["doc"].to_pylist(), strict=True)
    changed = pa.array([values.get(number, old) for number, old in pairs], VARIANT)
    overwrite(mirror, arrow.set_column(place, "doc", changed))
    [verdict] = Subscription(mirror.file).verify(["docs"]).tables
    assert (verdict.different, verdict.missing, verdict.extra) == (3, 0, 0)
    assert {each.columns for each in verdict.examples} == {("doc",)}


@pytest.fixture(scope="module")
def delta_jar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeltaSpark]:
    with delta_spark(tmp_path_factory.mktemp("delta_spark")) as found:
        yield found


QUERY = "SELECT id, to_json(doc) AS doc, variant_get(doc, '$.price', 'string') AS price, to_json(more) AS more FROM {}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_delta_spark_reads_and_rewrites_the_table_and_so_does_upkeep(mirror: Mirror, delta_jar: DeltaSpark) -> None:
    database, table = mirror.database, TableName("public", "docs")
    sink = DeltaSink(str(mirror.file.parent / "lake"))
    place = f"delta.`{sink.location(table)}`"
    mirror.set("maintenance", deleted_share=1.0)  # it is left to this test
    database.execute(
        "ALTER TABLE docs ADD more jsonb DEFAULT '[1]'",
        "UPDATE docs SET note = 'doc is not sent' WHERE id IN (1, 2)",
        "DELETE FROM docs WHERE id = 6",
    )
    mirror.run_once()

    def assert_read(why: str) -> None:
        assert_equal(mirror)
        spark = SparkSession.getActiveSession()
        assert spark is not None
        walmere.read(spark, mirror.file, "docs").createOrReplaceTempView("docs_without_a_jar")
        without = sorted(map(tuple, spark.sql(QUERY.format("docs_without_a_jar")).collect()))
        rows = sorted(tuple(each.values()) for each in delta_jar.sql(QUERY.format(place)).rows)
        assert rows == without, why
        assert len(rows) == len(walmere.lake(str(mirror.file.parent / "lake")).latest().arrow("docs"))
        assert {row[0]: row[2] for row in rows}[1] == "1.5"

    assert delta_jar.sql(f"DESCRIBE {place}").rows[1]["data_type"] == "variant"
    assert_read("deletion vectors")
    assert sink.optimize(table, limits=Upkeep(deleted_share=0.0001)) is not None
    assert_read("upkeep has rewritten the files")

    database.execute(
        "UPDATE docs SET note = 'again' WHERE id IN (1, 3)", "INSERT INTO docs (id, doc) VALUES (300, '0.10')"
    )
    mirror.run_once()
    delta_jar.sql(f"OPTIMIZE {place}")
    [last] = mirror.delta("docs").history(1)
    assert (last["operation"], last["engineInfo"].partition("/")[0]) == ("OPTIMIZE", "Apache-Spark")
    assert_read("delta-spark has rewritten the files")
    point = walmere.lake(str(mirror.file.parent / "lake")).latest()
    database.execute("UPDATE docs SET note = 'doc is carried over' WHERE id IN (1, 7)", "DELETE FROM docs WHERE id = 8")
    mirror.run_once()
    assert_read("rows of Spark's files are replaced")
    connection = duckdb.connect()
    walmere.lake(str(mirror.file.parent / "lake")).latest().duckdb("docs", connection).create_view("docs")
    assert connection.sql("SELECT doc.price::VARCHAR, len(doc.big::VARCHAR) FROM docs WHERE id = 7").fetchall() == [
        ("1.50", 5000)
    ]
    assert point.arrow("docs").schema.field("doc").type == VARIANT


@pytest.mark.long
def test_a_changed_type_copies_the_table_again_and_files_can_be_rewritten_without_vectors(mirror: Mirror) -> None:
    database, text = mirror.database, mirror.file.read_text()
    mirror.file.write_text(text.replace(TYPES, ""))
    mirror.run_once()
    assert_equal(mirror)
    assert read_delta(mirror.delta("docs")).schema.field("doc").type == pa.string()
    mirror.file.write_text(text)
    mirror.set("target", deletion_vectors=False)
    mirror.run_once()
    assert_equal(mirror)
    database.execute(
        "UPDATE docs SET note = 'doc is not sent' WHERE id IN (1, 2)",
        "DELETE FROM docs WHERE id = 6",
        "ALTER TABLE docs ADD more jsonb DEFAULT '[1]'",
        "ALTER TABLE docs DROP note",
        "UPDATE docs SET doc = doc || '{\"price\": 3.10}' WHERE id = 9",
    )
    mirror.run_once()
    assert_equal(mirror)
    assert not any(each.get("deletionVector") for each in actions(mirror, "add")[-3:])


@pytest.mark.long
def test_large_and_deep_documents_are_read_by_spark(mirror: Mirror) -> None:
    """With more than 16 MB in an array, an offset has four bytes. More than 16 MB of text are rejected."""
    deep = "[" * 1000 + "]" * 1000
    mirror.database.execute(
        "INSERT INTO docs SELECT 400, jsonb_build_object('s', repeat('x', 15 << 20), 'n', 7), '[]'",
        "INSERT INTO docs SELECT 401, NULL, json_build_array(repeat('x', 17 << 20))",
        f"INSERT INTO docs VALUES (402, '{deep}'), (403, '[{deep}]')",
        "INSERT INTO docs SELECT 404, (SELECT jsonb_object_agg('k' || i, i) FROM generate_series(1, 70000) i)",
        "INSERT INTO docs SELECT 405, jsonb_agg(round((i % 9 + 1) / 10.0, 1)) FROM generate_series(1, 3000000) i",
    )
    mirror.run_once()
    assert_equal(mirror)
    spark = SparkSession.getActiveSession()
    assert spark is not None
    rows = walmere.read(spark, mirror.file, "docs").where("id >= 400")
    found = rows.select(
        "id",
        f.expr("variant_get(doc, '$.n', 'int')").alias("n"),
        f.expr("variant_get(doc, '$.k69999', 'int')").alias("key"),
        f.expr("variant_get(doc, '$[2999998]', 'string')").alias("element"),
        f.expr("doc is null").alias("missing"),
        f.expr("length(to_json(doc))").alias("length"),
    )
    by_id = {each.id: each for each in found.collect()}
    assert (by_id[400].n, by_id[404].key, by_id[405].element, by_id[402].length) == (7, 69999, "0.3", 2000)
    assert [by_id[number].missing for number in (400, 402, 403)] == [False, False, True]
    values = {value[:20] for _, value in rejects(mirror)}
    assert {"[" * 20, '["' + "x" * 18} <= values
