"""Every command and snippet of README, tutorial and guides works, or is listed with the reason why no test runs it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from object_stores import Bucket
from servers import BINARIES
from snippets import LANGUAGES, ROOT, Block, Reader, blocks, pages
from walmere.errors import ConfigError
from walmere.testing.server import LOGICAL, Server

NAMES = [page.relative_to(ROOT).as_posix() for page in pages()]
TUTORIAL = "docs/tutorial.md"
STORES = "docs/guides/object-stores.md"
DIRECTIVES = ("background", "stop", "exit", "on", "repeat", "lose", "applied", "not")

# what the reader of a page has
TABLES = """
CREATE ROLE app LOGIN;
CREATE TABLE customers (customer_id int PRIMARY KEY, name text NOT NULL, country text NOT NULL);
CREATE TABLE orders (id int PRIMARY KEY, customer_id int NOT NULL, status text NOT NULL DEFAULT 'new',
                     amount numeric(10,2) NOT NULL DEFAULT 0, note text);
INSERT INTO customers SELECT i, 'customer ' || i, (ARRAY['DE', 'FR', 'IT'])[1 + i % 3] FROM generate_series(1, 1000) i;
INSERT INTO orders SELECT i, 1 + i % 1000, 'new', i FROM generate_series(1, 20000) i;
"""
PUBLISHED = """
CREATE ROLE repl LOGIN REPLICATION;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO repl;
CREATE PUBLICATION shop FOR TABLE customers, orders;
"""
CONFIGURATION = """
[source]
dsn = "postgresql://repl@db.example:5432/shop"
publications = ["shop"]
slot = "walmere_shop"
[subscription]
name = "shop"
directory = "/var/lib/walmere/shop"
[target]
path = "/srv/lake"
"""
WITHOUT_TABLES = (TUTORIAL,)
WITHOUT_PUBLICATION = (
    "docs/guides/mirror-a-publication.md",
    "docs/guides/receive.md",
    "docs/guides/stream.md",
    "docs/guides/move-from-a-native-subscription.md",
)
MIRRORED = (
    "docs/guides/add-a-table.md",
    "docs/guides/monitor.md",
    "docs/guides/read.md",
    "docs/guides/resync.md",
    "docs/guides/tune.md",
)
"""Pages whose reader has a subscription that was run: walmere.toml, and a lake."""


@contextlib.contextmanager
def servers(name: str) -> Iterator[dict[str, Server]]:
    """The servers that a page names, with what its reader has; the tutorial starts its own."""
    if name in WITHOUT_TABLES:
        yield {}
        return
    hosts = ("old.example", "new.example") if "native" in name else ("db.example",)
    made = {host: Server(BINARIES[18], {**LOGICAL, "fsync": "off"}) for host in hosts}
    try:
        for index, server in enumerate(made.values()):
            server.start()
            tables = TABLES + ("" if name in WITHOUT_PUBLICATION else PUBLISHED)
            statements = "CREATE ROLE app LOGIN; CREATE ROLE repl LOGIN" if index else tables
            for database, text in (("postgres", "CREATE DATABASE shop"), ("shop", statements)):
                subprocess.run(
                    [server.bindir / "psql", "-q", "-v", "ON_ERROR_STOP=1", "-c", text, server.dsn(database)],
                    check=True,
                    capture_output=True,
                )
        if "failover" in name:
            made["standby.example"] = Server(BINARIES[18], {**LOGICAL, "fsync": "off"})
            made["standby.example"].follow(made["db.example"])
            made["standby.example"].start()
        yield made
    finally:
        for server in made.values():
            server.remove()


def read(name: str, directory: Path, bucket: Bucket | None = None) -> None:
    """Do what the page says, from top to bottom."""
    with servers(name) as made, Reader(directory, made, bucket) as reader:
        if name in MIRRORED or bucket is not None:
            reader.read(Block(name, 0, "toml", CONFIGURATION))
        if name in MIRRORED:
            reader.read(Block(name, 0, "sh", "walmere run -c walmere.toml --once"))
            reader.read(Block(name, 0, "sql", "UPDATE orders SET status = 'paid' WHERE id <= 100"))
            reader.read(Block(name, 0, "sh", "walmere run -c walmere.toml --once"))
        for block in blocks(ROOT / name):
            reader.read(block)


@pytest.mark.long
def test_the_tutorial(tmp_path: Path) -> None:
    read(TUTORIAL, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (TUTORIAL, STORES)])
def test_a_page(name: str, tmp_path: Path) -> None:
    read(name, tmp_path)


@pytest.mark.long
def test_the_guide_to_object_stores(tmp_path: Path, bucket: Bucket) -> None:
    read(STORES, tmp_path, bucket)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_has_a_language_that_is_run(name: str) -> None:
    for block in blocks(ROOT / name):
        assert block.language in LANGUAGES, f"{name}:{block.line}: ```{block.language}"
        assert {each.partition(" ")[0].rstrip(":") for each in block.directives} <= {*DIRECTIVES}, (
            f"{name}:{block.line}"
        )
        assert block.not_run is None or block.not_run.strip()
    fences = (ROOT / name).read_text().count("\n```")
    assert fences == 2 * len([*blocks(ROOT / name)]), "a fence that is not found as a block"


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    with Reader(tmp_path, {}) as reader:
        reader.read(Block("page", 1, "sh", "echo kept 12 rows; export NAME=value\n"))
        reader.read(Block("page", 2, "", "kept 7 rows\n"))
        reader.read(Block("page", 3, "sh", 'test "$NAME" = value\n'))
        for failing in (
            Block("page", 4, "", "lost 7 rows\n"),
            Block("page", 5, "sh", "false\ntrue\n"),
            Block("page", 6, "sh", "true\n", ("exit 1",)),
            Block("page", 7, "toml", "[target]\nno_such_key = 1\n"),
            Block("page", 8, "json", "{"),
            Block("page", 9, "python", "1 / 0\n"),
        ):
            with pytest.raises((AssertionError, ConfigError, json.JSONDecodeError)):
                reader.read(failing)
        reader.read(Block("page", 10, "python", "x = 1\n"))
        reader.read(Block("page", 11, "python", "print(x)\n"))
        reader.read(Block("page", 12, "", "1\n"))


def test_the_tutorial_uses_this_python() -> None:
    """A reader installs Walmere; here it is installed already."""
    assert (Path(sys.executable).parent / "walmere").exists()
