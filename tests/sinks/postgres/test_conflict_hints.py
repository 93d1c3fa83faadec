"""What the error of a refused change tells the user to do fits the error, and what is set already."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pydantic import SecretStr

from conftest import Database
from sinks.histories import TRUNCATE, Change, delete, insert, row, update
from sinks.postgres.target import CREATE, begin, clean, do
from sinks.subjects import BY_ID, DatabaseWriter, sink_of
from walmere.config import PostgresTarget
from walmere.errors import Conflict
from walmere.names import TableName
from walmere.sinks.postgres.sink import PostgresSink

KEYED = (CREATE, "ALTER TABLE t ADD PRIMARY KEY (id)")
PARTITIONED = (
    f"{CREATE} PARTITION BY RANGE (id)",
    "CREATE TABLE first PARTITION OF t FOR VALUES FROM (0) TO (10)",
    "ALTER TABLE t ADD PRIMARY KEY (id)",
)
REFERENCES = (
    *KEYED,
    "CREATE TABLE parent (id int PRIMARY KEY)",
    "ALTER TABLE t ADD CONSTRAINT fk FOREIGN KEY (count) REFERENCES parent",
)
IS_REFERENCED = (*KEYED, "CREATE TABLE child (id int8 CONSTRAINT fk REFERENCES t)", "INSERT INTO t VALUES ('p', 8)")
ENABLE_ALWAYS = (
    "DO $$ DECLARE r record; BEGIN FOR r IN SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass LOOP"
    " EXECUTE format('ALTER TABLE t ENABLE ALWAYS TRIGGER %I', r.tgname); END LOOP; END $$"
)

IN_THE_WAY = "change the row of the target that is in the way"
CONSTRAINT = "alter the constraint of the target"
FOREIGN_KEY = "correct the rows of the target that the foreign key compares"
EXCLUSION = "change the conflicting row of the target, or alter the exclusion constraint"
PARTITION = "create a partition for the row at the target"
FUNCTION = "correct the trigger, rule or function of the target that fails"
MESSAGE = "correct what the message says at the target"
TAKES_THE_ROW = "alter the target so that it takes the row"


@pytest.fixture
def database(database: Database) -> Iterator[Database]:
    yield database
    clean(database)
    database.execute("DROP TABLE IF EXISTS parent, child, audit CASCADE", "DROP PUBLICATION IF EXISTS p")


def refused(sink: PostgresSink, *changes: Change) -> Conflict:
    with pytest.raises(Conflict) as caught:
        do(sink, *changes)
    return caught.value


def chosen(error: Conflict) -> tuple[str, str]:
    """The first part of the hint, and the values of `on_conflict` in it."""
    remedy, _, rest = error.hint.partition("; or skip the whole transaction: `walmere skip -c … 0/3E8`")
    return remedy, rest.removeprefix("; or set target.on_conflict = ")


@pytest.mark.parametrize(
    ("statements", "change", "remedy", "helps"),
    [
        (KEYED, insert(1), IN_THE_WAY, ("skip", "overwrite")),
        ((*KEYED, "ALTER TABLE t ADD CHECK (count < 5)"), insert(2, count=7), CONSTRAINT, ("skip",)),
        ((*KEYED, "ALTER TABLE t ALTER count SET NOT NULL"), insert(2, count=None), CONSTRAINT, ("skip",)),
        ((*KEYED, "ALTER TABLE t ADD EXCLUDE (count WITH =)"), insert(2), EXCLUSION, ("skip",)),
        (PARTITIONED, insert(50), PARTITION, ("skip",)),
        (PARTITIONED, update(50, was=1), PARTITION, ("skip",)),
        ((*REFERENCES, ENABLE_ALWAYS), insert(2, count=5), FOREIGN_KEY, ("skip",)),
        ((*REFERENCES, ENABLE_ALWAYS), update(1, count=5), FOREIGN_KEY, ("skip",)),
        ((*IS_REFERENCED, "INSERT INTO child VALUES (8)", ENABLE_ALWAYS), delete(8), FOREIGN_KEY, ("skip",)),
        ((*KEYED, "ALTER TABLE t ALTER note TYPE varchar(3)"), insert(2, note="long"), TAKES_THE_ROW, ("skip",)),
    ],
    ids=["unique", "check", "not null", "exclude", "partition", "moved", "fk", "fk update", "fk delete", "value"],
)
def test_a_violated_constraint_is_answered_by_what_helps_and_is_not_set(
    database: Database, statements: tuple[str, ...], change: Change, remedy: str, helps: tuple[str, ...]
) -> None:
    before = [each for each in statements if each != ENABLE_ALWAYS]
    database.execute(*before)
    begin(sink_of(database), row(1))
    database.execute(*statements[len(before) :])
    for on_conflict in {"stop", "overwrite"} - set(helps):
        found, choice = chosen(refused(sink_of(database, on_conflict=on_conflict), change))
        assert found.startswith(remedy)
        assert choice == " or ".join(f'"{each}"' for each in helps)
    do(sink_of(database, on_conflict="skip"), change)


def test_overwrite_is_not_offered_where_it_has_not_helped(database: Database) -> None:
    """An index over an expression does not say which rows are in the way."""
    database.execute(*KEYED, "CREATE UNIQUE INDEX ON t ((count % 10))")
    begin(sink_of(database), row(1, count=5))
    error = refused(sink_of(database, on_conflict="overwrite"), insert(2, count=15))
    assert chosen(error) == (IN_THE_WAY, '"skip"')


def fires(database: Database, body: str, events: str = "INSERT", level: str = "ROW", table: str = "t") -> None:
    database.execute(
        f"CREATE OR REPLACE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NEW; END $$",
        f"CREATE TRIGGER fires BEFORE {events} ON {table} FOR EACH {level} EXECUTE FUNCTION fire()",
        f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER fires",
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("INSERT INTO absent VALUES (1);", (FUNCTION, "")),
        ("RAISE 'no';", (TAKES_THE_ROW, '"skip"')),
        ("INSERT INTO public.audit VALUES (1), (1);", (TAKES_THE_ROW, '"skip"')),  # the row in the way is of audit
        ("RAISE 'no' USING ERRCODE = 'check_violation';", (TAKES_THE_ROW, '"skip"')),
    ],
)
@pytest.mark.parametrize("statements", [KEYED, PARTITIONED], ids=["plain", "partitioned"])
def test_an_error_in_a_trigger_is_answered_by_the_trigger(
    database: Database, statements: tuple[str, ...], body: str, expected: tuple[str, str]
) -> None:
    database.execute(*statements, "CREATE TABLE audit (id int PRIMARY KEY)")
    begin(sink_of(database), row(1))
    fires(database, body)
    assert chosen(refused(sink_of(database), insert(2))) == expected


def test_a_violation_in_a_partition_on_another_server_is_not_taken_for_one_in_a_trigger(database: Database) -> None:
    if not database.rows("SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw'"):
        pytest.skip("the server does not have postgres_fdw")
    database.execute(
        "CREATE EXTENSION postgres_fdw",
        f"CREATE SERVER here FOREIGN DATA WRAPPER postgres_fdw OPTIONS (dbname '{database.name}', host '127.0.0.1',"
        f" port '{database.server.port}')",
        "CREATE USER MAPPING FOR postgres SERVER here OPTIONS (user 'postgres')",
        f"{CREATE} PARTITION BY RANGE (id)",
        "CREATE TABLE remote (LIKE t, PRIMARY KEY (id))",
        "CREATE FOREIGN TABLE f PARTITION OF t FOR VALUES FROM (0) TO (10) SERVER here OPTIONS (table_name 'remote')",
    )
    try:
        begin(sink_of(database), row(1))
        assert chosen(refused(sink_of(database), insert(1))) == (IN_THE_WAY, '"skip" or "overwrite"')
        database.execute("CREATE TABLE child (id int8 REFERENCES remote)")
        assert refused(sink_of(database), TRUNCATE).hint.startswith("alter the target so that its tables can be trunc")
        fires(database, "INSERT INTO absent VALUES (1);", table="remote")
        assert chosen(refused(sink_of(database), insert(2))) == (FUNCTION, "")
    finally:
        clean(database)
        database.execute("DROP TABLE remote CASCADE", "DROP EXTENSION postgres_fdw CASCADE")


def test_a_violation_in_a_table_with_a_line_break_in_its_name_is_not_taken_for_one_in_a_trigger(
    database: Database,
) -> None:
    table, schema = TableName("public", "two\nlines"), pa.schema([("id", pa.int64())])
    database.execute('CREATE TABLE "two\nlines" (id int8 PRIMARY KEY)')
    writer = DatabaseWriter(sink_of(database))
    copy = writer.begin_copy(table, schema)
    copy.range(0, [(1,)])
    copy.commit(100)
    with pytest.raises(Conflict) as caught:
        writer.apply(table, [Change("I", (1,))], 200, BY_ID, schema)
    assert chosen(caught.value) == (IN_THE_WAY, '"skip" or "overwrite"')
    database.execute('DROP TABLE "two\nlines"')


def test_a_trigger_that_refuses_to_delete_the_row_in_the_way_stops_with_key_and_lsn(database: Database) -> None:
    database.execute(*KEYED)
    begin(sink_of(database), row(1))
    fires(database, "RAISE 'stays';", "DELETE")
    error = refused(sink_of(database, on_conflict="overwrite"), insert(1))
    assert 'insert_failed in public.t: the row with the key {"id" : "1"} is refused (stays)' in error.wrong
    assert chosen(error) == (TAKES_THE_ROW, '"skip"')


def test_an_error_that_no_trigger_has_raised_is_not_answered_by_a_trigger(database: Database) -> None:
    database.execute(CREATE, "CREATE UNIQUE INDEX ON t (id)", "CREATE PUBLICATION p FOR TABLE t")
    begin(sink_of(database), row(1))
    error = refused(sink_of(database), update(1, count=7))
    assert "does not have a replica identity and publishes updates" in error.wrong
    assert chosen(error) == (MESSAGE, "")


def test_a_missing_privilege_on_the_sequence_of_a_default_is_not_answered_by_a_trigger(database: Database) -> None:
    if database.major < 15:
        pytest.skip("before PostgreSQL 15, only a superuser may set session_replication_role")
    role = f"{database.name}_without_sequence"
    database.execute(
        *KEYED,
        "CREATE SEQUENCE numbers",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT CREATE ON DATABASE {database.name} TO {role}",
        f"GRANT SET ON PARAMETER session_replication_role TO {role}",
        f"ALTER TABLE t OWNER TO {role}",
    )
    target = PostgresTarget(kind="postgres", dsn=SecretStr(database.server.dsn(database.name, role)))
    sink = sink_of(database, address=target)
    begin(sink, row(1))
    database.execute("ALTER TABLE t ADD number int", "ALTER TABLE t ALTER number SET DEFAULT nextval('numbers')")
    try:
        error = refused(sink, insert(2))
        assert "permission denied for sequence numbers" in error.wrong
        assert chosen(error) == (MESSAGE, "")
    finally:
        clean(database)
        database.execute("DROP SEQUENCE numbers", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize("row_by_row", [False, True], ids=["by sets", "row by row"])
def test_a_refused_truncate_is_answered_by_its_reason_and_has_its_sqlstate(
    database: Database, row_by_row: bool
) -> None:
    database.execute(*KEYED, "CREATE TABLE child (id int8 REFERENCES t)")
    sink = sink_of(database, on_conflict="skip")
    begin(sink, row(1))
    if row_by_row:
        fires(database, "", "DELETE")
    error = refused(sink, *([insert(1)] if row_by_row else []), TRUNCATE)  # the SQLSTATE is not that of the insert
    assert error.hint.startswith("alter the target so that its tables can be truncated; or skip")
    assert json.loads(error.found)["sqlstate"] == "0A000"
    assert "on_conflict" not in error.hint
    database.execute("DROP TABLE child", "DROP TRIGGER IF EXISTS fires ON t")
    fires(database, "INSERT INTO absent VALUES (1);", "TRUNCATE", "STATEMENT")
    error = refused(sink, TRUNCATE)
    assert error.hint.startswith(f"{FUNCTION}; or skip")
