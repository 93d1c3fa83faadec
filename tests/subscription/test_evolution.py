"""Which changes of a definition are taken on in place: the same cases PostgreSQL itself does without a rewrite."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from walmere.definition import Definition, Layout, PublishedColumn
from walmere.subscription.evolution import in_place

INT4, INT8, TEXT, VARCHAR, NUMERIC, DATE, INT4_ARRAY = 23, 20, 25, 1043, 1700, 1082, 1007


def typmod(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + 4


ID = PublishedColumn(1, "id", INT4, -1, True)
NAME = PublishedColumn(2, "name", VARCHAR, 14, False)
PRICE = PublishedColumn(4, "price", NUMERIC, typmod(10, 2), False)
OLD = Definition((ID, NAME, PRICE), 4, Layout(1, 2, 3, 4), "pub")


def column(of: PublishedColumn, **changes: Any) -> PublishedColumn:
    return replace(of, **changes)


def plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.as_py()


@pytest.mark.parametrize(
    ("columns", "missing", "values"),
    [
        pytest.param((ID, NAME, PRICE), {}, ["id", "name", "price"], id="nothing"),
        pytest.param((ID, PRICE), {}, ["id", "price"], id="drop"),
        pytest.param((ID, column(NAME, name="title"), PRICE), {}, ["id", "name", "price"], id="rename"),
        pytest.param(
            (column(ID, name="name"), column(NAME, name="id"), PRICE), {}, ["id", "name", "price"], id="swap of names"
        ),
        pytest.param((ID, column(NAME, typmod=24), PRICE), {}, ["id", "name", "price"], id="longer varchar"),
        pytest.param((ID, column(NAME, type_oid=TEXT, typmod=-1), PRICE), {}, ["id", "name", "price"], id="to text"),
        pytest.param((ID, NAME, column(PRICE, typmod=typmod(20, 2))), {}, ["id", "name", "price"], id="more digits"),
        pytest.param((ID, PublishedColumn(5, "n", INT4, -1, False)), {}, ["id", None], id="add"),
        pytest.param((ID, PublishedColumn(5, "n", INT4, -1, False)), {5: "7"}, ["id", 7], id="add with default"),
        pytest.param((ID, PublishedColumn(5, "n", TEXT, -1, False)), {5: ""}, ["id", ""], id="add with an empty text"),
        pytest.param(
            (ID, PublishedColumn(5, "n", INT4_ARRAY, -1, False)), {5: "{1,NULL}"}, ["id", [1, None]], id="array"
        ),
        pytest.param((ID, column(PRICE, attnum=6, name="name")), {6: "1.5"}, ["id", Decimal("1.5")], id="re-add"),
        pytest.param((ID, NAME, column(NAME, attnum=5, name="x")), {}, ["id", "name", None], id="add a varchar"),
    ],
)  # fmt: skip
def test_what_leaves_the_rows_alone_is_done_in_place(
    columns: tuple[PublishedColumn, ...], missing: dict[int, str | None], values: list[Any]
) -> None:
    found = in_place(OLD, replace(OLD, columns=columns, natts=6), missing, {})
    assert found is not None
    assert found.schema.names == [each.name for each in columns]
    assert [plain(value) for value in found.values] == values
    for field, value in zip(found.schema, found.values, strict=True):
        assert isinstance(value, str) or value.type == field.type


@pytest.mark.parametrize(
    ("new", "missing"),
    [
        pytest.param(replace(OLD, layout=Layout(1, 2, 3, 5)), {}, id="the table was rewritten"),
        pytest.param(replace(OLD, publication_fingerprint="pub, another"), {}, id="published in another way"),
        pytest.param(
            replace(OLD, columns=(ID, PublishedColumn(5, "n", INT4, -1, False)), leaves=((1, 1),)),
            {5: "1"},
            id="of partitions",
        ),
        pytest.param(replace(OLD, columns=(column(ID, type_oid=INT8), NAME)), {}, id="another type"),
        pytest.param(replace(OLD, columns=(ID, column(PRICE, typmod=typmod(20, 3)))), {}, id="another scale"),
        pytest.param(replace(OLD, columns=(ID, column(PRICE, typmod=-1))), {}, id="no more decimal"),
        pytest.param(
            replace(OLD, columns=(ID, PublishedColumn(3, "old", INT4, -1, False))), {}, id="published only now"
        ),
        pytest.param(
            replace(OLD, columns=(ID, PublishedColumn(5, "d", DATE, -1, False))),
            {5: "infinity"},
            id="a default to reject",
        ),
    ],
)
def test_what_nobody_can_tell_from_the_catalogs_takes_a_copy(new: Definition, missing: dict[int, str | None]) -> None:
    assert in_place(OLD, new, missing, {}) is None


def test_a_wider_decimal_is_another_type_in_the_target() -> None:
    found = in_place(OLD, replace(OLD, columns=(column(PRICE, typmod=typmod(20, 2)),)), {}, {})
    assert found is not None
    assert found.schema.field(0).type == pa.decimal128(20, 2)
