"""docs/reference/types.md says what the code does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scripts.type_table import PAGE, not_held, page

from walmere.types.builtin import BUILT_IN
from walmere.types.codec import codec
from walmere.types.numeric import typmod_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make reference`"


@pytest.mark.parametrize(
    ("name", "typmod", "text"),
    [
        ("date", -1, b"infinity"),
        ("timestamp", -1, b"-infinity"),
        ("timestamptz", -1, b"0044-03-15 00:00:00+00 BC"),
        ("numeric", typmod_of(12, 2), b"NaN"),
        ("xid8", -1, b"9223372036854775808"),
    ],
)
def test_what_it_says_is_not_held_is_rejected(name: str, typmod: int, text: bytes) -> None:
    [oid] = [each.oid for each in BUILT_IN.values() if each.name == name]
    found = codec(oid, typmod, {})
    assert not_held(found)
    rejected = found.cast(pa.array([text], pa.binary())).rejected
    assert rejected is not None
    assert np.all(rejected)
