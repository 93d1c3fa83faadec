r"""Strings of JSON without their escapes: `\n`, `\"`, `\u00e9`, and pairs of surrogates, `\ud83d\ude00`.

All strings of a block are converted at once. The result is never longer than the text, so it is written in place, and
what is left over is removed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from walmere.types.flat import Bytes, Places
from walmere.types.variant.tokens import NotJson

_PLAIN: Final = np.zeros(256, np.uint8)
_PLAIN[list(b'"\\/bfnrt')] = list(b'"\\/\b\f\n\r\t')
_HEX: Final = np.full(256, 255, np.uint8)
_HEX[list(b"0123456789abcdef")] = range(16)
_HEX[list(b"ABCDEF")] = range(10, 16)
_U: Final = ord("u")
_ESCAPE, _PAIR = 6, 12
"""The lengths of one \\uXXXX, and of two."""


def unescaped(data: Bytes, escapes: Places) -> tuple[Bytes, Places, Places]:
    """The bytes without escapes, the places of the bytes that were removed, and those of lone surrogates.

    A place in the text is that place in the bytes, minus the number of removed places before it.
    """
    made = data.copy()
    letters = data[escapes + 1]
    plain = escapes[letters != _U]
    made[plain] = _PLAIN[data[plain + 1]]
    if not made[plain].all():
        raise NotJson
    keep = np.ones(len(data), np.bool_)
    keep[plain + 1] = False
    codes = escapes[letters == _U]
    lone = codes[:0]
    if len(codes):
        lone = _write(made, keep, data, codes)
    return made[keep], np.flatnonzero(~keep), lone


def _write(made: Bytes, keep: np.ndarray, data: Bytes, codes: Places) -> Places:
    r"""Write the characters of `\uXXXX` as UTF-8. Returns the places of surrogates that are not in a pair."""
    if codes[-1] + _ESCAPE > len(data):
        raise NotJson
    digits = _HEX[data[codes[:, None] + np.arange(2, _ESCAPE)]].astype(np.int64)
    if (digits > 15).any():
        raise NotJson
    point = digits @ (16 ** np.arange(3, -1, -1))
    high, low = (point >> 10) == 0x36, (point >> 10) == 0x37
    pair = np.zeros(len(codes), np.bool_)
    pair[:-1] = high[:-1] & low[1:] & (np.diff(codes) == _ESCAPE)
    second = np.append(False, pair[:-1])
    lone: Places = codes[(high & ~pair) | (low & ~second)]
    point[:-1][pair[:-1]] = 0x10000 + ((point[:-1][pair[:-1]] & 0x3FF) << 10) + (point[1:][pair[:-1]] & 0x3FF)
    length = 1 + (point >= 0x80).astype(np.int64) + (point >= 0x800) + (point >= 0x10000)
    for size, lead in ((1, 0), (2, 0xC0), (3, 0xE0), (4, 0xF0)):
        places = (length == size) & ~second
        at, value = codes[places], point[places]
        made[at] = lead | (value >> 6 * (size - 1))
        for index in range(1, size):
            made[at + index] = 0x80 | ((value >> 6 * (size - 1 - index)) & 0x3F)
        for index in range(size, _PAIR if size == 4 else _ESCAPE):
            keep[at + index] = False
    return lone
