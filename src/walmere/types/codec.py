"""The type of a column → its codec: every decision about types is in this file, as tables to read.

A domain is what it is over, however deep; an array is a list of what its elements are, and gives them its type modifier
(numeric(12,2)[] is a list of decimal(12,2)). Then the name decides: of a built-in type, or of one that an extension
brings, and then only if it really is the extension's. Whatever has no line here keeps PostgreSQL's own text, which is
exact by definition.
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


def _made(kind: Callable[[str, pa.DataType], Codec], arrow: pa.DataType) -> Make:
    return lambda name, _typmod: kind(name, arrow)


_TEXT: Final = _made(Text, pa.string())
_INT64: Final = _made(Integer, pa.int64())

BUILT_IN_CODECS: Final[Mapping[str, Make]] = {
    "bool": _made(Boolean, pa.bool_()),
    "int2": _made(Integer, pa.int16()),
    "int4": _made(Integer, pa.int32()),
    "int8": _INT64,
    # unsigned, of 32 bits but for xid8
    **dict.fromkeys(("oid", "xid", "cid", "xid8"), _INT64),
    "float4": _made(Float, pa.float32()),
    "float8": _made(Float, pa.float64()),
    "numeric": numeric,
    "bytea": _made(Bytea, pa.binary()),
    "date": _made(Date, pa.date32()),
    "timestamp": _made(Timestamp, pa.timestamp("us")),
    "timestamptz": _made(TimestampTz, pa.timestamp("us", "UTC")),
    # strings; bpchar with its blanks, which are part of it
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "char", "xml", "json", "jsonb", "jsonpath", "uuid"), _TEXT),
    # a lake has nothing that holds all values of these: lengths of time of three parts, times of day up to 24:00:00 ...
    **dict.fromkeys(("interval", "time", "timetz", "money", "bit", "varbit"), _TEXT),
    **dict.fromkeys(("inet", "cidr", "macaddr", "macaddr8"), _TEXT),
    **dict.fromkeys(("point", "lseg", "path", "box", "polygon", "line", "circle"), _TEXT),
    **dict.fromkeys(("tsvector", "tsquery", "gtsvector"), _TEXT),
    # names that stand for an OID, and PostgreSQL's own bookkeeping
    **dict.fromkeys(("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regtype"), _TEXT),
    **dict.fromkeys(("regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"), _TEXT),
    **dict.fromkeys(("tid", "pg_lsn", "pg_snapshot", "txid_snapshot", "aclitem", "refcursor"), _TEXT),
    **dict.fromkeys(("pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"), _TEXT),
    **dict.fromkeys(("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"), _TEXT),
    # arrays by name only: written without braces, and counted from 0
    **dict.fromkeys(("int2vector", "oidvector"), _TEXT),
}
"""Base types of pg_catalog. A test asks real servers for them, so that none is forgotten."""

EXTENSION_CODECS: Final[Mapping[tuple[str, str], Make]] = {
    ("citext", "citext"): _TEXT,
    ("hstore", "hstore"): _made(Hstore, pa.map_(pa.string(), pa.string())),
    ("vector", "vector"): _made(Vector, pa.list_(pa.float32())),
    ("vector", "halfvec"): _made(Vector, pa.list_(pa.float32())),
}
"""By extension and type."""


FIXED_WIDTH: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "oid", "xid", "cid", "xid8", "float4", "float8", "money", "uuid"),
        *("date", "timestamp", "timestamptz", "time", "timetz", "interval", "macaddr", "macaddr8"),
        *("pg_lsn", "tid", "name", "char", "aclitem", "point", "lseg", "box", "line", "circle"),
        *("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regtype"),
        *("regconfig", "regdictionary", "regnamespace", "regrole", "regcollation"),
    }
)
"""Base types of pg_catalog whose values are never TOASTed. A test asks real servers."""


def is_toastable(type_oid: int, catalog: Mapping[int, PgType]) -> bool:
    """Whether a value of this type can lie out of line, so that an UPDATE that leaves it alone does not send it."""
    found = _lookup(type_oid, catalog)
    if found.typtype is TypType.DOMAIN:
        return is_toastable(found.basetype, catalog)
    fixed = found.typtype is TypType.BASE and found.namespace == "pg_catalog" and found.name in FIXED_WIDTH
    return not fixed and found.typtype is not TypType.ENUM


def codec(type_oid: int, typmod: int, catalog: Mapping[int, PgType]) -> Codec:
    """The codec of a column with this type and type modifier.

    `catalog` has the types that are not built in, as `publisher.catalog.types_of` gives them. To have a numeric without
    modifier as a decimal, give the modifier it should have (`numeric.typmod_of`): what does not fit is rejected.
    """
    found = _lookup(type_oid, catalog)
    if found.typtype is TypType.DOMAIN:
        return codec(found.basetype, found.base_typmod, catalog)
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
            "it is not built in, and the catalog of the source was not asked for it or does not have it",
            "it may have been dropped since; a table whose columns changed has to be looked up again",
        )
    return found
