"""Story 33: a Spark cluster whose executors share nothing with the driver but the network and the object store.

The workers are processes of another Unix user, with directories of their own. They cannot read the driver's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import psycopg
import pytest

from conftest import Database, version_under_test
from machines import Machine
from mirror import Mirror
from object_stores import ENVIRONMENT, Bucket
from processes import eventually
from s3_proxy import Asked, S3Proxy
from servers import BINARIES
from walmere.changelog.store.log_store import LogStore, read_head
from walmere.changelog.store.objects import numbers_before, read_object
from walmere.lsn import Lsn
from walmere.object_store import open_store
from walmere.testing.cluster import Cluster, Worker
from walmere.testing.server import LOGICAL, Server
from workload import MixedLoad

SUBMIT = Path(__file__).parents[2] / "deploy" / "submit.py"
PASSWORD = "the-password-of-the-source"
SECRETS = (PASSWORD.encode(), ENVIRONMENT["AWS_SECRET_ACCESS_KEY"].encode())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two workers. An application takes one core of each; another one may run beside it."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    cluster = Cluster(workers=2, cores=2, memory="2g", variables=ENVIRONMENT)
    cluster.start()
    yield cluster
    cluster.remove()


@pytest.fixture(scope="module")
def source_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that asks for a password, and notices soon that a receiver is gone."""
    settings = {**LOGICAL, "fsync": "off", "wal_sender_timeout": "'3s'", "max_wal_size": "2GB"}
    server = Server(BINARIES[version_under_test(request.config)], settings)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE app LOGIN REPLICATION PASSWORD '{PASSWORD}' IN ROLE pg_read_all_data")
    (server.data / "pg_hba.conf").write_text(
        "host all,replication app 127.0.0.1/32 scram-sha-256\nhost all postgres 127.0.0.1/32 trust\n"
    )
    server.reload()
    yield server
    server.remove()


@pytest.fixture
def source(source_server: Server) -> Iterator[Database]:
    database = Database(source_server)
    yield database
    database.drop()


Start = Callable[..., Machine]


@pytest.fixture
def machine(source: Database, cluster: Cluster, bucket: Bucket, tmp_path: Path) -> Iterator[Start]:
    """Makes a machine for a driver. None outlives the test."""
    made: list[Machine] = []
    mirror = Mirror(source, tmp_path / "mirror", user="app")
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:{source.server.port}:*:app:{PASSWORD}\n")
    passwords.chmod(0o600)

    def make(name: str, **more: object) -> Machine:
        variables = {"PGPASSFILE": str(passwords)}
        spark = {"spark.cores.max": "2", "spark.executor.cores": "1", **more.pop("spark", {})}  # type: ignore[dict-item]
        place = more.pop("bucket", bucket)
        found = Machine(mirror, tmp_path / name, place, cluster, variables=variables, spark=spark, **more)  # type: ignore[arg-type]
        made.append(found)
        return found

    yield make
    for each in made:
        each.end()


def insert_position(source: Database) -> Lsn:
    return Lsn.parse(source.value("SELECT pg_current_wal_insert_lsn()::text"))


def commits(bucket: Bucket, table: str) -> list[int]:
    """The LSN of every commit that changes rows of a table, in the order of the commits."""
    store = open_store(f"{bucket.url}/lake/public/{table}/_delta_log", bucket.options)
    found = []
    for each in store.list():
        if re.fullmatch(r"\d{20}\.json", each.name):
            content, _ = store.get(each.name) or (b"", "")
            actions = map(json.loads, content.splitlines())
            found += [action["txn"]["version"] for action in actions if "txn" in action]
    return found


def assert_each_batch_is_there_once(bucket: Bucket, *tables: str) -> None:
    """A commit that was repeated, or that came late, would have the LSN of one before it, or a lower one."""
    for table in tables:
        lsns = commits(bucket, table)
        assert lsns == sorted(set(lsns)), table


def kill_while_it_works(driver: Machine, cluster: Cluster) -> Worker:
    """kill -9 of a worker on which a task runs."""
    busy: list[Worker] = []

    def find() -> bool:
        driver.runs()
        hosts = driver.busy_hosts()
        busy[:] = [worker for worker in cluster.workers if worker.host in hosts]
        return bool(busy)

    eventually(find, 60, driver.said)
    busy[0].kill()
    return busy[0]


def assert_no_secret(*places: Path) -> None:
    """In any file below these directories."""
    for place in places:
        for path in place.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not [secret for secret in SECRETS if secret in content], path


