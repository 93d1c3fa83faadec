from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import psycopg
import pytest

from conftest import Database
from processes import eventually
from publisher.conftest import source_of
from walmere.config import Source
from walmere.errors import (
    AccessRefused,
    NotConfigured,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotUnsuitable,
    SourceError,
    SourceUnavailable,
)
from walmere.lsn import INVALID_LSN, Lsn
from walmere.publisher import slot, transactions
from walmere.publisher.connect import Connection, connect
from walmere.publisher.stream import Stream
from walmere.testing.server import Server

USABLE = slot.Slot("s", "pgoutput", "shop", None, Lsn(1), Lsn(2), "reserved", None, 0, False, False, None)


@contextmanager
def replicating(source: Source) -> Iterator[Connection]:
    with closing(connect(source, "test", replication=True)) as connection:
        yield connection


def test_a_slot_is_made_as_create_subscription_makes_it(database: Database) -> None:
    source = source_of(database)
    assert slot.read(database.connection, source.slot) is None
    with replicating(source) as connection:
        consistent_point = slot.create(connection, source)
    found = slot.read(database.connection, source.slot)
    assert found is not None
    assert (found.plugin, found.database, found.active, found.wal_status) == (
        "pgoutput",
        database.name,
        False,
        "reserved",
    )
    assert found.confirmed_lsn == consistent_point > INVALID_LSN
    assert found.restart_lsn is not None
    assert found.restart_lsn <= consistent_point
    assert (found.two_phase, found.failover, found.invalidation_reason) == (False, False, None)
    slot.require_usable(found, database.name)
    assert database.value("SELECT temporary FROM pg_replication_slots WHERE slot_name = %s", source.slot) is False


def test_a_slot_that_waits_for_transactions_says_for_which_ones(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "REPORTED_WAIT", 0.1)
    source = source_of(database)
    database.execute("CREATE TABLE item (id int)")
    with (
        replicating(source) as connection,
        ThreadPoolExecutor() as pool,
        psycopg.connect(database.dsn) as writer,
    ):
        writer.execute("INSERT INTO item VALUES (1)")
        creating = pool.submit(slot.create, connection, source)
        eventually(lambda: f"pid {writer.info.backend_pid} of role" in caplog.text, why=lambda: caplog.text)
        assert f"creating replication slot {source.slot}: waits for open transactions" in caplog.text
        writer.rollback()
        assert creating.result() > INVALID_LSN


@pytest.mark.server(version=18)
def test_a_slot_on_a_standby_that_waits_for_its_primary_says_so(
    private_server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "REPORTED_WAIT", 0.1)
    database = Database(private_server)
    database.connection.close()
    private_server.stop()
    (private_server.data / "standby.signal").touch()  # without a primary, it waits forever
    private_server.start()
    source = source_of(database)
    with replicating(source) as connection, ThreadPoolExecutor() as pool:
        creating = pool.submit(slot.create, connection, source)
        try:
            eventually(
                lambda: "SELECT pg_log_standby_snapshot() on the primary" in caplog.text, why=lambda: caplog.text
            )
        finally:
            connection.cancel_safe()  # the pool waits for it
        with pytest.raises(SourceError):
            creating.result()
    assert "and again when the transactions that are open there now have ended" in caplog.text


