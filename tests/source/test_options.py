"""The options of format `pgoutput`: what is understood, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from walmere.errors import ConfigError
from walmere.lsn import Lsn
from walmere.source.options import SourceOptions, parse, refuse

OWN = {"dsn": "host=db", "publications": "a, b", "slot": "s"}


def test_names_are_taken_whatever_their_case() -> None:
    found = parse({"DIRECTORY": "/log", "table": "s.t", "startinglsn": "0/10", "maxbytespertrigger": "64m"})
    assert found == SourceOptions(Path("/log"), ("s", "t"), starting=Lsn(16), max_bytes=64 << 20)


def test_a_query_that_receives_by_itself_has_a_reader() -> None:
    assert parse(OWN) == SourceOptions(None, None, (), "host=db", ("a", "b"), "s", "pgoutput")
    assert parse({**OWN, "reader": "mine"}).reader == "mine"
    assert parse({"path": "/log"}).reader is None


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("64k", 65536), ("1 GB", 1 << 30), ("2MiB", 2 << 20)])
def test_sizes(text: str, expected: int) -> None:
    assert parse({"path": "/log", "maxBytesPerTrigger": text}).max_bytes == expected


@pytest.mark.parametrize(("text", "expected"), [("orders", ("public", "orders")), ("a.b.c", ("a", "b.c"))])
def test_tables(text: str, expected: tuple[str, str]) -> None:
    assert parse({"path": "/log", "table": text}).table == expected


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"slot": "s", "publications": "p"},
        {"dsn": "host=db", "slot": "s"},
        {"publications": "p", "path": "/log"},
        {"path": "/log", "startingLsn": "now"},
        {"path": "/log", "endingLsn": "latest"},
        {"path": "/log", "maxBytesPerTrigger": "0"},
        {"path": "/log", "maxBytesPerTrigger": "-1"},
        {"path": "/log", "availableNow": "perhaps"},
        {"path": "/log", "reader": "../target"},
        {"path": "/log", "table": ".t"},
        {"path": "/log", "header": "true"},
    ],
)
def test_what_is_not_understood_is_refused_with_a_hint(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(given)
    assert refused.value.hint


def test_options_without_effect_are_refused() -> None:
    given = {"path": "/log", "maxbytespertrigger": "1m"}
    refuse({"path": "/log"}, ("maxBytesPerTrigger",), "streams")
    with pytest.raises(ConfigError, match="option maxBytesPerTrigger is only for streams"):
        refuse(given, ("maxBytesPerTrigger", "availableNow"), "streams")
