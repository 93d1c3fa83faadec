"""Story 31: the lake is in an object store. It is written, read, compared and kept up as on a disk, whatever fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import walmere
from conftest import Database
from mirror import Mirror
from object_stores import EVERY_STORE, SECRETS, Bucket
from processes import Here, eventually, running
from s3_proxy import AnswerLate, Asked, LoseAnswer, Refuse, S3Proxy
from walmere.api import Subscription
from walmere.errors import StoreUnsuitable
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.object_store import open_store
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.delta.tables import APP_ID
from walmere.spark.session import session
from workload import MixedLoad


class Faulty:
    """A rule: one in so many requests that change something, or of all, meets an error. It counts them."""

    def __init__(self, every: int, error: Callable[[], Exception], delay: float = 0.0, *, reads: bool = False) -> None:
        self.every, self.error, self.delay, self.reads = every, error, delay, reads
        self.requests = self.met = 0

    def __call__(self, asked: Asked) -> None:
        time.sleep(self.delay)
        if asked.changes or self.reads:
            self.requests += 1
            if self.requests % self.every == 0:
                self.met += 1
                raise self.error()


class StoredMirror(Mirror):
    """A subscription whose lake is in a bucket, which may be reached through a proxy."""

    def __init__(
        self, database: Database, directory: Path, bucket: Bucket, through: S3Proxy | None = None, **storage: Any
    ) -> None:
        super().__init__(database, directory)
        self._bucket = bucket
        keys = {**(bucket if through is None else through.bucket).options, **storage}
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        text = self.file.read_text().replace('path = "lake"', f'path = "{bucket.url}/the/lake"')
        self.file.write_text(f"{text}[storage]\n{lines}")

    def delta(self, table: str, schema: str = "public") -> DeltaTable:
        """Not through the proxy: `deltalake` holds Python's lock while it reads, and the proxy is in this process."""
        sink = DeltaSink(f"{self._bucket.url}/the/lake", storage_options=self._bucket.options)
        return sink.open(TableName(schema, table))


def sink_of(mirror: Mirror, **more: Any) -> DeltaSink:
    target = mirror.config.target
    return DeltaSink(str(getattr(target, "path", "")), storage_options=mirror.config.storage.settings, **more)


def position(database: Database) -> Lsn:
    return Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))


def applied_lsns(mirror: Mirror, table: str) -> list[int]:
    """The LSN of every commit of a batch, oldest first."""
    directory = sink_of(mirror).directory(TableName("public", table))
    found = []
    for name in sorted(name for name in directory.files("_delta_log") if name.endswith(".json")):
        actions = [json.loads(line) for line in (directory.read(f"_delta_log/{name}") or b"").splitlines()]
        found += [each["txn"]["version"] for each in actions if each.get("txn", {}).get("appId") == APP_ID]
    return found


def assert_verified(mirror: Mirror) -> None:
    proof = Subscription(mirror.file).verify()
    assert proof.equal, [verdict for verdict in proof.tables if not verdict.equal]


