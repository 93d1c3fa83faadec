"""`walmere init`: by flags or by questions, it writes a configuration that works, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from processes import Here
from terminal import Terminal
from walmere import config as configuration
from walmere.config import DeltaTarget, PostgresTarget
from walmere.testing.server import Server


@pytest.fixture
def database(database18: Database) -> Database:
    database18.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text)",
        "INSERT INTO orders SELECT i, 'x' FROM generate_series(1, 1000) i",
        "CREATE TABLE customers (id int PRIMARY KEY)",
        "CREATE TABLE keyless (id int)",
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "ANALYZE",
    )
    return database18


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "walmere.toml"


def published(database: Database) -> list[tuple[str, str]]:
    return database.rows("SELECT pubname::text, tablename::text FROM pg_publication_tables ORDER BY 1, 2")


def test_flags_alone_write_a_file_that_works_and_create_the_publication(
    database: Database, file: Path, here: Here
) -> None:
    code, out, err = here(
        *("init", database.dsn, "-c", file, "--create-publication", "--publication", "shop"),
        *("--table", "orders", "--table", "public.customers", "--slot", database.slot),
    )
    assert code == 0, out + err
    assert published(database) == [("shop", "customers"), ("shop", "orders")]
    assert "done: CREATE PUBLICATION" in out
    assert "0 problems" in out
    config = configuration.load(file)
    assert config.source.publications == ("shop",)
    assert config.source.slot == database.slot
    assert config.subscription.name == "shop"
    assert config.subscription.directory == file.parent / "state" / "shop"
    assert isinstance(config.target, DeltaTarget)
    assert config.target.path == file.parent / "lake"
    assert here("check", "-c", file)[0] == 0

    code, _, err = here("init", database.dsn, "-c", file)
    assert code == 2
    assert "exists already" in err
    code, out, _ = here("init", database.dsn, "-c", file, "--force", "--json", "--target-dsn", "postgresql://db/copy")
    found = json.loads(out)
    assert [each["name"] for each in found["publications"]] == ["shop"], "the only one is taken"
    assert {each["table"]: each["rows"] for each in found["tables"]} == {
        "public.customers": 0,
        "public.keyless": 0,
        "public.orders": 1000,
        "public.parted": 0,
    }
    assert [each["table"] for each in found["tables"] if not each["identified"]] == ["public.keyless"]
    assert (found["done"], code) == ([], 0 if found["ok"] else 1)
    assert isinstance(configuration.load(file).target, PostgresTarget)


def test_missing_rights_come_with_their_sql_and_are_granted_on_request(
    database: Database, file: Path, here: Here
) -> None:
    database.execute("CREATE PUBLICATION shop FOR TABLE orders", f"CREATE ROLE {database.name}_repl LOGIN")
    try:
        dsn = database.server.dsn(database.name, f"{database.name}_repl")
        code, out, _ = here("init", dsn, "-c", file)
        assert code == 1
        for statement in (
            f"ALTER ROLE {database.name}_repl REPLICATION;",
            f"GRANT SELECT ON TABLE public.orders TO {database.name}_repl;",
        ):
            assert statement in out
        assert file.exists()
        code, _, err = here("init", dsn, "-c", file, "--force", "--grant")
        assert code == 1
        assert "permission denied" in err
        assert "hint: --admin DSN" in err
        code, out, err = here("init", dsn, "-c", file, "--force", "--grant", "--admin", database.dsn)
        assert code == 0, out + err
        assert out.count("done: ") == 2
    finally:
        database.execute(f"DROP OWNED BY {database.name}_repl", f"DROP ROLE {database.name}_repl")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([], "there is no connection string of the source"),
        (["postgresql://repl@127.0.0.1:1/shop"], "refused"),
        (["DSN"], "there is none"),
        (["DSN", "--create-publication", "--table", "nothing"], "there is no table nothing"),
        (["not a connection string"], "not a PostgreSQL connection string"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_is_missing_is_said_and_no_file_is_written(
    database: Database, file: Path, here: Here, arguments: list[str], wrong: str
) -> None:
    code, _, err = here("init", *(database.dsn if each == "DSN" else each for each in arguments), "-c", file)
    assert code in (1, 2)
    assert wrong in err
    assert "hint: " in err
    assert not file.exists()
    assert not published(database)


def test_no_password_is_written_to_the_file(database: Database, file: Path, here: Here) -> None:
    dsn = database.dsn.replace("postgres@", "postgres:Hush@")
    code, out, err = here("init", dsn, "-c", file, "--create-publication")
    assert code == 1, "nor are UPDATE and DELETE possible on keyless"
    assert "ALTER TABLE public.keyless REPLICA IDENTITY FULL" in out
    assert "export WALMERE_SOURCE__PASSWORD" in out
    assert "Hush" not in file.read_text() + out + err
    assert {table for _, table in published(database)} == {"customers", "keyless", "orders", "parted_1"}


def test_a_person_is_asked(database: Database, file: Path) -> None:
    with Terminal("init", "-c", file) as terminal:
        terminal.expect("Connection string of the source")
        terminal.send(database.dsn)
        terminal.expect("public.orders: ")
        terminal.expect("public.keyless: 0 B, about 0 rows; without a replica identity")
        terminal.expect("a new one")
        terminal.expect("Which one [1]")
        terminal.send("orders")
        terminal.expect("Enter a number from 1 to ")
        terminal.expect("Which one [1]")
        terminal.send("1")
        terminal.expect("Name of the new publication")
        terminal.send("mine")
        terminal.expect("Create it?")
        terminal.send("y")
        terminal.expect("Its tables")
        terminal.send("orders, customers")
        terminal.expect("Name of the subscription [mine]")
        terminal.send("")
        terminal.expect("Where the Delta tables go")
        terminal.send("tables")
        assert terminal.wait() == 0, terminal.text
        assert "next: walmere check" in terminal.text
    assert published(database) == [("mine", "customers"), ("mine", "orders")]
    config = configuration.load(file)
    assert isinstance(config.target, DeltaTarget)
    assert config.target.path == file.parent / "tables"
    with Terminal("init", "-c", file) as terminal:
        terminal.expect("Replace ")
        terminal.send("n")
        assert terminal.wait() == 2


def test_a_person_is_asked_for_a_password_and_a_wrong_one_is_refused(private_server: Server, file: Path) -> None:
    with psycopg.connect(private_server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN REPLICATION PASSWORD 'correct'")
        admin.execute("CREATE PUBLICATION pub")
    lines = "host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
    (private_server.data / "pg_hba.conf").write_text(lines)
    private_server.reload()
    dsn = private_server.dsn(user="app")
    with Terminal("init", dsn, "-c", file) as terminal:
        terminal.expect("Password")
        terminal.send_secret("Hush")
        assert terminal.wait() == 1, terminal.text
        assert 'password authentication failed for user "app"' in terminal.text
        assert "Hush" not in terminal.text, "it is not shown as it is typed"
    assert not file.exists()
    with Terminal("init", dsn, "-c", file, "--publication", "pub", "--name", "shop", "--lake", "lake") as terminal:
        terminal.expect("Password")
        terminal.send_secret("correct")
        terminal.wait()
        assert "export WALMERE_SOURCE__PASSWORD" in terminal.text
    assert "correct" not in file.read_text()
