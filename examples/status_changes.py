"""A Structured Streaming job: every change of an order's status, appended to Parquet files, each exactly once.

A mirror has only the current rows. This job keeps what they were: PostgreSQL sends the old row with every UPDATE, and
format `pgoutput` has it in `_before`. The job runs from cron: it takes in what the source has committed, and ends.

It runs on a PostgreSQL server of its own (`pip install -c constraints.txt '.[demo]'` in a clone; Spark needs Java 17):

    python examples/status_changes.py

It prints

    3 changes after the first run
    order 1: new -> paid
    order 2: new -> paid
    order 2: paid -> shipped
    4 changes after the second run
    order 1: paid -> cancelled
"""

import tempfile

import psycopg
from pyspark.sql import DataFrame, SparkSession

import walmere
from walmere.testing.server import embedded


def status_changes(spark: SparkSession, dsn: str, directory: str) -> DataFrame:
    """The job: the source, and one transformation of its rows."""
    orders = (
        spark.readStream.format("pgoutput")
        .option("dsn", dsn)
        .option("publications", "shop")
        .option("slot", "status_changes")
        .option("directory", f"{directory}/log")  # what is received, until the job has committed it
        .option("table", "public.orders")
        .load()
    )
    changed = orders.where("_op = 'U' AND _before.status IS DISTINCT FROM status")
    return changed.selectExpr("id", "_before.status AS old", "status AS new", "_commit_ts", "_commit_lsn", "_seq")


def run(spark: SparkSession, dsn: str, directory: str) -> None:
    """Take in all that the source has committed by now, from where the last run ended."""
    writer = status_changes(spark, dsn, directory).writeStream.format("parquet").trigger(availableNow=True)
    writer = writer.option("path", f"{directory}/changes").option("checkpointLocation", f"{directory}/checkpoint")
    writer.start().awaitTermination()


def show(spark: SparkSession, directory: str, title: str, after: int) -> None:
    """Print what the files have after the first so many changes."""
    found = spark.read.parquet(f"{directory}/changes").orderBy("_commit_lsn", "_seq").collect()
    print(f"{len(found)} changes after the {title} run")
    for row in found[after:]:
        print(f"order {row.id}: {row.old} -> {row.new}")


with (
    tempfile.TemporaryDirectory() as place,
    embedded() as server,
    psycopg.connect(server.dsn(), autocommit=True) as shop,
):
    shop.execute("CREATE TABLE orders (id bigint PRIMARY KEY, status text, amount numeric(10,2))")
    shop.execute("ALTER TABLE orders REPLICA IDENTITY FULL")  # an UPDATE then comes with all of the old row
    shop.execute("CREATE PUBLICATION shop FOR TABLE orders")

    session = walmere.session("local[2]")
    session.sparkContext.setLogLevel("ERROR")

    run(session, server.dsn(), place)  # makes the slot: changes from here on
    shop.execute("INSERT INTO orders VALUES (1, 'new', 10), (2, 'new', 20)")
    shop.execute("UPDATE orders SET status = 'paid'")
    shop.execute("UPDATE orders SET status = 'shipped' WHERE id = 2")
    shop.execute("UPDATE orders SET amount = 11 WHERE id = 1")  # of another column: not a change of the status
    run(session, server.dsn(), place)
    show(session, place, "first", after=0)

    shop.execute("UPDATE orders SET status = 'cancelled' WHERE id = 1")
    run(session, server.dsn(), place)
    show(session, place, "second", after=3)
    session.stop()
