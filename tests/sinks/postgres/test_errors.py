"""Errors of the target's server: whether they are tried again, what they say, and what to do."""

from __future__ import annotations

import psycopg
import pytest

from conftest import Database
from sinks.histories import row
from sinks.postgres.target import CREATE, TABLE, begin
from sinks.subjects import sink_of
from walmere.errors import SinkError, SinkUnavailable
from walmere.lsn import Lsn
from walmere.sinks.postgres import prepared
from walmere.sinks.postgres.errors import translate
from walmere.sinks.postgres.sink import PostgresSink
from walmere.testing.server import Server

CORRECT = "correct what the message says at the target"


def test_a_table_whose_old_rows_cannot_be_removed_is_not_tried_again_as_if_the_server_were_away(
    database: Database, sink: PostgresSink
) -> None:
    begin(sink, row(1))
    database.execute(
        "CREATE TABLE child (id int8 REFERENCES t)",  # so the rows are removed by DELETE
        "ALTER TABLE t REPLICA IDENTITY NOTHING",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    try:
        with pytest.raises(SinkError, match="does not have a replica identity and publishes deletes") as caught:
            begin(sink, row(1), lsn=300)
        assert not caught.value.transient
        assert caught.value.hint == CORRECT
    finally:
        database.execute("DROP PUBLICATION p", "DROP TABLE child")


def test_a_target_that_is_read_only_is_tried_again(database: Database, sink: PostgresSink) -> None:
    begin(sink, row(1))
    database.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    try:
        with pytest.raises(SinkUnavailable, match="read-only") as caught, sink.connection("writing") as connection:
            connection.execute("DELETE FROM public.t")
        assert "standby" in caught.value.hint
    finally:
        database.execute(f"ALTER DATABASE {database.name} RESET default_transaction_read_only")


@pytest.mark.parametrize(
    ("sqlstate", "transient", "hint"),
    [
        ("55P03", True, "retries"),  # a lock is not available
        ("40P01", True, "retries"),
        ("53300", True, "retries"),
        ("55006", False, CORRECT),
        ("0A000", False, CORRECT),
    ],
)
def test_an_error_is_tried_again_if_it_has_nothing_to_do_with_what_is_written(
    sqlstate: str, transient: bool, hint: str
) -> None:
    error = translate(psycopg.errors.lookup(sqlstate)("refused"), "writing")
    assert error.transient == transient
    assert hint in error.hint


@pytest.mark.server(settings={"max_prepared_transactions": "1"})
def test_a_prepare_that_fails_says_why(private_server: Server) -> None:
    """The places are taken, there are none, or a deferred trigger has raised the same SQLSTATE."""
    database = Database(private_server)
    database.execute(CREATE)
    sink = sink_of(database)
    begin(sink)

    def prepare() -> None:
        with sink.connection("preparing") as connection:
            connection.execute("BEGIN; INSERT INTO public.t (id) VALUES (1)")
            prepared.prepare(connection, sink.state, "gid", [TABLE])

    database.execute("BEGIN; CREATE TABLE other (); PREPARE TRANSACTION 'other'")
    with pytest.raises(SinkUnavailable, match="maximum number of prepared transactions") as caught:
        prepare()
    assert "increase max_prepared_transactions" in caught.value.hint
    database.execute(
        "ROLLBACK PREPARED 'other'",
        "CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not now' USING ERRCODE = '55000'; END $$",
        "CREATE CONSTRAINT TRIGGER fires AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION fire()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER fires",
    )
    with pytest.raises(SinkError, match="not now") as refused:
        prepare()
    assert refused.value.hint == CORRECT
    database.execute("DROP TRIGGER fires ON t")
    database.connection.close()
    private_server.configure({"max_prepared_transactions": "0"})
    private_server.restart()
    with pytest.raises(SinkError, match="prepared transactions are disabled") as refused:
        prepare()
    assert not refused.value.transient
    assert "increase max_prepared_transactions" in refused.value.hint
    assert sink.applied(TABLE) == Lsn(100)
