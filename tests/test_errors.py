from __future__ import annotations

import inspect
import json
import pickle

import pytest

from walmere import errors
from walmere.errors import (
    NotApplied,
    ProtocolError,
    SinkConflict,
    SinkUnavailable,
    SlotInUse,
    SourceUnavailable,
    StoreUnavailable,
    TableLocked,
    WalmereError,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, WalmereError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_crosses_a_process_border_unharmed(kind: type[WalmereError]) -> None:
    error = kind("doing", "wrong", "hint")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.doing, again.wrong, again.hint, str(again)) == ("doing", "wrong", "hint", str(error))
    told = errors.from_dict(json.loads(json.dumps(error.to_dict())))
    assert (type(told), str(told)) == (kind, str(error))


def test_a_protocol_error_keeps_its_offset_across_a_process_border() -> None:
    again = pickle.loads(pickle.dumps(ProtocolError("decoding", "it is short", "", 7)))
    assert again.offset == 7
    assert str(again) == "decoding: it is short at offset 7"


def test_an_error_says_what_was_done_what_went_wrong_and_what_to_do() -> None:
    assert str(WalmereError("receiving", "it broke", "mend it")) == "receiving: it broke\n  hint: mend it"
    assert str(WalmereError("receiving", "it broke")) == "receiving: it broke"


def test_only_what_may_pass_by_itself_is_transient() -> None:
    assert {kind for kind in ALL if kind.transient} == {
        SourceUnavailable,
        SlotInUse,
        TableLocked,
        SinkConflict,
        SinkUnavailable,
        StoreUnavailable,
        NotApplied,
    }


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = [line.replace("│", " ") for line in (errors.__doc__ or "").splitlines() if "──" in line]
    depths = [(line.index("──"), line.split("──")[1].split()[0]) for line in drawn]
    assert {name for _, name in depths} == {kind.__name__ for kind in ALL} - {"WalmereError"}
    for index, (depth, name) in enumerate(depths):
        above = [other for where, other in depths[:index] if where < depth]
        parent = getattr(errors, name).__mro__[1].__name__
        assert parent == (above[-1] if above else "WalmereError")