@pytest.mark.long
def test_copy_and_changes_are_the_work_of_executors_that_share_nothing_with_the_driver(
    source: Database, cluster: Cluster, machine: Start, bucket: Bucket
) -> None:
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "CREATE TABLE part (id int PRIMARY KEY, item int, note text)",
        "INSERT INTO item SELECT i, repeat('name ', 10) FROM generate_series(1, 10000) i",
        "INSERT INTO part SELECT i, i % 100, repeat('note ', 10) FROM generate_series(1, 10000) i",
        "CREATE PUBLICATION pub FOR TABLE item, part",
    )
    driver = machine("driver")
    driver.start("run")
    driver.wait_for("the copy", "item", "part")
    for number in range(3):
        source.execute(
            f"UPDATE item SET name = 'changed' WHERE id % 1000 = {number}",
            f"DELETE FROM part WHERE id % 1000 = {number}",
            f"INSERT INTO part SELECT {20_000 + number * 500} + i, 0, 'new' FROM generate_series(1, 500) i",
        )
        driver.wait_for("the changes", "item", "part")
    hosts = {worker.host for worker in cluster.workers}
    eventually(lambda: driver.hosts("copy") == hosts and driver.hosts("apply") == hosts, 30)
    assert_no_secret(driver.directory, *(worker.directory for worker in cluster.workers))
    driver.stop()
    assert_no_secret(driver.directory)
    store = open_store(bucket.url, bucket.options)
    for found in store.list():
        content, _ = store.get(found.name) or (b"", "")
        assert not [secret for secret in SECRETS if secret in content], found.name


@pytest.mark.long
@pytest.mark.timeout(480)
def test_workers_that_are_lost_in_the_middle_of_copy_and_batch_lose_and_double_nothing(
    source: Database, cluster: Cluster, machine: Start, bucket: Bucket
) -> None:
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 600000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    # all cores: what is lost can only be replaced when the worker is there again
    driver = machine("driver", spark={"spark.cores.max": "4", "spark.executor.cores": "2"})
    driver.start("run")
    eventually(lambda: driver.phase("item") == "d", 90, driver.said)
    lost = kill_while_it_works(driver, cluster)
    lost.start()
    eventually(lambda: driver.phase("item") == "r", 120, driver.said)
    assert driver.lost_tasks("copy") > 0
    cluster.wait_for_workers()
    for turn in range(10):
        source.execute(f"UPDATE item SET name = repeat(md5(id::text), 4) || '{turn}' WHERE id % 6 = {turn % 6}")
        lost = kill_while_it_works(driver, cluster)
        lost.start()
        driver.wait_applied(insert_position(source))
        cluster.wait_for_workers()
        if driver.lost_tasks("apply"):
            break
    assert driver.lost_tasks("apply") > 0
    driver.stop()
    done = driver.walmere("verify")
    assert done.returncode == 0, done.stderr
    assert_each_batch_is_there_once(bucket, "item")


def objects_of(bucket: Bucket, epoch: int) -> set[int]:
    """The numbers of the objects of the log that receivers up to an epoch have put."""
    store = open_store(f"{bucket.url}/log", bucket.options)
    head = read_head(store)
    assert head is not None
    log = LogStore(store, head[0].generation)
    found = (read_object(log, number) for number in numbers_before(log, 1 << 60))
    return {each.header.number for each in found if each is not None and each.header.epoch <= epoch}


def epoch_of_log(bucket: Bucket) -> int:
    head = read_head(open_store(f"{bucket.url}/log", bucket.options))
    return 0 if head is None else head[0].epoch


@pytest.mark.long
@pytest.mark.timeout(480)
def test_a_driver_that_burns_is_replaced_and_a_zombie_changes_nothing(
    source: Database, cluster: Cluster, machine: Start, bucket: Bucket
) -> None:
    """The first machine stops in the middle of its work, the second burns. The first goes on beside the third."""
    MixedLoad.create(source, "numeric(20, 2)")
    zombie, burned, last = (machine(name) for name in ("zombie", "burned", "last"))

    def follows(driver: Machine) -> None:
        driver.wait_applied(Lsn(1))
        driver.wait_applied(insert_position(source))

    with MixedLoad(source, 17, writers=2, pause=0.2):
        zombie.start("run")
        follows(zombie)
        copied = {each.name: each.snapshot_lsn for each in zombie.tables()}
        zombie.signal(signal.SIGSTOP)
        epoch = epoch_of_log(bucket)
        burned.start("run")
        follows(burned)
        assert epoch_of_log(bucket) > epoch
        burned.burn()
        last.start("run")
        last.wait_applied(Lsn(1))
        of_zombie = objects_of(bucket, epoch)
        zombie.signal(signal.SIGCONT)
        assert zombie.ended(90) == 1
        assert re.search("another (driver|receiver) has taken over", zombie.said()), zombie.said()
        follows(last)
    assert objects_of(bucket, epoch) <= of_zombie, "it has put nothing"
    assert {each.name: each.snapshot_lsn for each in last.tables()} == copied, "no table was copied again"
    last.stop()
    done = last.walmere("verify")
    assert done.returncode == 0, done.stderr
    assert_each_batch_is_there_once(bucket, *MixedLoad.TABLES)


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.task.duration.threshold": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.efficiency.enabled": "false",
}
DYNAMIC_ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
}


