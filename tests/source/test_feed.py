"""A query that receives by itself: beside others, instead of them, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from processes import Background, eventually
from receiving import receive_all
from walmere.changelog.manifest import Manifest, summarise
from walmere.errors import ConfigError, PublicationMissing, SlotInUse
from walmere.publisher.catalog import insert_position
from walmere.source.feed import Feed, SourceServer
from walmere.subscription.progress import SinkPositions


def test_what_is_wrong_with_an_option_is_said_without_the_secret() -> None:
    with pytest.raises(ConfigError, match="option slot: must have 1 to 63 lower-case") as refused:
        SourceServer.of("host=db password=s3cret", ("p",), "No Slot")
    assert "s3cret" not in str(refused.value)


def test_it_lets_another_receive_and_takes_over(database_under_test: Database, tmp_path: Path) -> None:
    database = database_under_test
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR ALL TABLES")
    publisher = SourceServer.of(database.dsn, ("pub",), database.slot)
    config = database.config(tmp_path)
    feed = Feed(publisher, tmp_path, "query-q")
    assert SinkPositions(tmp_path).applied() == 0  # kept from the beginning
    feed.prepare()
    try:
        with Background(config):
            eventually(database.streaming)
            database.execute("INSERT INTO t VALUES (1)")
            feed.start(catch_up=True)
            feed.wait()
        database.execute("INSERT INTO t VALUES (2)")
        committed = insert_position(database.connection)

        def durable() -> bool:
            feed.check()
            with Manifest(config.changelog) as manifest:
                return summarise(manifest).end_lsn >= committed

        eventually(durable)
    finally:
        feed.stop()
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    eventually(lambda: database.rows(active, database.slot) == [(False,)])


def test_what_ends_the_receiver_reaches_who_waits(database_under_test: Database, tmp_path: Path) -> None:
    feed = Feed(SourceServer.of(database_under_test.dsn, ("missing",), database_under_test.slot), tmp_path, "query-q")
    feed.start(catch_up=True)
    with pytest.raises(PublicationMissing, match="no publication missing"):
        feed.wait()


def test_the_log_of_others_is_left_alone(database_under_test: Database, tmp_path: Path) -> None:
    database = database_under_test
    database.execute("CREATE PUBLICATION one", "CREATE PUBLICATION other")
    Feed(SourceServer.of(database.dsn, ("one",), database.slot), tmp_path / "q", "query-a").prepare()
    Feed(SourceServer.of(database.dsn, ("one",), database.slot), tmp_path / "q", "query-b")
    with pytest.raises(ConfigError, match="was received from publications one, not from one, other"):
        Feed(SourceServer.of(database.dsn, ("other", "one"), database.slot), tmp_path / "q", "query-c")
    config = database.config(tmp_path / "s", publications=("one",), slot=f"{database.slot}_s")
    receive_all(database, config)
    with pytest.raises(ConfigError, match="the change log there belongs to a subscription"):
        Feed(SourceServer.of(database.dsn, ("one",), config.source.slot), tmp_path / "s", "query-a")
    assert SinkPositions(tmp_path / "s").applied() is None, "and nothing is kept for it"


def test_a_slot_that_somebody_has_is_waited_for_but_not_for_ever(
    database_under_test: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walmere.source.feed.SOURCE_WAIT", 1.0)
    database = database_under_test
    database.execute("CREATE PUBLICATION pub")
    publisher = SourceServer.of(database.dsn, ("pub",), database.slot)
    with Background(database.config(tmp_path / "theirs")):
        eventually(database.streaming)
        feed = Feed(publisher, tmp_path / "ours", "query-q")
        with pytest.raises(SlotInUse):
            feed.receive_now()


def test_a_query_that_only_looks_up_types_has_neither_slot_nor_publications(database_under_test: Database) -> None:
    database_under_test.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    oid = database_under_test.value("SELECT 'mood'::regtype::oid::int8")
    server = SourceServer.of(database_under_test.dsn, (), "")
    assert not hasattr(server.address, "slot")
    assert server.types([oid])[oid].name == "mood"
