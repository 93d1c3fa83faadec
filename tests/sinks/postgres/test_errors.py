"""Errors of the target's server: whether they are tried again, what they say, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pyarrow as pa
import pytest

from conftest import Database
from servers import BINARIES
from sinks.histories import Change, insert, row
from sinks.postgres.target import CREATE, TABLE, begin, clean, do
from sinks.subjects import DatabaseWriter, sink_of
from walmere.errors import Conflict, SinkError, SinkUnavailable
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.publisher.ddl import TableDdl
from walmere.sinks.postgres import prepared
from walmere.sinks.postgres.errors import translate
from walmere.sinks.postgres.sink import PostgresSink
from walmere.testing.server import LOGICAL, Server

CORRECT = "correct what the message says at the target"
TAKES_THE_ROW = "alter the target so that it takes the row"


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


@pytest.mark.parametrize(
    "setting",
    [
        "default_transaction_read_only = on",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_isolation = 'repeatable read'",
        "plpgsql.variable_conflict = 'use_variable'",
        "plpgsql.extra_errors = 'all'",
    ],
)
def test_defaults_that_users_of_the_target_have_set_do_not_apply(database: Database, setting: str) -> None:
    """Read-only, so that nobody else writes to the mirrored tables. Several tables are copied at the same time."""
    names = [f"t{number}" for number in range(6)]
    database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    database.execute(f"ALTER DATABASE {database.name} SET {setting}")
    sink, schema = sink_of(database, on_conflict="skip"), pa.schema([("id", pa.int32())])

    def copy(name: str) -> None:
        begun = DatabaseWriter(sink).begin_copy(TableName("public", name), schema)
        begun.range(0, [(1,)])
        begun.commit(100)

    try:
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(copy, names))
        table = TableName("public", "t0")
        DatabaseWriter(sink).apply(table, [Change("I", (1,)), Change("I", (2,))], 200, Identity("n"), schema)
        assert database.rows("SELECT id FROM t0 ORDER BY id") == [(1,), (2,)]
        assert sink.conflicts() == {"public.t0": 1}, "applied row by row"
    finally:
        database.execute(f"ALTER DATABASE {database.name} RESET ALL", f"DROP TABLE {', '.join(names)}")
        database.execute("DROP SCHEMA walmere CASCADE")


@pytest.mark.parametrize(
    ("sqlstate", "transient", "hint"),
    [
        ("55P03", True, "retries"),  # a lock is not available
        ("40P01", True, "retries"),
        ("53300", True, "retries"),
        ("25006", True, "standby"),  # read-only
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


def test_a_copied_value_that_does_not_fit_names_the_column_and_what_to_do(
    database: Database, sink: PostgresSink
) -> None:
    database.execute("ALTER TABLE t ALTER count TYPE smallint")
    with pytest.raises(SinkError, match="column count: value out of range") as caught:
        begin(sink, row(1, count=70000))
    assert "70000" not in str(caught.value)
    assert "alter the type of the column at the target" in caught.value.hint


@pytest.mark.parametrize(
    ("statement", "wrong", "hint"),
    [
        ("ADD x smallint GENERATED ALWAYS AS (count * 20000) STORED", "value out of range", TAKES_THE_ROW),
        ("ADD x int GENERATED ALWAYS AS (note::int) STORED", "value not valid", TAKES_THE_ROW),
        ("ADD x tsquery GENERATED ALWAYS AS (to_tsquery('simple', note)) STORED", "SQLSTATE 42601", CORRECT),
        ("ADD CHECK (count < 3)", "violates check constraint", "alter the constraint of the target"),
        ("ADD UNIQUE (part)", "duplicate key value", "change the row of the target that is in the way"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_a_row_that_a_copy_refuses_as_a_whole_is_not_shown(
    database: Database, sink: PostgresSink, statement: str, wrong: str, hint: str, staged: bool
) -> None:
    database.execute(f"ALTER TABLE t {statement}")
    if staged:
        database.execute("INSERT INTO t (id) VALUES (77)")
    with pytest.raises(SinkError, match=wrong) as caught:
        begin(sink, row(1, note="Smith, Mr secret: 4711", count=3), row(2, note="1", count=0))
    assert "secret" not in str(caught.value)
    assert caught.value.hint == hint


def test_a_row_for_which_a_copy_finds_no_partition_is_answered_by_a_partition(database: Database) -> None:
    database.execute(f"{CREATE} PARTITION BY LIST (part)")
    with pytest.raises(SinkError, match="no partition of relation") as caught:
        begin(sink_of(database), row(1))
    assert caught.value.hint == "create a partition for the row at the target"
    clean(database)


TRANSLATED = "ungültige Eingabesyntax für Typ integer: »4711 secret«"


@pytest.mark.parametrize("on_conflict", ["stop", "skip"])
def test_a_value_is_not_shown_by_a_message_in_another_language(
    database: Database, sink: PostgresSink, on_conflict: str
) -> None:
    """Copied, and in a change: here a function of the table has the server's message."""
    database.execute(
        "CREATE OR REPLACE FUNCTION fine(note text) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN"
        f" IF note ~ 'secret' THEN RAISE '{TRANSLATED}' USING ERRCODE = '22P02'; END IF; RETURN true; END $$",
        "ALTER TABLE t ADD CHECK (public.fine(note))",
    )
    with pytest.raises(SinkError, match=r": value not valid\n") as copied:
        begin(sink, row(1, note="4711 secret"))
    begin(sink, row(1))
    sink = sink_of(database, on_conflict=on_conflict)
    if on_conflict == "stop":
        with pytest.raises(Conflict, match=r"is refused \(value not valid\)") as refused:
            do(sink, insert(2, note="4711 secret"))
        assert "4711" not in str(refused.value) + refused.value.found
    else:
        do(sink, insert(2, note="4711 secret"))
    assert "4711" not in str(copied.value)
    assert database.rows("SELECT message FROM walmere.conflicts") == [("value not valid",)]


