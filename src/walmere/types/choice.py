"""Another type of the target than the usual one, if the configuration chooses it.

A choice never changes a value: what the chosen type cannot hold is rejected. So there is no float for a numeric, and no
integer for a numeric with digits after the point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from walmere.types.base import Codec
from walmere.types.codec import base_type, codec
from walmere.types.interval import INTERVAL, IntervalParts
from walmere.types.number import Integer
from walmere.types.numeric import Numeric
from walmere.types.pgtype import PgType
from walmere.types.text import Text
from walmere.types.uuid import UuidBytes
from walmere.types.variant.codec import Variant
from walmere.variant_type import VARIANT

_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)\Z")
_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "struct": INTERVAL,
    "variant": VARIANT,
}
_WIDER: Final = {("int2", "int"), ("int2", "bigint"), ("int4", "bigint")}
_DIGITS: Final = frozenset({"numeric", "int2", "int4", "int8"})


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type for Spark's name of a type. Raises ValueError."""
    if (found := _DECIMAL.match(name)) is not None:
        return pa.decimal128(int(found[1]), int(found[2]))
    if name not in _PLAIN:
        raise ValueError(f"{name} is not a type of the target")
    return _PLAIN[name]


def choose(type_oid: int, typmod: int, catalog: Mapping[int, PgType], lake_type: str) -> Codec:
    """The codec of a column whose type in the target was chosen. Raises ValueError if there is none."""
    found, typmod = base_type(type_oid, typmod, catalog)
    usual = codec(type_oid, typmod, catalog)
    arrow = arrow_type(lake_type)
    if usual.arrow == arrow:
        return usual
    name, built_in = str(found), found.namespace == "pg_catalog"
    if lake_type == "string":
        return Text(name, arrow)
    if built_in and pa.types.is_decimal(arrow) and found.name in _DIGITS:
        return Numeric(f"{name} as {lake_type}", arrow)
    if built_in and (found.name, lake_type) in _WIDER:
        return Integer(name, arrow)
    if built_in and (found.name, lake_type) == ("uuid", "binary"):
        return UuidBytes(name, arrow)
    if built_in and (found.name, lake_type) == ("interval", "struct"):
        return IntervalParts(name, arrow)
    if built_in and lake_type == "variant" and found.name in ("json", "jsonb"):
        return Variant(name, arrow)
    raise ValueError(f"a value of type {usual.name} cannot be exact as {lake_type}")


def by_type(type_oid: int, typmod: int, catalog: Mapping[int, PgType], chosen: Mapping[str, str]) -> Codec | None:
    """The codec of a column whose type has a choice in `[types]`; None: it has none.

    A numeric with a precision of up to 38 digits is exact as its own decimal, so it has no choice.
    """
    found, typmod = base_type(type_oid, typmod, catalog)
    lake_type = chosen.get(found.name) if found.namespace == "pg_catalog" else None
    if lake_type is None:
        return None
    if found.name == "numeric" and pa.types.is_decimal(codec(type_oid, typmod, catalog).arrow):
        return None
    return choose(type_oid, typmod, catalog, lake_type)
