"""Which sections apply to a table, and what follows from them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr

from walmere.definition import PublishedColumn, ShapedColumn, Shaping
from walmere.errors import ConfigError
from walmere.names import TableName
from walmere.shaping.rules import TableRules
from walmere.table_sections import TableSection
from walmere.types.numeric import typmod_of


@dataclass(frozen=True)
class Published:
    schema: str
    name: str


def rules(*sections: dict[str, Any], **types: str) -> TableRules:
    return TableRules(
        tuple(TableSection.model_validate(each) for each in sections), tuple(types.items()), SecretStr("k" * 20)
    )


ORDERS = TableName("public", "orders")
INT4, TEXT, NUMERIC, UUID = 23, 25, 1700, 2950
COLUMNS = (
    PublishedColumn(1, "id", INT4, -1, True),
    PublishedColumn(2, "email", TEXT, -1, False),
    PublishedColumn(3, "price", NUMERIC, -1, False),
    PublishedColumn(4, "total", NUMERIC, typmod_of(10, 2), False),
)


def shaping(made: TableRules, **other: Any) -> Shaping | None:
    return made.shaping(ORDERS, **{"columns": COLUMNS, "key": ("id",), "types": {}, **other})


@pytest.mark.parametrize(
    ("pattern", "table", "matches"),
    [
        ("public.orders", ("public", "orders"), True),
        ("public.orders", ("public", "Orders"), False),
        ("public.orders", ("sales", "orders"), False),
        ("*.*", ("any", "thing"), True),
        ("*.*", ("a.b", "c.d"), True),
        ("public.audit_*", ("public", "audit_2026"), True),
        ("public.audit_?", ("public", "audit_20"), False),
        ("public.[ab]*", ("public", "beta"), True),
        ("public.[ab]*", ("public", "gamma"), False),
        ('"a.b".c', ("a.b", "c"), True),
        ('"a.b"."*"', ("a.b", "*"), True),
        ('"a.b"."*"', ("a.b", "c"), False),
        ('public."say ""so"""', ("public", 'say "so"'), True),
    ],
)
def test_a_pattern_matches_names_part_by_part(pattern: str, table: tuple[str, str], matches: bool) -> None:
    assert TableSection(match=pattern).matches(TableName(*table)) is matches


@pytest.mark.parametrize(("pattern", "exact"), [("a.b", True), ("a.b*", False), ('a."b*"', True), ("[a].b", False)])
def test_a_pattern_without_special_characters_names_one_table(pattern: str, exact: bool) -> None:
    assert TableSection(match=pattern).exact is exact


def test_later_sections_have_precedence_key_by_key() -> None:
    found = rules(
        {"match": "*.*", "include": False, "namespace": "raw"},
        {"match": "public.*", "include": True},
        {"match": "public.audit_*", "include": False},
        {"match": "public.orders", "name": "bestellungen"},
    )
    assert found.includes(TableName("public", "orders"))
    assert not found.includes(TableName("public", "audit_1"))
    assert not found.includes(TableName("sales", "orders"))
    assert found.target(TableName("public", "orders")) == ("raw", "bestellungen")
    assert found.target(TableName("public", "customers")) == ("raw", "customers")


def test_tables_without_a_section_are_mirrored_under_their_own_names() -> None:
    tables = [Published("public", "a"), Published("b.c", "d")]
    assert rules().choose(tables) == {TableName(each.schema, each.name): each for each in tables}


def test_two_tables_with_one_name_in_the_target_are_refused() -> None:
    both = [Published("eu", "orders"), Published("us", "orders")]
    with pytest.raises(ConfigError, match=r"eu\.orders and us\.orders would both be sales\.orders in the target"):
        rules({"match": "*.orders", "namespace": "sales"}).choose(both)
    excluded = rules({"match": "*.*", "namespace": "sales"}, {"match": "us.*", "include": False})
    assert list(excluded.choose(both)) == [("sales", "orders")]


def test_sections_that_match_no_table_are_found() -> None:
    found = rules({"match": "public.*"}, {"match": "public.order"}).unmatched([Published("public", "orders")])
    assert [each.match for each in found] == ["public.order"]


def test_rules_can_be_sent_to_tasks() -> None:
    made = rules({"match": "public.*", "include": False})
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_table_without_a_section_has_the_published_columns() -> None:
    assert shaping(rules({"match": "public.items", "columns": {"email": "hash"}})) is None
    assert shaping(rules({"match": "*.*", "columns": {"phone": "hash"}})) is None
    assert shaping(rules({"match": "public.orders", "name": "o"}, uuid="binary")) is None
    assert rules().columns(COLUMNS, {}, None).schema.names == ["id", "email", "price", "total"]


