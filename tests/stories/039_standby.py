"""Story 39: two machines run one subscription. One works; the other one waits, and goes on when the first is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror
from object_stores import Bucket
from processes import eventually, running, walmere
from proxy import Proxy
from receiving import receive_all
from workload import MixedLoad


def machine(database: Database, directory: Path, bucket: Bucket, name: str) -> Mirror:
    """A mirror whose log and state are in a store, with a directory of its own."""
    mirror = Mirror(database, directory)
    file = directory / f"{name}.toml"
    file.write_text(
        mirror.file.read_text().replace('directory = "subscription"', f'directory = "{name}"') + bucket.section
    )
    mirror.file = file
    mirror.set("subscription", store=f"{bucket.url}/walmere/shop", upload_seconds=0.2)
    return mirror


def through(source: Proxy, database: Database, mirror: Mirror) -> Path:
    """The mirror's configuration, with connections through the proxy."""
    file = mirror.file.with_name(f"through-{mirror.file.name}")
    file.write_text(mirror.file.read_text().replace(f":{database.server.port}/", f":{source.port}/"))
    return file


def test_while_the_source_is_down_a_machine_applies_what_its_log_has(
    database18: Database, tmp_path: Path, bucket: Bucket
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with Proxy(database.server.port) as source:
        mirror = machine(database, tmp_path, bucket, "one")
        mirror.file = through(source, database, mirror)
        mirror.run_once()
        database.execute("INSERT INTO t SELECT generate_series(1, 100)")
        receive_all(database, mirror.config)
    with mirror.following():
        mirror.becomes_equal("t")


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize("lost", ["machine", "driver", "network"])
def test_a_standby_goes_on_when_the_other_machine_or_its_driver_is_lost_and_that_one_is_the_standby_later(
    database18: Database, tmp_path: Path, bucket: Bucket, lost: str
) -> None:
    database = database18
    MixedLoad.create(database, "numeric(20, 2)")
    one, two = (machine(database, tmp_path, bucket, name) for name in ("one", "two"))
    said = {name: tmp_path / f"{name}.log" for name in ("one", "two", "again")}

    def waits(name: str) -> bool:
        return "is running on another machine" in said[name].read_text()

    with (
        Proxy(database.server.port) as source,
        MixedLoad(database, 39, writers=2, pause=0.1),
        running("run", "-c", through(source, database, one), output=said["one"]) as first,
    ):
        eventually(lambda: all(one.phase(table) == "r" for table in MixedLoad.TABLES), 90, said["one"].read_text)
        copied = {each.name: each.snapshot_lsn for each in one.tables()}
        with running("run", "-c", two.file, output=said["two"]) as second:
            eventually(lambda: waits("two"), 60, said["two"].read_text)
            if lost == "machine":
                os.killpg(first.pid, signal.SIGKILL)
            elif lost == "driver":  # its receiver ends by itself, some time later
                first.kill()
            else:  # the server ends the connection, some time later
                source.freeze()
            two.becomes(lambda: len(list(two.tables())) == 3 and all(each.follows for each in two.tables()))
            if lost == "network":
                eventually(lambda: first.poll() == 1, 60, said["one"].read_text)
                assert "taken over" in said["one"].read_text()
            with running("run", "-c", one.file, output=said["again"]) as again:
                eventually(lambda: waits("again"), 60, said["again"].read_text)
                reached = min(each.applied_lsn for each in two.tables())
                eventually(lambda: min(each.applied_lsn for each in two.tables()) > reached, 60, said["two"].read_text)
                assert again.poll() is None
                assert second.poll() is None
    assert "taken over" not in said["two"].read_text()
    two.run_once()
    two.assert_equal(*MixedLoad.TABLES)
    assert {each.name: each.snapshot_lsn for each in two.tables()} == copied, "no table was copied again"
    assert walmere("verify", "-c", two.file).returncode == 0
