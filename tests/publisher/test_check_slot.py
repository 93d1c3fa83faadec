"""The checks of the replication slot, seen firing and quiet: whose it is, its options, how far behind it may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from conftest import Database
from processes import eventually
from publisher.checking import assert_fixed, found, paste, trouble
from publisher.conftest import source_of
from walmere.errors import SlotLost
from walmere.lsn import INVALID_LSN
from walmere.publisher import slot
from walmere.publisher.connect import connect
from walmere.publisher.stream import Stream
from walmere.testing.server import LOGICAL, Server, binaries


def test_a_slot_of_something_else_is_a_problem(shop: Database) -> None:
    source = source_of(shop)
    literal = f"'{source.slot}'"
    with psycopg.connect(shop.server.dsn(), autocommit=True) as elsewhere:
        for connection, make, wrong in (
            (shop.connection, f"logical_replication_slot({literal}, 'test_decoding')", "output plugin test_decoding"),
            (shop.connection, f"physical_replication_slot({literal})", "is a physical slot"),
            (elsewhere, f"logical_replication_slot({literal}, 'pgoutput')", "belongs to database postgres"),
        ):
            connection.execute(f"SELECT pg_create_{make}")
            try:
                [(level, what, fix)] = trouble(source, "slot")
            finally:
                connection.execute(f"SELECT pg_drop_replication_slot({literal})")
            assert (level, fix) == ("problem", f"export WALMERE_SOURCE__SLOT={source.slot}_2")
            assert wrong in what
    assert trouble(source, "slot") == []


@pytest.mark.parametrize(("name", "level"), [("intruder", "problem"), ("walmere_shop", "warning")])
def test_a_slot_in_use_is_a_problem_unless_the_user_is_a_receiver(shop: Database, name: str, level: str) -> None:
    source = source_of(shop)
    with closing(connect(source, name, replication=True)) as connection:
        slot.create(connection, source)
        assert trouble(source, "slot") == []
        Stream(source, connection, INVALID_LSN)
        pid = connection.info.backend_pid
        assert trouble(source, "slot") == [
            (
                level,
                f"replication slot {source.slot} is in use by process {pid} (application_name {name})",
                f"SELECT pg_terminate_backend({pid});",
            )
        ]
        assert paste(shop.server, shop.name, f"SELECT pg_terminate_backend({pid});").returncode == 0
        eventually(lambda: trouble(source, "slot") == [])


def test_a_slot_with_other_options_than_the_configuration_is_a_warning(shop: Database) -> None:
    plain, two_phase = source_of(shop), source_of(shop, two_phase=True)
    failover = shop.connection.info.server_version >= 170_000
    with closing(connect(plain, "test", replication=True)) as connection:
        slot.create(connection, plain)
        assert trouble(plain, "slot") == []
        [(level, what, fix)] = trouble(two_phase, "slot")
        assert (level, fix.split()[1]) == ("warning", "WALMERE_SOURCE__TWO_PHASE=false")
        assert "two_phase off" in what
        slot.drop(connection, plain)

        slot.create(connection, two_phase)
        assert trouble(two_phase, "slot") == []
        [(level, what, fix)] = trouble(plain, "slot")
        assert (level, fix) == ("warning", "export WALMERE_SOURCE__TWO_PHASE=true")
        slot.drop(connection, plain)

        if failover:
            slot.create(connection, plain)
            wanted = source_of(shop, failover=True)
            [(level, what, fix)] = trouble(wanted, "slot")
            assert (level, "failover off" in what) == ("warning", True)
            assert_fixed(shop, wanted, "slot")


@pytest.fixture(params=[15, 18], ids=lambda version: f"pg{version}")
def small_wal(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A server whose WAL comes in pieces of a megabyte, so that a slot is soon behind."""
    if request.param not in binaries():
        pytest.skip(f"no PostgreSQL {request.param} on this machine")
    settings = {**LOGICAL, "fsync": "off", "min_wal_size": "2MB", "max_wal_size": "2MB", "checkpoint_timeout": "1d"}
    server = Server(binaries()[request.param], settings, ("--wal-segsize=1",))
    server.start()
    database = Database(server)
    yield database
    database.connection.close()
    server.remove()


def test_a_slot_is_watched_from_reserved_to_lost(small_wal: Database) -> None:
    """And when it is lost, what the server then says is understood."""
    database = small_wal
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database)

    def limit(value: str) -> None:
        database.execute(f"ALTER SYSTEM SET max_slot_wal_keep_size = '{value}'")
        database.execute("SELECT pg_reload_conf()")
        eventually(lambda: database.value("SHOW max_slot_wal_keep_size") == value)

    def said(name: str) -> tuple[str, str, str]:
        [finding] = found(source, name)
        return finding.level.value, finding.what, finding.fix

    assert found(source, "wal_status") == []
    assert said("max_slot_wal_keep_size")[0] == "warning"
    limit("50MB")
    assert said("max_slot_wal_keep_size")[:2] == (
        "ok", "max_slot_wal_keep_size is 50 MB: a slot that is further behind is lost",
    )  # fmt: skip

    with closing(connect(source, "test", replication=True)) as connection:
        slot.create(connection, source)
    assert said("wal_status")[0] == "ok"
    assert said("max_slot_wal_keep_size")[0] == "ok"

    for _ in range(16):
        database.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 900000))", "SELECT pg_switch_wal()")
    database.execute("CHECKPOINT")
    level, what, fix = said("wal_status")
    assert (level, fix) == ("warning", "walmere receive -c walmere.toml")
    assert "is extended, and retains" in what

    behind = slot.read(database.connection, source.slot)
    assert behind is not None
    assert behind.retained_bytes is not None
    limit(f"{(behind.retained_bytes >> 20) + 1}MB")
    level, what, fix = said("max_slot_wal_keep_size")
    assert (level, "the slot is lost after" in what and what.endswith(" MB more of WAL")) == ("warning", True)
    limit("1MB")
    level, what, fix = said("wal_status")
    assert (level, "is unreserved" in what) == ("problem", True)
    assert paste(database.server, database.name, fix).returncode == 0
    eventually(lambda: said("wal_status")[0] == "warning")
    assert said("max_slot_wal_keep_size")[0] == "ok"

    limit("1MB")
    database.execute("SELECT pg_switch_wal()", "CHECKPOINT")
    level, what, fix = said("wal_status")
    assert (level, fix) == ("problem", "walmere drop -c walmere.toml  # then walmere run")
    assert "is lost" in what
    assert ("(wal_removed)" in what) == (database.connection.info.server_version >= 170_000)
    assert found(source, "slot") == []  # it is for wal_status to say
    with closing(connect(source, "test", replication=True)) as connection, pytest.raises(SlotLost):
        Stream(source, connection, INVALID_LSN)
    lost = slot.read(database.connection, source.slot)
    assert lost is not None
    with pytest.raises(SlotLost):
        slot.require_usable(lost, database.name)


@pytest.mark.server(settings={"idle_replication_slot_timeout": "'1h'"})
def test_a_timeout_for_idle_slots_is_a_warning(private_database: Database) -> None:
    source = source_of(private_database)
    [(level, what, fix)] = trouble(source, "idle_replication_slot_timeout")
    assert (level, "is 1h" in what) == ("warning", True)
    assert paste(private_database.server, private_database.name, fix).returncode == 0
    eventually(lambda: trouble(source, "idle_replication_slot_timeout") == [])
