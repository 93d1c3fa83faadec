"""Story 37: executors that are containers of YARN, with the credentials of the store in a file of the node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Database
from machines import Machine
from mirror import Mirror
from object_stores import ENVIRONMENT, Bucket
from processes import eventually
from walmere.lsn import Lsn
from yarn_cluster import YarnCluster

SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[YarnCluster]:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    cluster = YarnCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture
def driver(database: Database, cluster: YarnCluster, bucket: Bucket, tmp_path: Path) -> Iterator[Machine]:
    """A machine whose Spark settings have the path of the file of credentials, and no credentials."""
    keys = f"aws_access_key_id = {ENVIRONMENT['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {SECRET}\n"
    file = cluster.write_private("credentials", f"[default]\n{keys}")
    machine = Machine(
        Mirror(database, tmp_path / "mirror"),
        tmp_path / "driver",
        bucket,
        cluster,
        spark={"spark.executorEnv.AWS_SHARED_CREDENTIALS_FILE": str(file)},
        variables={"HADOOP_CONF_DIR": str(cluster.configuration)},
    )
    yield machine
    machine.end()
    file.unlink()


def kill_while_it_works(driver: Machine, cluster: YarnCluster) -> None:
    """kill -9 of the container of an executor on which a task runs."""
    busy: list[str] = []

    def find() -> bool:
        driver.runs()
        busy[:] = [each["attributes"]["CONTAINER_ID"] for each in driver.busy_executors()]
        return bool(busy)

    eventually(find, 60, driver.said)
    cluster.kill_container(busy[0])


def files_with_the_secret(*directories: Path) -> list[Path]:
    found = []
    for path in (path for directory in directories for path in directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it was deleted just now
            if path.is_file() and SECRET.encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.long
@pytest.mark.timeout(480)
def test_containers_that_are_lost_in_the_middle_of_copy_and_batch_lose_and_double_nothing(
    database: Database, cluster: YarnCluster, driver: Machine
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, name text)",
        "INSERT INTO item SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 600000) i",
        "CREATE PUBLICATION pub FOR TABLE item",
    )
    driver.start("run")
    eventually(lambda: driver.phase("item") == "d", 90, driver.said)
    kill_while_it_works(driver, cluster)
    eventually(lambda: driver.phase("item") == "r", 120, driver.said)
    assert driver.lost_tasks("copy") > 0
    for turn in range(10):
        database.execute(f"UPDATE item SET name = repeat(md5(id::text), 4) || '{turn}' WHERE id % 6 = {turn % 6}")
        kill_while_it_works(driver, cluster)
        driver.wait_applied(Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text")))
        if driver.lost_tasks("apply"):
            break
    assert driver.lost_tasks("apply") > 0
    assert files_with_the_secret(cluster.directory, driver.directory) == [cluster.directory / "credentials"]
    driver.stop()
    done = driver.walmere("verify")
    assert done.returncode == 0, done.stderr
