"""The Spark session of programs: `walmere.session`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

import walmere
from conftest import Database
from mirror import Mirror
from querying import Queries
from walmere.errors import ConfigError, SparkUnavailable

PROGRAM = """
import os, sys
import walmere
from walmere.errors import ConfigError

try:
    walmere.session("local[1]", {"spark.pyspark.python": "/nowhere/python"})
except ConfigError as error:
    assert "/nowhere/python on this machine" in error.wrong, error
else:
    raise AssertionError("Spark would plan with a Python that is not there")
settings = {"spark.master": "local[1]", "spark.sql.shuffle.partitions": 2, "spark.sql.ansi.enabled": False}
spark = walmere.session(settings=settings, name="orders")
assert spark.sparkContext.master == "local[1]", "a task that fails is not tried again"
assert not {"SPARK_LOCAL_IP", "SPARK_LAUNCHER_OPTS"} & set(os.environ), "a session on a cluster may follow"
conf = spark.sparkContext.getConf()
assert conf.get("spark.app.name") == "orders"
assert conf.get("spark.sql.shuffle.partitions") == "2"
assert conf.get("spark.sql.ansi.enabled") == "false"
assert conf.get("spark.scheduler.mode") is None, "that is for runs"
changes = spark.readStream.format("pgoutput").option("directory", sys.argv[1]).option("table", "t").load()
rows = []
query = changes.writeStream.foreachBatch(lambda batch, _: rows.append(batch.count())).trigger(availableNow=True).start()
query.awaitTermination()
print(rows)
"""


def test_the_active_session_is_used_and_knows_the_format(database18: Database, tmp_path: Path) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    queries = Queries(database18, tmp_path)
    queries.receive()
    database18.execute("INSERT INTO t VALUES (1), (2)")
    queries.receive()
    active = queries.spark
    spark = walmere.session()
    assert spark.sparkContext is active.sparkContext
    found = spark.read.format("pgoutput").option("table", "t").load(str(queries.directory))
    assert sorted(row.id for row in found.collect()) == [1, 2]


def test_a_master_that_does_not_answer_is_named() -> None:
    with pytest.raises(SparkUnavailable, match=r"spark://127\.0\.0\.1:1 does not answer"):
        walmere.session("spark://127.0.0.1:1")
    with pytest.raises(SparkUnavailable, match=r"spark://127\.0\.0\.1:1 does not answer"):
        walmere.session(settings={"spark.master": "spark://127.0.0.1:1"})


NOTEBOOK = """
import logging, sys
import walmere
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.range(10).count()
conf, sql = dict(spark.sparkContext.getConf().getAll()), spark.sql("SET").collect()
handlers = {name: list(logging.getLogger(name).handlers) for name in (None, "py4j", "pyspark")}
walmere.Subscription(sys.argv[1]).run(once=True)
assert dict(spark.sparkContext.getConf().getAll()) == conf
assert spark.sql("SET").collect() == sql
assert {name: list(logging.getLogger(name).handlers) for name in handlers} == handlers
print(spark.range(rows).count())
"""


@pytest.mark.long
def test_a_run_in_a_session_of_somebody_else_changes_nothing_of_it(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION pub FOR TABLE t"
    )
    mirror = Mirror(database18, tmp_path)
    command = [sys.executable, "-c", NOTEBOOK, str(mirror.file)]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    for statement in ("INSERT INTO t VALUES (2)", "DELETE FROM t WHERE id = 1"):
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["10"]), done.stderr
        mirror.assert_equal("t")
        database18.execute(statement)


SUBMITTED = """
import walmere

spark = walmere.session("local[2]", name="orders")
conf = spark.sparkContext.getConf()
print(spark.sparkContext.master, conf.get("spark.app.name"), conf.get("spark.sql.shuffle.partitions"))
"""


@pytest.mark.long
def test_master_and_name_of_the_program_come_before_those_of_spark_submit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SUBMITTED)
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[1]"]
    command = [*submit, "--conf", "spark.sql.shuffle.partitions=3", str(program)]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.stdout.splitlines()[-1:] == ["local[2] orders 3"], done.stderr


@pytest.mark.long
def test_a_program_has_its_first_batch_and_a_bad_setting_is_one_message(database18: Database, tmp_path: Path) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    queries = Queries(database18, tmp_path)
    queries.receive()
    database18.execute("INSERT INTO t SELECT generate_series(1, 10)")
    queries.receive()
    command = [sys.executable, "-c", PROGRAM, str(queries.directory)]
    env = {**os.environ, "PATH": os.defpath}  # the virtual environment is not active
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[10]"]), done.stderr
    bad = "import walmere; walmere.session(settings={'spark.executor.memory': 'much'})"
    done = subprocess.run([sys.executable, "-c", bad], capture_output=True, text=True, env=env, check=False)
    last = [line for line in done.stderr.splitlines() if ConfigError.__name__ in line or "hint: " in line]
    assert "starting Spark at local[*]" in last[-2]
    assert last[-1].strip() == "hint: correct master or settings"
