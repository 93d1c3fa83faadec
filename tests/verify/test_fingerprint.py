"""A fingerprint tells apart what is not the same, and nothing else, in whatever order and pieces the rows come."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from walmere.verify.fingerprint import Fingerprint, RowLayout, Side, buckets_for, empty, fingerprint, rows_of
from walmere.verify.pg_text import SourceType
from walmere.verify.rows import compare, gather

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("Bucket", pa.string()),  # called as a column of ours, but for its capital
        ("row", pa.float64()),
        ("price", pa.decimal128(12, 2)),
        ("seen", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("body", pa.binary()),
        ("list", pa.list_(pa.string())),
        ("map", pa.map_(pa.string(), pa.string())),
        ('we"ird', pa.bool_()),
        ("small", pa.float32()),
        ("floats", pa.list_(pa.float64())),
    ]
)
FLOATS = {"row": SourceType("DOUBLE"), "small": SourceType("FLOAT"), "floats": SourceType("DOUBLE", ",")}
TYPES = tuple(FLOATS.get(name, SourceType()) for name in SCHEMA.names)
ROW: dict[str, Any] = {
    "id": 1,
    "Bucket": "x",
    "row": 0.0,
    "price": Decimal("1.50"),
    "seen": datetime(2026, 1, 1, tzinfo=UTC),
    "day": date(2026, 1, 1),
    "body": b"\x00",
    "list": ["a"],
    "map": [("k", "v")],
    'we"ird': True,
    "small": 1.5,
    "floats": [1.5],
}


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([ROW | row for row in rows], schema=SCHEMA)


def of(rows: pa.Table, *key: str, buckets: int = 16, size: int | None = None) -> Fingerprint:
    return fingerprint(RowLayout(rows.schema, key, buckets, TYPES), Side.TARGET, rows.to_batches(size))


def as_text(rows: pa.Table) -> pa.RecordBatch:
    """These rows as the source has them."""
    lists = {(): "{}", ("a",): "{a}"}
    columns = {
        "row": [str(value).removesuffix(".0") for value in rows["row"].to_pylist()],
        "seen": ["2026-01-01 00:00:00+00"] * len(rows),
        "body": ["\\x00"] * len(rows),
        "list": [None if value is None else lists[tuple(value)] for value in rows["list"].to_pylist()],
        "map": ['"k"=>"v"'] * len(rows),
        'we"ird': ["t"] * len(rows),
        "floats": ["{1.5}"] * len(rows),
    }
    texts = [columns.get(name) or [str(value) for value in rows[name].to_pylist()] for name in rows.column_names]
    return pa.RecordBatch.from_arrays(
        [pa.array(each, pa.large_string()) for each in texts], [f"c{place}" for place in range(len(texts))]
    )


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("Bucket", [None, "", "x", "X", "x ", " x"]),
        ("row", [None, 0.0, -0.0, 1.0, float("nan"), float("inf")]),
        ("small", [None, 0.0, -0.0, 1.0, float("nan")]),
        ("price", [None, Decimal("0.00"), Decimal("0.01")]),
        ("body", [None, b"", b"\x00", b"\x00\x00"]),
        ("floats", [None, [], [None], [0.0], [-0.0], [1.0, 2.0], [2.0, 1.0], [1.0, None], [None, 1.0], [0.0, -0.0]]),
        ("list", [None, [], [None], [""], ["a"], ["a", None], [None, "a"], ["a", "b"], ["b", "a"], ["ab"]]),
        ("map", [None, [], [("a", None)], [("a", "b")], [("b", "a")]]),
        ('we"ird', [None, True, False]),
        ("day", [None, date(1970, 1, 1), date(1970, 1, 2)]),
    ],
)
def test_values_that_are_not_the_same_are_told_apart(column: str, values: list[Any]) -> None:
    found = [of(table({column: value}), "id") for value in values]
    for place, one in enumerate(found):
        same = [other for other, print_ in enumerate(found) if not len(one.differing(print_))]
        assert same == [place], f"{values[place]!r} is taken for another"


def test_order_and_pieces_do_not_matter_but_numbers_do() -> None:
    rows = table(*({"id": i, "Bucket": str(i)} for i in range(1000)))
    shuffled = rows.take(pa.array(np.random.default_rng(1).permutation(1000)))
    whole = of(rows, "id")
    assert not len(whole.differing(of(shuffled, "id", size=7)))
    halves = of(rows.slice(0, 500), "id") + of(rows.slice(500), "id")
    assert not len(whole.differing(halves))
    assert whole.total == 1000
    twice = of(pa.concat_tables([rows, rows.slice(3, 1)]), "id")
    assert len(whole.differing(twice)) == 1
    even = of(pa.concat_tables([rows, rows.slice(3, 1), rows.slice(3, 1)]), "id")
    assert len(whole.differing(even)) == 1, "an even number too many does not cancel out"
    assert not len(empty(16).differing(of(rows.slice(0, 0), "id")))


def test_values_that_changed_their_places_are_seen() -> None:
    rows = table({"id": 1, "Bucket": "a"}, {"id": 2, "Bucket": "b"})
    swapped = table({"id": 1, "Bucket": "b"}, {"id": 2, "Bucket": "a"})
    assert len(of(rows, "id").differing(of(swapped, "id")))


def test_a_bucket_has_few_rows_however_many_there_are() -> None:
    assert [buckets_for(rows) for rows in (0, 1000, 1 << 20, 5_000_000)] == [16, 16, 128, 512]
    assert buckets_for(10**12) == 65_536


def test_of_a_bucket_that_differs_each_row_is_named_with_its_columns() -> None:
    here = table({"id": 1}, {"id": 2, "row": 0.0}, {"id": 3}, {"id": 4, "list": []})
    there = table({"id": 2, "row": -0.0}, {"id": 3}, {"id": 3}, {"id": 4, "list": None}, {"id": 5})
    layout = RowLayout(SCHEMA, ("id",), 16, TYPES)
    differing = of(here, "id").differing(of(there, "id"))
    both = pa.concat_tables(
        pa.Table.from_batches(rows_of(layout, side, batches, differing, texts=True))
        for side, batches in ((Side.SOURCE, [as_text(here)]), (Side.TARGET, there.to_batches()))
    )

    class Row:
        def __init__(self, values: dict[str, Any]) -> None:
            self.__dict__.update(values)

    found = gather(map(Row, compare(both, 10).to_pylist()), SCHEMA.names, ("id",), 10)
    assert (found.missing, found.extra, found.different) == (1, 2, 2)
    assert [(each.what, each.key["id"], each.columns) for each in found.examples] == [
        ("missing", "1", ()),
        ("different", "2", ("row",)),
        ("extra", "3", ()),
        ("different", "4", ("list",)),
        ("extra", "5", ()),
    ]
    assert (found.examples[1].source, found.examples[1].target) == ({"row": "0.0"}, {"row": "-0.0"})
    few = gather(map(Row, compare(both, 1).to_pylist()), SCHEMA.names, ("id",), 10)
    assert (few.missing, few.extra, few.different, len(few.examples)) == (1, 2, 2, 1)


def test_values_exchanged_between_two_rows_are_seen_however_alike_they_are() -> None:
    pairs = 50_000
    pair = np.repeat(np.arange(pairs), 2)
    ids = np.random.default_rng(7).integers(0, 1 << 40, 2 * pairs)
    schema = pa.schema([("pair", pa.int64()), ("id", pa.int64()), ("flag", pa.bool_())])
    layout = RowLayout(schema, ("pair",), 1 << 20, (SourceType(),) * 3)
    one, other = (
        fingerprint(layout, Side.TARGET, pa.table([pair, ids, np.tile(flags, pairs)], schema=schema).to_batches())
        for flags in ([True, False], [False, True])
    )
    there = one.rows > 0
    assert there.sum() > 0.9 * pairs
    assert (one.low != other.low)[there].all()
    assert (one.high != other.high)[there].all(), "each half of the sum sees it by itself"