def second_attempts(driver: Machine) -> int:
    """How many tasks have got a second attempt while the first one was running."""
    return sum(task["Task Info"]["Speculative"] for job in ("copy", "apply") for task in driver.tasks(job))


def removed_executors(driver: Machine) -> int:
    return sum(event["Event"] == "SparkListenerExecutorRemoved" for event in driver.events())


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        pytest.param(SPECULATION, second_attempts, id="speculation"),
        pytest.param(DYNAMIC_ALLOCATION, removed_executors, id="dynamic allocation"),
    ],
)
def test_speculation_and_dynamic_allocation_change_nothing_in_the_result(
    source: Database,
    machine: Start,
    bucket: Bucket,
    settings: Mapping[str, str],
    count: Callable[[Machine], int],
) -> None:
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 200000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    driver = machine("driver", spark={"spark.cores.max": "4", "spark.executor.cores": "2", **settings})
    driver.start("run")
    eventually(lambda: driver.phase("item") == "r", 120, driver.said)

    def more_than(before: int) -> bool:
        return count(driver) > before

    for turn in range(3):
        before = count(driver)
        source.execute(
            f"UPDATE item SET name = 'changed {turn}' || md5(id::text)", f"DELETE FROM item WHERE id % 10 = {turn}"
        )
        driver.wait_applied(insert_position(source))
        eventually(partial(more_than, before), 60, driver.said)
    driver.stop()
    driver.assert_equal("item")
    assert_each_batch_is_there_once(bucket, "item")


