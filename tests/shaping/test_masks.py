"""What masks make of a column: the same for every way in which its text comes in pieces."""

from __future__ import annotations

import hmac
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import SecretStr

from walmere.definition import ShapedColumn, Shaping
from walmere.errors import ConfigError, FunctionFailed
from walmere.shaping.columns import target_columns
from walmere.shaping.functions import load
from walmere.shaping.keyed_hash import key_fingerprint, keyed_hash
from walmere.shaping.masks import REDACTED
from walmere.types.base import Codec

KEY = "a key that nobody guesses"
TEXTS = [b"", b"a", "größer \U0001f600".encode(), b"\xff\x00", None, b"x" * 5000, b"a"]
DATE, INT4, TEXT = 1082, 23, 25


def masked(mask: str, type_oid: int = TEXT, lake_type: str | None = None) -> Codec:
    shaping = Shaping((ShapedColumn("c", mask=mask, type=lake_type),))
    [found] = target_columns([("c", type_oid, -1)], {}, shaping, SecretStr(KEY)).codecs
    return found


@pytest.mark.parametrize("key", ["k" * 16, KEY, "ü" * 40, "k" * 64, "k" * 65])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_the_hash_is_hmac_sha256_of_the_text(key: str, kind: pa.DataType) -> None:
    expected = [None if text is None else hmac.digest(key.encode(), text, "sha256").hex() for text in TEXTS]
    found = keyed_hash(pa.array(TEXTS, kind), key)
    assert found.type == pa.string()
    assert found.to_pylist() == expected


def test_a_hash_of_many_rows_keeps_their_order() -> None:
    texts = [str(number).encode() for number in range(20_000)]
    found = masked("hash").cast(pa.array(texts, pa.binary())).values.to_pylist()
    places = [0, 1, 2047, 2048, 9999, 19_999]
    assert [found[place] for place in places] == [
        hmac.digest(KEY.encode(), texts[place], "sha256").hex() for place in places
    ]
    assert len(set(found)) == len(texts)


def test_a_hash_does_not_depend_on_the_type() -> None:
    text = pa.array([b"17"], pa.binary())
    assert masked("hash", INT4).cast(text).values == masked("hash", TEXT).cast(text).values


def test_the_key_is_not_shown_and_its_fingerprint_changes_with_it() -> None:
    assert KEY not in repr(masked("hash"))
    assert key_fingerprint(KEY) != key_fingerprint(KEY + "x")
    with pytest.raises(ConfigError, match="there is no key"):
        target_columns([("c", TEXT, -1)], {}, Shaping((ShapedColumn("c", mask="hash"),))).codecs[0].cast(
            pa.array([b"a"])
        )


def test_redact_and_null_show_nothing() -> None:
    text = pa.array([b"secret", None], pa.binary())
    assert masked("redact").cast(text).values.to_pylist() == [REDACTED, None]
    assert masked("null", DATE).cast(text).values.to_pylist() == [None, None]
    assert masked("null", DATE).arrow == pa.date32()
    assert masked("null", DATE, "string").arrow == pa.string()


def test_bytes_that_are_not_utf8_are_masked_and_not_rejected() -> None:
    for mask in ("hash", "redact", "null"):
        cast = masked(mask).cast(pa.array([b"\xff"], pa.binary()))
        assert cast.rejected is None


def test_masks_pickle() -> None:
    for mask in ("hash", "redact", "null", "pyarrow.compute:utf8_upper"):
        assert pickle.loads(pickle.dumps(masked(mask))) == masked(mask)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user."""
    (tmp_path / "their_masks.py").write_text(
        """
import pyarrow as pa
import pyarrow.compute as pc

def year(dates):
    return pc.cast(pc.year(dates), pa.int32())

def fails(texts):
    raise ValueError(f"cannot mask {texts[0]}")

def shorter(texts):
    return texts.slice(1)

def not_an_array(texts):
    return texts.to_pylist()

def chunked(texts):
    return pa.chunked_array([pc.utf8_upper(texts)])

def unknown(texts):
    return pa.array(["unknown"] * len(texts))

number = 7
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    load.cache_clear()
    yield "their_masks"
    sys.modules.pop("their_masks", None)
    load.cache_clear()


def test_a_function_gets_typed_values_and_null_stays_null(module: str) -> None:
    year = masked(f"{module}:year", DATE, "int")
    assert year.cast(pa.array([b"1970-05-01", None, b"infinity"])).values.to_pylist() == [1970, None, None]
    assert year.cast(pa.array([b"infinity"])).rejected is None, "its text would be in the rejects"
    assert masked(f"{module}:chunked").cast(pa.array([b"a", None])).values.to_pylist() == ["A", None]
    unknown = masked(f"{module}:unknown")
    assert unknown.cast(pa.array([b"a", None])).values.to_pylist() == ["unknown", None]
    assert unknown.cast(pa.array([None], pa.binary())).values.to_pylist() == [None], "whatever is beside it"


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("fails", "it raised ValueError in fails, line 9 of their_masks.py"),
        ("shorter", "it returned 1 values for 2"),
        ("not_an_array", "it returned list"),
        ("year", "it raised"),
        ("missing", "their_masks has no function missing"),
        ("number", "their_masks has no function number"),
    ],
)
def test_a_function_that_fails_is_named_and_no_value_is_shown(module: str, function: str, wrong: str) -> None:
    texts = pa.array([TEXTS[2], b"value"], pa.binary())
    with pytest.raises(FunctionFailed) as caught:
        masked(f"{module}:{function}").cast(texts)
    assert wrong in caught.value.wrong
    assert "größer" not in "".join(traceback.format_exception(caught.value))


def test_a_result_of_another_type_is_refused(module: str) -> None:
    with pytest.raises(FunctionFailed, match="it returned int32, and the column is date32"):
        masked(f"{module}:year", DATE).cast(pa.array([b"2026-01-01"]))


def test_a_module_that_is_not_there_is_refused_with_a_hint() -> None:
    with pytest.raises(FunctionFailed, match="there is no module nowhere") as caught:
        masked("nowhere.at_all:f").cast(pa.array([b"a"]))
    assert "PYTHONPATH" in caught.value.hint