def test_columns_are_dropped_masked_and_cast() -> None:
    made = rules(
        {"match": "*.*", "columns": {"email": "redact", "price": {"type": "decimal(20, 4)"}}},
        {"match": "public.orders", "columns": {"email": "hash", "total": "drop", "id": {"type": "bigint"}}},
    )
    found = shaping(made)
    assert found is not None
    assert found.columns == (
        ShapedColumn("id", type="bigint"),
        ShapedColumn("email", mask="hash"),
        ShapedColumn("price", type="decimal(20,4)"),
        ShapedColumn("total", drop=True),
    )
    assert found.key_fingerprint is not None
    schema = made.columns(COLUMNS, {}, found).schema
    assert schema == pa.schema([("id", pa.int64()), ("email", pa.string()), ("price", pa.decimal128(20, 4))])


def test_types_are_chosen_for_columns_without_a_precision_only() -> None:
    made = rules(numeric="decimal(38,18)", uuid="binary")
    found = shaping(made)
    assert found == Shaping(types=(("numeric", "decimal(38,18)"),)), "no column is a uuid"
    schema = made.columns(COLUMNS, {}, found).schema
    assert schema.field("price").type == pa.decimal128(38, 18)
    assert schema.field("total").type == pa.decimal128(10, 2)


def test_another_key_is_another_shaping() -> None:
    sections = (TableSection.model_validate({"match": "*.*", "columns": {"email": "hash"}}),)
    one, other = (shaping(TableRules(sections, (), SecretStr(key * 20))) for key in "ab")
    assert one != other


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"mail": "hash"}, "the table has no published column mail"),
        ({"id": "null"}, "column id is part of the replica identity"),
        ({"id": "redact"}, "column id is part of the replica identity"),
        ({"id": "drop"}, "column id is part of the replica identity"),
        ({"id": "masks:f"}, "column id is part of the replica identity"),
        ({"email": {"type": "bigint"}}, "column email: a value of type text cannot be exact as bigint"),
        ({"price": {"type": "double"}}, "column price: a value of type numeric cannot be exact as double"),
        ({"id": {"type": "smallint"}}, "column id: a value of type int4 cannot be exact as smallint"),
    ],
)
def test_what_cannot_be_is_refused(columns: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shaping(rules({"match": "public.orders", "columns": columns}))
    assert wrong in caught.value.wrong
    assert caught.value.doing == "applying the sections [[table]] to public.orders"


def test_all_columns_cannot_be_dropped() -> None:
    with pytest.raises(ConfigError, match="all columns are dropped"):
        shaping(rules({"match": "*.*", "columns": dict.fromkeys(("id", "email", "price", "total"), "drop")}), key=())


def test_a_table_without_a_key_can_lose_any_column() -> None:
    assert shaping(rules({"match": "*.*", "columns": {"id": "drop"}}), key=()) is not None


def test_a_hidden_column_that_was_renamed_has_to_be_named_again() -> None:
    hidden = ((2, "mail"), (9, "gone"))
    with pytest.raises(ConfigError, match="column email was called mail when the table was copied"):
        shaping(rules({"match": "*.*", "columns": {"mail": "hash"}}), hidden=hidden)
    assert shaping(rules({"match": "*.*", "columns": {"email": {}}}), hidden=hidden) is None
    assert shaping(rules({"match": "*.*", "columns": {"email": "hash"}}), hidden=hidden) is not None
    assert shaping(rules({"match": "*.*"}), hidden=((2, "email"),)) is None, "the section was changed, not the column"


def test_the_rows_of_a_copy_are_sorted_by_columns_that_the_target_has() -> None:
    schema = pa.schema([("id", pa.int32()), ("tags", pa.list_(pa.string()))])
    assert rules().cluster_by(ORDERS, schema) == ()
    pattern = rules({"match": "*.*", "cluster_by": ["at", "id"]})
    assert pattern.cluster_by(ORDERS, schema) == ("id",)
    with pytest.raises(ConfigError, match="cluster_by: the target has no column at"):
        rules({"match": "public.orders", "cluster_by": ["at", "id"]}).cluster_by(ORDERS, schema)
    with pytest.raises(ConfigError, match="rows cannot be sorted by column tags"):
        rules({"match": "*.*", "cluster_by": ["tags"]}).cluster_by(ORDERS, schema)


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [("deleted_at", (), "soft_deletes needs a key"), ("Email", ("id",), "soft_deletes is Email, which is a column")],
)
def test_soft_deletes_need_a_key_and_a_name_of_their_own(name: str, key: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        shaping(rules({"match": "*.*", "soft_deletes": name}), key=key)


def test_the_column_of_soft_deletes_is_the_last() -> None:
    made = rules({"match": "*.*", "soft_deletes": "deleted_at", "columns": {"total": "drop"}})
    columns = made.columns(COLUMNS, {}, shaping(made))
    assert columns.schema.names == ["id", "email", "price", "deleted_at"]
    assert columns.mirrored.names == ["id", "email", "price"]


def test_a_hash_needs_a_key() -> None:
    made = TableRules(rules({"match": "*.*", "columns": {"email": "hash"}}).sections)
    with pytest.raises(ConfigError, match="needs WALMERE_HASH_KEY"):
        made.require_key()
    with pytest.raises(ConfigError, match="needs WALMERE_HASH_KEY"):
        shaping(made)
    TableRules(rules({"match": "*.*", "columns": {"email": "null"}}).sections).require_key()
