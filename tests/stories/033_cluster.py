"""Story 33: a Spark cluster whose executors share nothing with the driver but the network and the object store.

The workers are processes of another Unix user, with directories of their own. They cannot read the driver's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import Database, version_under_test
from machines import Machine
from mirror import Mirror
from object_stores import ENVIRONMENT, Bucket
from processes import eventually
from servers import BINARIES
from walmere.object_store import open_store
from walmere.testing.cluster import Cluster
from walmere.testing.server import LOGICAL, Server

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
        found = Machine(mirror, tmp_path / name, bucket, cluster, variables=variables, spark=spark, **more)  # type: ignore[arg-type]
        made.append(found)
        return found

    yield make
    for each in made:
        each.end()


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
    executors = {"0", "1"}
    eventually(lambda: driver.executors("copy") == executors and driver.executors("apply") == executors, 30)
    assert_no_secret(driver.directory, *(worker.directory for worker in cluster.workers))
    driver.stop()
    assert_no_secret(driver.directory)
    store = open_store(bucket.url, bucket.options)
    for found in store.list():
        content, _ = store.get(found.name) or (b"", "")
        assert not [secret for secret in SECRETS if secret in content], found.name