def assert_no_secret(directory: Path, bucket: Bucket) -> None:
    """Neither in what is on the disk, nor in the store."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert not [file for file in files if has_secret(file.read_bytes())]
    store = open_store(bucket.url, bucket.options)
    names = [each.name for each in store.list()]
    assert len(names) > 5
    assert not [name for name in names if has_secret((store.get(name) or (b"",))[0])]


def has_secret(content: bytes) -> bool:
    return any(secret.encode() in content for secret in SECRETS)


@pytest.mark.long
@pytest.mark.parametrize("bucket", ["s3", "gs", "az"], indirect=True)
def test_a_lake_in_an_object_store_is_all_that_one_on_a_disk_is(
    database18: Database, tmp_path: Path, bucket: Bucket, here: Here
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int, body text, price numeric(10,2), seen timestamptz)",
        "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 0, repeat(md5(i::text), 100), i / 7.0, now() FROM generate_series(1, 3000) i",
        "CREATE TABLE pairs (a int, b text)",
        "ALTER TABLE pairs REPLICA IDENTITY FULL",
        "INSERT INTO pairs SELECT i / 2, 'x' FROM generate_series(1, 100) i",
        "CREATE TABLE emptied (id int PRIMARY KEY)",
        "INSERT INTO emptied SELECT generate_series(1, 10)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    tables = ("t", "pairs", "emptied")
    mirror = StoredMirror(database, tmp_path, bucket)
    mirror.set("maintenance", deleted_share=0.01)
    code, out, _ = here("check", "-c", mirror.file)
    assert code == 0
    assert f"{bucket.url}/the/lake can be written, and respects the conditions of puts" in out
    mirror.run_once()
    mirror.assert_equal(*tables)
    copied = position(database)
    database.execute(
        "ALTER TABLE t ADD added text DEFAULT 'there'",
        "UPDATE t SET n = 1 WHERE id % 10 = 0",  # body is unchanged TOAST
        "UPDATE t SET id = -id WHERE id % 100 = 1",
        "DELETE FROM t WHERE id % 100 = 2",
        "DELETE FROM pairs WHERE ctid IN (SELECT min(ctid) FROM pairs GROUP BY a)",
        "TRUNCATE emptied",
        "INSERT INTO emptied VALUES (42)",
        "INSERT INTO t SELECT i, 2, 'short', 1, now(), 'new' FROM generate_series(5001, 5100) i",
    )
    mirror.run_once()
    mirror.assert_equal(*tables)
    operations = {each["operation"] for each in mirror.delta("t").history()}
    assert {"COPY", "APPLY", "OPTIMIZE"} <= operations, "upkeep has done its work"

    lake = walmere.lake(f"{bucket.url}/the/lake", storage_options=bucket.options)
    before, now = lake.at(copied), lake.latest()
    assert (len(before.arrow("t")), len(before.arrow("emptied"))) == (3000, 10)
    assert before.duckdb("t").sum("n").fetchall() == [(0,)]
    assert now.duckdb("t").sum("n").fetchall() == database.rows("SELECT sum(n) FROM t")
    spark = session("test", "local[2]", {})
    assert walmere.read(spark, mirror.file, "t").where("added = 'new'").count() == 100
    assert walmere.read(spark, mirror.file, "t", lsn=copied).count() == 3000

    Subscription(mirror.file).resync(["t"], wait=False)
    database.execute("UPDATE t SET n = 3 WHERE id < 100")
    mirror.run_once()
    assert_verified(mirror)
    found = Subscription(mirror.file).status()
    assert {each["name"]: each["phase"] for each in found["tables"]} == {f"public.{name}": "r" for name in tables}
    assert all(each["files"] for each in found["tables"])

    sink, table = sink_of(mirror, keep_seconds=0.0), TableName("public", "t")
    files = len(sink.directory(table).files(""))
    sink.vacuum(table)
    assert len(lake.at(copied).arrow("t")) == 3000  # a point that must be readable
    mirror.set("target", keep_seconds=0)
    database.execute("UPDATE t SET n = 4 WHERE id = 5")
    mirror.run_once()
    sink.vacuum(table)
    assert len(sink.directory(table).files("")) < files
    assert_verified(mirror)
    assert_no_secret(tmp_path, bucket)


@pytest.mark.parametrize("bucket", EVERY_STORE, indirect=True)
def test_a_run_that_is_killed_in_the_middle_of_a_commit_goes_on_where_it_was(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = StoredMirror(database, tmp_path, bucket, proxy)
    events = tmp_path / "events"
    events.mkdir()
    spark = f'[spark]\n"spark.eventLog.enabled" = true\n"spark.eventLog.dir" = "file://{events}"\n'
    mirror.file.write_text(mirror.file.read_text().replace("[spark]\n", spark))
    with running("run", "-c", mirror.file, output=tmp_path / "output") as process:
        eventually(lambda: mirror.phase("t") == "r" or process.poll() is not None, 90)
        database.execute("UPDATE t SET n = 1 WHERE id % 2 = 0")
        mirror.becomes_equal("t")
        held = threading.Event()

        def hold(asked: Asked) -> None:
            """A commit is made, and its answer waits."""
            if asked.changes and "/public/t/_delta_log/" in f"/{asked.path}":
                held.set()
                raise AnswerLate(60)

        proxy.rule = hold
        database.execute("UPDATE t SET n = 2 WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")
        assert held.wait(60)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    proxy.rule = lambda _: None
    database.execute("UPDATE t SET n = 3 WHERE id % 5 = 0")
    mirror.run_once()
    mirror.assert_equal("t")
    assert_verified(mirror)
    lsns = applied_lsns(mirror, "t")
    assert lsns == sorted(set(lsns)), "no batch was committed twice"
    assert any(events.rglob("*"))
    assert_no_secret(tmp_path, bucket)


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_made(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy, here: Here
) -> None:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    proxy.forget = ("If-None-Match",)
    mirror = StoredMirror(database18, tmp_path, bucket, proxy)
    code, out, _ = here("check", "-c", mirror.file)
    assert code == 1
    assert "the store let a second put replace an object" in out
    assert "If-None-Match" in out
    with pytest.raises(StoreUnsuitable, match="created only once"):
        mirror.run_once()
    assert not database18.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", database18.slot)
    assert list(open_store(bucket.url, bucket.options).list()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda: Faulty(10, Refuse, 0.02, reads=True), id="slow, and one in ten refused"),
        pytest.param(lambda: Faulty(10, LoseAnswer), id="lost"),
        pytest.param(lambda: Faulty(15, lambda: AnswerLate(2.5)), id="late"),
    ],
)
def test_a_store_that_fails_loses_answers_or_is_slow_loses_and_doubles_nothing(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy, fault: Callable[[], Faulty]
) -> None:
    MixedLoad.create(database18, "numeric(12,2)")
    mirror = StoredMirror(database18, tmp_path, bucket, proxy, timeout=2)
    mirror.run_once()
    proxy.rule = rule = fault()
    with mirror.following(), MixedLoad(database18, seed=31):
        mirror.becomes(lambda: rule.met >= 15)
    mirror.run_once()
    proxy.rule = lambda _: None
    mirror.assert_equal(*MixedLoad.TABLES)
    for table in MixedLoad.TABLES:
        lsns = applied_lsns(mirror, table)
        assert lsns == sorted(set(lsns)), "no batch was committed twice"
    assert_verified(mirror)


@pytest.mark.long
def test_a_store_that_is_away_for_a_while_stops_nothing(
    database18: Database, tmp_path: Path, bucket: Bucket, proxy: S3Proxy
) -> None:
    MixedLoad.create(database18, "numeric(12,2)")
    mirror = StoredMirror(database18, tmp_path, bucket, proxy, timeout=1)
    with mirror.following() as (launcher, _), MixedLoad(database18, seed=32):
        mirror.becomes(lambda: {each.phase for each in mirror.tables()} == {"r"})
        proxy.rule = rule = Faulty(1, Refuse, reads=True)
        away = position(database18)
        confirmed = "SELECT confirmed_flush_lsn > %s FROM pg_replication_slots WHERE slot_name = %s"
        eventually(lambda: database18.value(confirmed, str(away), database18.slot), 60)
        # a request is repeated for some time; after that, the query ends, and is started again
        eventually(lambda: launcher._start_at > 0, 120, every=0.5)
        assert rule.met > 10
        proxy.rule = lambda _: None
        target = position(database18)
        mirror.becomes(lambda: all(each.applied_lsn >= target for each in mirror.tables()))
    mirror.run_once()
    mirror.assert_equal(*MixedLoad.TABLES)
    assert_verified(mirror)