@pytest.fixture(scope="module")
def german_server() -> Iterator[Server]:
    """A server that has German messages, if its translations are installed."""
    if 15 not in BINARIES:
        pytest.skip("no PostgreSQL 15, the version that is installed with its translations")
    server = Server(BINARIES[15], {**LOGICAL, "lc_messages": "'C.UTF-8'"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGUAGE", "de")
        server.start()
    yield server
    server.remove()


@pytest.fixture
def german(german_server: Server) -> Iterator[Database]:
    """A database whose server has German messages."""
    made = Database(german_server)
    try:
        with pytest.raises(psycopg.Error) as error:
            made.execute("SELECT 1/0")
        if "Division durch Null" not in str(error.value):
            pytest.skip("the translations of the server are not installed")
        yield made
    finally:
        made.drop()


@pytest.mark.parametrize(
    ("kind", "value", "wrong"),
    [
        ("int", "4711 secret", "value not valid"),
        ("varchar(3)", "4711 secret", "value too long"),
        ("tsquery", "4711 secret", "value not valid"),
        ("regclass", "secret", "value not valid"),
        ("jsonpath", "4711 secret", "value not valid"),
        ("json", "4711 secret", "value not valid"),
    ],
)
def test_a_value_is_not_shown_by_a_translated_server(german: Database, kind: str, value: str, wrong: str) -> None:
    german.execute(CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)", f"ALTER TABLE t ALTER note TYPE {kind} USING NULL")
    sink = sink_of(german)
    with pytest.raises(SinkError, match=f"column note: {wrong}") as copied:
        begin(sink, row(1, note=value))
    begin(sink, row(1, note=None))
    with pytest.raises(Conflict, match=f"insert_failed.*column note: {wrong} for type") as refused:
        do(sink, insert(2, note=value))
    assert '"skip"' in refused.value.hint
    do(sink_of(german, on_conflict="skip"), insert(2, note=value), insert(3, note=None))
    assert german.rows("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
    for text in (str(copied.value), str(refused.value), refused.value.found, *german.rows("TABLE walmere.conflicts")):
        assert "secret" not in str(text)


def test_a_statement_that_creates_a_table_and_is_refused_is_shown(database: Database) -> None:
    """It has no values of rows."""
    ddl = TableDdl(create=("CREATE TABLE public.t (id numeric(2000))",), added={"id": "id numeric(2000)"})
    with pytest.raises(SinkError, match="NUMERIC precision 2000 must be between 1 and 1000"):
        sink_of(database, create_tables=True).begin_copy(TABLE, ["id"], ddl)
    clean(database)
