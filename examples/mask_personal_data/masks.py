"""Masks for the columns of a shop. Each function gets a whole column, and returns one of the same length."""

import pyarrow as pa
import pyarrow.compute as pc


def year(dates: pa.Array) -> pa.Array:
    """Only the year of a date: enough for statistics by age."""
    return pc.cast(pc.year(dates), pa.int32())


def domain(addresses: pa.Array) -> pa.Array:
    """Only what follows the @ of an e-mail address."""
    return pc.replace_substring_regex(addresses, pattern="^[^@]*@", replacement="")


def rounded(amounts: pa.Array) -> pa.Array:
    """An amount without its last digits, in its own type."""
    return pc.round(amounts, ndigits=-2).cast(amounts.type)