def test_a_slot_that_waits_says_so_although_the_reason_cannot_be_read(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> str:
        raise AccessRefused("reading the open transactions", "permission denied for view pg_prepared_xacts", "GRANT …")

    monkeypatch.setattr(transactions, "REPORTED_WAIT", 0.1)
    monkeypatch.setattr(transactions, "writing", refused)
    with transactions.reported_wait(source_of(database), "s"):
        eventually(lambda: "waits" in caplog.text, why=lambda: caplog.text)
    expected = (
        "the reason could not be read (reading the open transactions: permission denied for view pg_prepared_xacts)"
    )
    assert f"creating replication slot s: waits; {expected}" in caplog.text
    assert "hint" not in caplog.text


def test_a_slot_is_dropped(database: Database) -> None:
    source = source_of(database)
    with replicating(source) as connection:
        slot.create(connection, source)
        slot.drop(connection, source)
        assert slot.read(database.connection, source.slot) is None
        with pytest.raises(SlotMissing):
            slot.drop(connection, source)


def test_a_slot_that_exists_is_not_made_again(database: Database) -> None:
    source = source_of(database)
    with replicating(source) as connection:
        slot.create(connection, source)
        with pytest.raises(SourceError, match="already exists") as caught:
            slot.create(connection, source)
    assert not caught.value.transient


@pytest.mark.parametrize("option", ["two_phase", "failover"])
def test_the_options_of_the_configuration_become_those_of_the_slot(database: Database, option: str) -> None:
    source = source_of(database, **{option: True})
    with replicating(source) as connection:
        if option == "failover" and database.connection.info.server_version < 170_000:
            with pytest.raises(NotConfigured, match=r"source\.failover needs PostgreSQL 17 or later"):
                slot.create(connection, source)
            assert slot.read(database.connection, source.slot) is None
        else:
            slot.create(connection, source)
            found = slot.read(database.connection, source.slot)
            assert found is not None
            assert getattr(found, option) is True


def test_a_slot_in_use_can_be_neither_shared_nor_dropped(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    source = source_of(database)
    with replicating(source) as first, replicating(source) as second:
        slot.create(first, source)
        Stream(source, first, INVALID_LSN)
        found = slot.read(database.connection, source.slot)
        assert found is not None
        assert found.active_pid == first.info.backend_pid
        for attempt in (lambda: Stream(source, second, INVALID_LSN), lambda: slot.drop(second, source)):
            with pytest.raises(SlotInUse, match=f"active for PID {first.info.backend_pid}"):
                attempt()
    eventually(lambda: not database.value("SELECT active FROM pg_replication_slots WHERE slot_name = %s", source.slot))


def test_a_role_without_replication_cannot_make_a_slot(database: Database, role: str) -> None:
    database.execute(f'ALTER ROLE "{role}" NOREPLICATION')
    with pytest.raises(AccessRefused):
        connect(source_of(database, user=role), "test", replication=True)


@pytest.mark.parametrize(
    ("found", "error", "wrong"),
    [
        (replace(USABLE, plugin="wal2json"), SlotUnsuitable, "uses the output plugin wal2json"),
        (replace(USABLE, plugin=None, database=None), SlotUnsuitable, "is a physical slot"),
        (replace(USABLE, database="other"), SlotUnsuitable, "belongs to database other, not to shop"),
        (replace(USABLE, wal_status="lost"), SlotLost, "it is invalidated"),
        (
            replace(USABLE, wal_status="lost", invalidation_reason="wal_removed"),
            SlotLost,
            r"invalidated \(wal_removed\)",
        ),
    ],
)
def test_a_slot_of_something_else_is_refused(found: slot.Slot, error: type[SourceError], wrong: str) -> None:
    with pytest.raises(error, match=wrong):
        slot.require_usable(found, "shop")


@pytest.mark.parametrize("status", ["reserved", "extended", "unreserved"])
def test_a_slot_that_still_has_its_wal_is_usable(status: str) -> None:
    slot.require_usable(replace(USABLE, wal_status=status), "shop")


@pytest.mark.parametrize(
    "private_server",
    [
        pytest.param(v, marks=pytest.mark.server(version=v, settings=s))
        for v in (15, 18)
        for s in [{"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1"}]
    ],
    indirect=True,
)
def test_what_the_settings_forbid_is_said_to_be_a_matter_of_settings(
    private_server: Server, private_database: Database
) -> None:
    database = private_database
    source, other = source_of(database), source_of(database, slot="other")
    with replicating(source) as connection:
        with pytest.raises(NotConfigured, match="wal_level") as caught:
            slot.create(connection, source)
        assert "ALTER SYSTEM SET wal_level = 'logical'" in caught.value.hint
        with pytest.raises(SourceUnavailable, match="max_wal_senders") as unavailable:
            connect(source, "test", replication=True)
        assert "ALTER SYSTEM SET max_wal_senders" in unavailable.value.hint
    database.connection.close()
    private_server.configure({"wal_level": "logical"})
    private_server.restart()
    with replicating(source) as connection:
        slot.create(connection, source)
        with pytest.raises(NotConfigured, match="all replication slots are in use") as caught:
            slot.create(connection, other)
        assert "max_replication_slots" in caught.value.hint
