"""The table of built-in types is that of real servers, and every one of them has a codec that somebody decided.

To write the table anew:

    python tests/types/test_builtin.py 'host=… user=postgres dbname=postgres'
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import psycopg
import pytest

from conftest import Database
from walmere.errors import UnknownType
from walmere.publisher.catalog import types_of
from walmere.types import builtin
from walmere.types.codec import BUILT_IN_CODECS, EXTENSION_CODECS, FIXED_WIDTH, codec, is_toastable
from walmere.types.pgtype import PgType, TypType

QUERY = """
SELECT t.oid, t.typarray, t.typtype::text, t.typdelim::text, t.typname FROM pg_type t
WHERE t.oid < 10000 AND t.typtype NOT IN ('p', 'c')
    AND NOT EXISTS (SELECT FROM pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid)
ORDER BY 1
"""


def table(connection: psycopg.Connection[Any]) -> list[str]:
    return [f"{oid:>4} {array:>4} {kind} {delim} {name}" for oid, array, kind, delim, name in connection.execute(QUERY)]


def test_the_table_is_that_of_the_server(database: Database) -> None:
    assert builtin._TABLE.strip("\n").splitlines() == table(database.connection)


def test_every_base_type_of_the_server_has_a_decided_codec(database: Database) -> None:
    names = {name for name, kind in database.rows(f"SELECT typname, typtype FROM ({QUERY}) q") if kind == "b"}
    assert names == set(BUILT_IN_CODECS)


def test_what_can_be_toasted_is_what_the_server_says(database: Database) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('ok')", "CREATE DOMAIN small AS int", "CREATE DOMAIN long AS text[]")
    width = dict(database.rows(f"SELECT typname, typlen FROM pg_type WHERE oid IN (SELECT oid FROM ({QUERY}) q)"))
    assert {name for name in BUILT_IN_CODECS if width[name] > 0} == FIXED_WIDTH
    own = dict(database.rows("SELECT oid, typlen FROM pg_type WHERE typname IN ('mood', '_mood', 'small', 'long')"))
    catalog = types_of(database.connection, own)
    assert {oid: is_toastable(oid, catalog) for oid in own} == {oid: length < 0 for oid, length in own.items()}


def test_every_type_of_the_server_resolves_and_its_codec_pickles(database: Database) -> None:
    database.execute("CREATE EXTENSION hstore", "CREATE EXTENSION citext")
    oids = [oid for (oid,) in database.rows("SELECT oid FROM pg_type WHERE typtype <> 'p'")]
    catalog = types_of(database.connection, oids)
    assert catalog.keys() | builtin.BUILT_IN.keys() >= set(oids)
    for oid in oids:
        made = codec(oid, -1, catalog)
        again = pickle.loads(pickle.dumps(made))
        assert again == made
        assert again.arrow == made.arrow
    assert pickle.loads(pickle.dumps(catalog)) == catalog


def test_types_of_brings_what_types_are_made_of_and_no_built_in_ones(database: Database) -> None:
    database.execute(
        "CREATE DOMAIN price AS numeric(10,2)",
        "CREATE DOMAIN discount AS price[]",
        "CREATE EXTENSION hstore",
        "CREATE TYPE box2 AS (a box)",
    )
    oid = {n: database.value("SELECT %s::regtype::oid", n) for n in ("discount", "price", "price[]", "hstore", "box2")}
    catalog = types_of(database.connection, [oid["discount"], 23, oid["hstore"], oid["box2"], 4_000_000_000])
    assert catalog.keys() == set(oid.values())
    typmod = database.value("SELECT typtypmod FROM pg_type WHERE oid = %s", oid["price"])
    assert catalog[oid["price"]] == PgType(oid["price"], "public", "price", TypType.DOMAIN, 1700, typmod)
    assert catalog[oid["price[]"]] == PgType(oid["price[]"], "public", "_price", elem=oid["price"])
    assert catalog[oid["discount"]].basetype == oid["price[]"]
    assert catalog[oid["hstore"]].extension == "hstore"
    assert types_of(database.connection, [23, 1007]) == {}


def test_a_type_that_only_has_the_name_of_an_extensions_is_text() -> None:
    mine = PgType(70_000, "public", "hstore", TypType.COMPOSITE)
    ours = PgType(70_001, "public", "vector", extension="somebody's")
    assert {str(codec(each.oid, -1, {each.oid: each}).arrow) for each in (mine, ours)} == {"string"}
    assert ("hstore", "hstore") in EXTENSION_CODECS


def test_a_type_that_nobody_knows_is_not_guessed() -> None:
    with pytest.raises(UnknownType, match="OID 70000"):
        codec(70_000, -1, {})


if __name__ == "__main__":
    with psycopg.connect(sys.argv[1]) as server:
        print("\n".join(table(server)))
