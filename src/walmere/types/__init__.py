"""PostgreSQL's text → Arrow: one cast per type, for COPY and for the stream, so that the two can never disagree.

    pgtype     what a type is: a row of pg_type
    builtin    the types every server has, known without asking
    codec      the type of a column → its codec
    base       what a codec is: the Arrow type, the cast, what is rejected and what is refused
    text, boolean, number, numeric, bytea, date, array, vector, hstore
               the families
    flat       the values of an Arrow array as one run of bytes, for the families that walk through them
    jsontext   the text of a column → JSON text
    copytext   what COPY … TO STDOUT sends → Arrow columns of text

A value ends in one of three ways. It is **cast**, exactly. It is **rejected**, because it is a good value that the
Arrow type cannot hold (infinity, a BC date, NaN in a decimal, an array of two dimensions): null in the column and
marked, so that the caller keeps the original text. Or it is no value of its type at all, which a server never sends:
then the whole cast is **refused** with `CastError`, which says where and what but never shows the value.

Only `pgtype` is imported here: the others need NumPy and PyArrow, and who only asks the source can do without.
"""

from walmere.types.pgtype import PgType, TypType

__all__ = ["PgType", "TypType"]
