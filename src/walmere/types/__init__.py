"""PostgreSQL's text → Arrow: one cast per type, used for COPY and for the stream, so that both give the same values.

    pgtype     what a type is: a row of pg_type
    builtin    the types that every server has, without a look at its catalogs
    codec      the type of a column → its codec
    choice     the same, for another type of the target
    base       the class of a codec: Arrow type, cast, rejected values, errors
    text, boolean, number, numeric, bytea, uuid, date, interval, array, vector, hstore
               one module for each family of types
    flat       the values of an Arrow array as one run of bytes, for families with a syntax
    variant/   json and jsonb as VARIANT
    jsontext   the text of a column → JSON text
    copytext   the output of COPY … TO STDOUT → Arrow columns of text

A text has one of three results. It is **cast**, exactly. It is **rejected**, if it is a valid value that the Arrow type
cannot hold (infinity, a BC date, NaN in a decimal, an array of two dimensions): then the column has null, and the value
is marked so that the caller can keep its text. Or it is not a value of its type, which a server never sends: then the
whole cast is **refused** with `CastError`, which has the position but never the value.

Only `pgtype` is imported here: the other modules need NumPy and PyArrow, which queries of the source do not need.
"""

from walmere.types.pgtype import PgType, TypType

__all__ = ["PgType", "TypType"]
