"""The type of a column → its codec. The tables in this file decide which type has which codec.

A domain has the codec of its base type. An array is a list, and its elements have its type modifier (numeric(12,2)[] is
a list of decimal(12,2)). For other types, the name decides: that of a built-in type, or of a type that belongs to an
extension. A type that is not in the tables keeps PostgreSQL's text, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from walmere.errors import UnknownType
from walmere.types.array import Array
from walmere.types.base import Cast, Codec
from walmere.types.boolean import Boolean
from walmere.types.builtin import BUILT_IN
from walmere.types.bytea import Bytea
from walmere.types.date import Date, Timestamp, TimestampTz
from walmere.types.hstore import Hstore
from walmere.types.number import Float, Integer
from walmere.types.numeric import numeric
from walmere.types.pgtype import PgType, TypType
from walmere.types.text import Text
from walmere.types.vector import Vector

__all__ = ["Cast", "Codec", "PgType", "TypType", "codec"]

Make = Callable[[str, int], Codec]


def _make(kind: Callable[[str, pa.DataType], Codec], arrow: pa.DataType) -> Make:
    return lambda name, _typmod: kind(name, arrow)


_TEXT: Final = _make(Text, pa.string())
_INT64: Final = _make(Integer, pa.int64())

BUILT_IN_CODECS: Final[Mapping[str, Make]] = {
    "bool": _make(Boolean, pa.bool_()),
    "int2": _make(Integer, pa.int16()),
    "int4": _make(Integer, pa.int32()),
    "int8": _INT64,
    # unsigned; xid8 has 64 bits, the others 32
    **dict.fromkeys(("oid", "xid", "cid", "xid8"), _INT64),
    "float4": _make(Float, pa.float32()),
    "float8": _make(Float, pa.float64()),
    "numeric": numeric,
    "bytea": _make(Bytea, pa.binary()),
    "date": _make(Date, pa.date32()),
    "timestamp": _make(Timestamp, pa.timestamp("us")),
    "timestamptz": _make(TimestampTz, pa.timestamp("us", "UTC")),
    # strings; bpchar keeps its trailing blanks
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "char", "xml", "json", "jsonb", "jsonpath", "uuid"), _TEXT),
    # a lake has no type for all values of these: intervals have three parts, times of day go up to 24:00:00
    **dict.fromkeys(("interval", "time", "timetz", "money", "bit", "varbit"), _TEXT),
    **dict.fromkeys(("inet", "cidr", "macaddr", "macaddr8"), _TEXT),
    **dict.fromkeys(("point", "lseg", "path", "box", "polygon", "line", "circle"), _TEXT),
    **dict.fromkeys(("tsvector", "tsquery", "gtsvector"), _TEXT),
    # names for OIDs, and internal types of PostgreSQL
    **dict.fromkeys(("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regtype"), _TEXT),
    **dict.fromkeys(("regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"), _TEXT),
    **dict.fromkeys(("tid", "pg_lsn", "pg_snapshot", "txid_snapshot", "aclitem", "refcursor"), _TEXT),
    **dict.fromkeys(("pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"), _TEXT),
    **dict.fromkeys(("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"), _TEXT),
    # not written as arrays: without braces, and with indexes from 0
    **dict.fromkeys(("int2vector", "oidvector"), _TEXT),
}
"""Base types of pg_catalog. A test compares them with real servers, so that none is missing."""

EXTENSION_CODECS: Final[Mapping[tuple[str, str], Make]] = {
    ("citext", "citext"): _TEXT,
    ("hstore", "hstore"): _make(Hstore, pa.map_(pa.string(), pa.string())),
    ("vector", "vector"): _make(Vector, pa.list_(pa.float32())),
    ("vector", "halfvec"): _make(Vector, pa.list_(pa.float32())),
}
"""Codecs of extension types, by extension and type."""


FIXED_WIDTH: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "oid", "xid", "cid", "xid8", "float4", "float8", "money", "uuid"),
        *("date", "timestamp", "timestamptz", "time", "timetz", "interval", "macaddr", "macaddr8"),
        *("pg_lsn", "tid", "name", "char", "aclitem", "point", "lseg", "box", "line", "circle"),
        *("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regtype"),
        *("regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"),
    }
)
"""Base types of pg_catalog whose values are never TOASTed. A test compares them with real servers."""


def is_toastable(type_oid: int, catalog: Mapping[int, PgType]) -> bool:
    """Whether a value of this type can be TOASTed, so that an UPDATE that does not change it does not send it."""
    found = _lookup(type_oid, catalog)
    if found.typtype is TypType.DOMAIN:
        return is_toastable(found.basetype, catalog)
    fixed = found.typtype is TypType.BASE and found.namespace == "pg_catalog" and found.name in FIXED_WIDTH
    return not fixed and found.typtype is not TypType.ENUM


def base_type(type_oid: int, typmod: int, catalog: Mapping[int, PgType]) -> tuple[PgType, int]:
    """The type and modifier of a column; of a domain, those of its base type."""
    found = _lookup(type_oid, catalog)
    if found.typtype is TypType.DOMAIN:
        return base_type(found.basetype, found.base_typmod, catalog)
    return found, typmod


def codec(type_oid: int, typmod: int, catalog: Mapping[int, PgType]) -> Codec:
    """The codec of a column with this type and type modifier.

    `catalog` has the types that are not built in, from `publisher.catalog.types_of`. To read a numeric without a
    modifier as a decimal, give the modifier of that decimal (`numeric.typmod_of`): values that do not fit are rejected.
    `walmere.types.choice` has codecs for other types of the target.
    """
    found, typmod = base_type(type_oid, typmod, catalog)
    if found.elem:
        element = codec(found.elem, typmod, catalog)
        return Array(f"{element.name}[]", pa.list_(element.arrow), element, _lookup(found.elem, catalog).delimiter)
    make = _TEXT
    if found.typtype is TypType.BASE:
        if found.namespace == "pg_catalog":
            make = BUILT_IN_CODECS.get(found.name, _TEXT)
        elif found.extension is not None:
            make = EXTENSION_CODECS.get((found.extension, found.name), _TEXT)
    return make(str(found), typmod)


def _lookup(oid: int, catalog: Mapping[int, PgType]) -> PgType:
    found = BUILT_IN.get(oid) or catalog.get(oid)
    if found is None:
        raise UnknownType(
            f"looking up the type with OID {oid}",
            "it is not built in, and was not read from the catalog of the source",
            "the type may have been dropped since, or the columns of the table may have changed",
        )
    return found
