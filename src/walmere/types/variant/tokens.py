r"""JSON texts as a tree of values, with array operations over the bytes of many documents at once.

1. Quotes that are not escaped are the ends of strings, in turn. What is between them is not looked at.
2. Of the other bytes, `{}[],:` are tokens, and a run of bytes that are neither of these nor white space is a number,
   true, false or null.
3. The depth of a token is the number of brackets that are open. The parent of a value is the last bracket before it
   that was opened one level above.

PostgreSQL has checked the JSON. Bytes that are no JSON are found by the order of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from walmere.types.base import Mask
from walmere.types.flat import BACKSLASH, QUOTE, Bytes, Flat, Places

U8 = NDArray[np.uint8]

SCALAR, _SPACE, STRING, OBJECT, ARRAY, _END_OBJECT, _END_ARRAY, _COMMA, _COLON, _KEY = range(10)
"""Kinds of tokens. A scalar is a number, true, false or null."""

_KINDS: Final = np.zeros(256, np.uint8)
_KINDS[list(b" \t\r\n")] = _SPACE
_KINDS[list(b'"{[}],:')] = (STRING, OBJECT, ARRAY, _END_OBJECT, _END_ARRAY, _COMMA, _COLON)

_VALUE: Final = (SCALAR, STRING, OBJECT, ARRAY)
_AFTER_VALUE: Final = (_COMMA, _END_OBJECT, _END_ARRAY)
_FOLLOWS: Final = np.zeros((10, 10), np.bool_)
for _first, _next in {
    OBJECT: (_KEY, _END_OBJECT),
    ARRAY: (*_VALUE, _END_ARRAY),
    _COMMA: (_KEY, *_VALUE),
    _COLON: _VALUE,
    _KEY: (_COLON,),
    **dict.fromkeys((SCALAR, STRING, _END_OBJECT, _END_ARRAY), _AFTER_VALUE),
}.items():
    _FOLLOWS[_first, list(_next)] = True


class NotJson(ValueError):
    """A text is not JSON."""


class Unsuitable(Exception):
    """Documents that a caller cannot use."""

    def __init__(self, documents: Places) -> None:
        super().__init__()
        self.documents = documents


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The values of all documents, in the order of the text. A key belongs to the value after it."""

    kind: U8  # SCALAR, STRING, OBJECT, ARRAY
    start: Places  # where its text begins: of a string after the quote
    end: Places  # of a scalar or string
    document: Places
    depth: NDArray[np.int16]
    parent: Places  # the number of the value that it is in; -1: none
    keyed: Places  # the values that have a key
    key_start: Places  # of each of these
    key_end: Places
    escapes: Places  # the backslashes that escape the next character


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """What stands outside of strings, and the strings."""

    kind: U8
    place: Places
    of_document: Places  # the number of its first token; at the end, the number of all tokens
    closing: Places  # of each string, the closing quote
    last: Places  # of each scalar, its last byte
    escapes: Places


def tree(text: Flat, max_depth: int) -> Tree:
    """The values of all documents. Raises NotJson, or Unsuitable for documents with more brackets in each other."""
    found = _tokens(text)
    kind, of_document = found.kind, found.of_document
    document = np.repeat(np.arange(len(text.starts)), np.diff(of_document))
    depth = _depth(kind, of_document)
    deep = (depth >= max_depth) & ((kind == OBJECT) | (kind == ARRAY))
    if deep.any():
        raise Unsuitable(np.unique(document[deep]))
    _require_order(kind, depth, of_document)

    is_value = kind <= ARRAY
    values = np.flatnonzero(is_value)
    parents = _parents(kind, depth.astype(np.int16), is_value)
    closed = np.flatnonzero((kind == _END_OBJECT) | (kind == _END_ARRAY))
    if (kind[parents[closed]] + 2 != kind[closed]).any():
        raise NotJson
    before = kind[values - 1]
    before[of_document[:-1][document[values]] == values] = _SPACE
    parent = parents[values]
    in_object = (parent >= 0) & (kind[parent] == OBJECT)
    if (in_object != (before == _COLON)).any():
        raise NotJson

    is_string = kind[values] == STRING
    nth_string = np.cumsum((kind == STRING) | (kind == _KEY)) - 1
    end = np.zeros(len(values), np.int64)
    end[kind[values] == SCALAR] = found.last + 1
    end[is_string] = found.closing[nth_string[values[is_string]]]
    keyed = np.flatnonzero(in_object)
    keys = values[keyed] - 2
    number = np.cumsum(is_value) - 1  # of a token, that of its value
    return Tree(
        kind=kind[values],
        start=found.place[values] + is_string,
        end=end,
        document=document[values],
        depth=depth[values].astype(np.int16),
        parent=np.where(parent >= 0, number[parent], -1),
        keyed=keyed,
        key_start=found.place[keys] + 1,
        key_end=found.closing[nth_string[keys]],
        escapes=found.escapes,
    )