@pytest.mark.long
@pytest.mark.timeout(480)
def test_blocks_of_the_log_that_several_tasks_of_an_executor_read_are_fetched_once(
    source: Database, machine: Start, bucket: Bucket
) -> None:
    """A large batch of updates is divided by key, so each of its tasks reads all its blocks."""
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, md5(i::text) FROM generate_series(1, 200000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    fetched: Counter[tuple[str, str]] = Counter()

    def count(asked: Asked) -> None:
        if asked.method == "GET" and "/log/" in asked.path and not asked.range.startswith("bytes=0-"):
            fetched[asked.path, asked.range] += 1

    with S3Proxy(bucket) as proxy:
        driver = machine("driver", spark={"spark.executor.cores": "2"}, bucket=proxy.bucket)  # one executor
        driver.start("run")
        driver.wait_applied(insert_position(source))
        proxy.rule = count
        # its segments are compressed
        source.execute(
            "UPDATE item SET name = (SELECT string_agg(md5((id + i)::text), '') FROM generate_series(1, 5) i)"
        )
        driver.wait_applied(insert_position(source))
        driver.stop()
    jobs = [task["Stage ID"] for task in driver.tasks("apply")]
    assert max(map(jobs.count, jobs)) == 2, "two tasks"
    assert fetched
    assert set(fetched.values()) == {1}


@pytest.mark.long
@pytest.mark.timeout(480)
def test_spark_submit_gives_master_and_settings(source: Database, cluster: Cluster, machine: Start) -> None:
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, 'name' FROM generate_series(1, 10000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    driver = machine("driver")
    driver.file.write_text(driver.file.read_text().partition("[spark]")[0])
    settings = [word for name, value in driver.spark.items() for word in ("--conf", f"{name}={value}")]
    submit: list[str | Path] = [
        Path(sys.executable).with_name("spark-submit"),
        "--master",
        cluster.url,
        *settings,
        SUBMIT,
    ]

    def submitted(*arguments: str) -> None:
        variables = {**driver.variables, "PYSPARK_DRIVER_PYTHON": sys.executable}
        done = subprocess.run(
            [*submit, *arguments, "-c", driver.file],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            env=variables,
            cwd=driver.directory,
        )
        assert done.returncode == 0, done.stderr

    submitted("run", "--once")
    submitted("verify")
    assert driver.hosts("copy") == {worker.host for worker in cluster.workers}, (
        "the master and the event log are from spark-submit"
    )


NOTEBOOK = """
import json, sys, threading, time
import psycopg
import walmere
from pyspark.sql import SparkSession

given = json.loads(sys.argv[1])
builder = SparkSession.builder.master(given["master"])
for name, value in given["settings"].items():
    builder = builder.config(name, value)
context = builder.getOrCreate().sparkContext
found, done = {"jobs": 0}, threading.Event()

def compute():
    context.addJobTag("theirs")
    while not done.is_set():
        assert context.parallelize(range(8), 2).map(lambda number: time.sleep(0.1) or number).sum() == 28
        found["jobs"] += 1

theirs = threading.Thread(target=compute)
theirs.start()
subscription = walmere.Subscription(given["file"])
running = threading.Thread(target=subscription.run)
running.start()
sys.stdin.readline()
subscription.stop()
running.join()
found["during"] = found["jobs"]
subscription.run(once=True)
with psycopg.connect(given["source"]) as writer:
    writer.execute("UPDATE item SET name = 'changed' WHERE id = 1")
subscription.run(once=True)
found["equal"] = subscription.verify().equal
done.set()
theirs.join()
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.timeout(480)
def test_in_a_session_of_somebody_else_only_our_own_jobs_are_cancelled(
    source: Database, cluster: Cluster, machine: Start
) -> None:
    """A notebook computes all the time. A run in it is stopped in the middle of a copy, then started again."""
    source.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 600000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    driver = machine("notebook")
    settings = {**driver.spark, "spark.cores.max": "4", "spark.executor.cores": "2", "spark.pyspark.python": "python3"}
    given = {"master": cluster.url, "settings": settings, "file": str(driver.file), "source": source.dsn}
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**driver.variables, "PYSPARK_PYTHON": "python3", "PYSPARK_DRIVER_PYTHON": sys.executable},
        cwd=driver.directory,
    )
    try:
        copying = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND usename = 'app' AND query LIKE 'COPY %'"
        eventually(lambda: source.rows(copying) or notebook.poll() is not None, 90)
        out, error = notebook.communicate("\n", timeout=240)
    finally:
        notebook.kill()
        notebook.wait()
    assert notebook.returncode == 0, error
    found = json.loads(out.splitlines()[-1])
    assert found["equal"]
    assert found["jobs"] > found["during"] > 0
    whose: dict[int, str] = {}
    results: dict[int, str] = {}
    for event in driver.events():
        if event["Event"] == "SparkListenerJobStart":
            tags = event["Properties"].get("spark.job.tags", "")  # Spark adds some of its own
            whose[event["Job ID"]] = " ".join(re.findall(r"\b(theirs|walmere-\w+)-?", tags)) or str(event["Properties"])
        elif event["Event"] == "SparkListenerJobEnd":
            results[event["Job ID"]] = event["Job Result"]["Result"]
    assert set(whose.values()) == {"theirs", *(f"walmere-{job}" for job in ("check", "copy", "apply", "verify"))}
    cancelled = {whose[job] for job, result in results.items() if result != "JobSucceeded"}
    assert cancelled == {"walmere-copy"}


PROGRAM = """
import json, sys
import walmere

given = json.loads(sys.argv[1])
spark = walmere.session(given["master"], given["settings"])
item = spark.read.format("pgoutput").option("table", "item").load(given["directory"])
read = {"batch": item.count(), "ids": item.selectExpr("sum(id)").first()[0]}
stream = spark.readStream.format("pgoutput").option("directory", given["directory"]).option("table", "item").load()
batches = []
query = stream.writeStream.foreachBatch(lambda rows, _: batches.append(rows.count())).trigger(availableNow=True).start()
query.awaitTermination()
print(json.dumps({**read, "stream": sum(batches)}))
"""


@pytest.mark.long
def test_format_pgoutput_reads_the_log_from_the_store_on_executors(
    source: Database, cluster: Cluster, machine: Start
) -> None:
    """The environment of the driver's Python is not active, and no segment is on its disk."""
    source.execute("CREATE TABLE item (id int PRIMARY KEY, name text)", "CREATE PUBLICATION pub FOR TABLE item")
    driver = machine("driver")
    receive: list[str | Path] = [sys.executable, "-m", "walmere", "receive", "--once", "-c", driver.file]

    def received() -> None:
        subprocess.run(receive, check=True, env=driver.variables, capture_output=True)

    received()
    for first in (1, 10_001, 20_001):
        source.execute(
            f"INSERT INTO item SELECT i, repeat(md5('x'), 9) FROM generate_series({first}, {first + 9999}) i"
        )
        received()
    segments = list((driver.directory / "subscription").rglob("*.arrow"))
    for each in segments:
        each.unlink()
    assert segments
    given = {"master": cluster.url, "settings": driver.spark, "directory": driver.directory / "subscription"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(given, default=str)],
        capture_output=True,
        text=True,
        check=False,
        env={**driver.variables, "PATH": os.defpath},
        cwd=driver.directory,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"batch": 30_000, "ids": 30_000 * 30_001 // 2, "stream": 30_000}