def _tokens(text: Flat) -> _Tokens:
    data, starts, ends = text
    if (starts == ends).any():
        raise NotJson
    escapes = _escapes(data)
    quote = data == QUOTE
    quote[escapes[data[escapes + 1] == QUOTE] + 1] = False
    quotes = np.flatnonzero(quote)
    opening, closing = quotes[0::2], quotes[1::2]
    if len(opening) != len(closing):
        raise NotJson
    if (np.searchsorted(starts, opening, "right") != np.searchsorted(starts, closing, "right")).any():
        raise NotJson
    kinds = _KINDS[data]
    inside = np.bitwise_xor.accumulate(quote.view(np.uint8)).view(np.bool_)  # from the opening quote to the closing one
    inside |= quote
    kinds[inside] = _SPACE
    kinds[opening] = STRING
    first, last = _runs(kinds == SCALAR, starts)
    token = kinds > _SPACE
    token[first] = True

    place = np.flatnonzero(token)
    of_document = np.searchsorted(place, np.append(starts, len(data)))
    if not np.diff(of_document).all():
        raise NotJson
    kind = kinds[place]
    kind[:-1][(kind[:-1] == STRING) & (kind[1:] == _COLON)] = _KEY
    return _Tokens(kind, place, of_document, closing, last, escapes)


def _escapes(data: Bytes) -> Places:
    """The backslashes that escape the next character: in a run of them, every other one."""
    backslashes = np.flatnonzero(data == BACKSLASH)
    if len(backslashes):
        if backslashes[-1] == len(data) - 1:
            raise NotJson
        index = np.arange(len(backslashes))
        begins = np.diff(backslashes, prepend=-2) != 1
        in_run = index - np.maximum.accumulate(np.where(begins, index, 0))
        backslashes = backslashes[in_run % 2 == 0]
    return backslashes


def _runs(where: Mask, starts: Places) -> tuple[Places, Places]:
    """The first and the last place of each run. A run ends where a document ends."""
    begins = where.copy()
    begins[1:] &= ~where[:-1]
    begins[starts] = where[starts]
    ends = where.copy()
    ends[:-1] &= ~where[1:] | begins[1:]
    return np.flatnonzero(begins), np.flatnonzero(ends)


def _depth(kind: U8, of_document: Places) -> Places:
    """The number of brackets around each token."""
    opens = (kind == OBJECT) | (kind == ARRAY)
    closes = (kind == _END_OBJECT) | (kind == _END_ARRAY)
    after = np.cumsum(opens.astype(np.int8) - closes, dtype=np.int64)
    if (after < 0).any() or after[of_document[1:] - 1].any():
        raise NotJson
    depth: Places = after - opens
    return depth


def _require_order(kind: U8, depth: Places, of_document: Places) -> None:
    """Raise NotJson if a token cannot follow the one before it, or a document is not one value."""
    follows = _FOLLOWS[kind[:-1], kind[1:]]
    follows[of_document[1:-1] - 1] = True
    first = of_document[:-1]
    outermost = np.add.reduceat((depth == 0) & (kind <= ARRAY), first)
    if not follows.all() or (kind[first] > ARRAY).any() or (outermost != 1).any():
        raise NotJson
    if ((depth == 0) & ((kind == _COMMA) | (kind == _COLON) | (kind == _KEY))).any():
        raise NotJson


def _parents(kind: U8, depth: NDArray[np.int16], is_value: Mask) -> Places:
    """For a value, the token of the bracket that it is in; for a closing bracket, that of the opening one; or -1.

    In the order of their levels, and on a level in that of the text, a bracket stands before what is in it.
    """
    tokens = np.arange(len(kind))
    brackets = tokens[(kind == OBJECT) | (kind == ARRAY)]
    contents = tokens[is_value | (kind == _END_OBJECT) | (kind == _END_ARRAY)]
    level = np.concatenate([depth[brackets] + 1, depth[contents] + (kind[contents] > ARRAY)])
    at = np.concatenate([brackets, contents])
    order = np.argsort(at, kind="stable")
    order = order[np.argsort(level[order], kind="stable")]
    last = np.maximum.accumulate(np.where(order < len(brackets), np.arange(len(order)), -1))
    found = np.full(len(kind), -1, np.int64)
    content = np.flatnonzero((order >= len(brackets)) & (level[order] > 0))
    found[at[order[content]]] = at[order[last[content]]]
    return found
