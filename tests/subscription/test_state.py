"""The table states: every transition that exists, every one that does not, and the hand-over."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from walmere.changelog.plan import should_apply
from walmere.definition import Definition, Layout, PublishedColumn, Shape, ShapedColumn, Shaping
from walmere.errors import InvalidTransition
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.subscription import state as s
from walmere.subscription.state import Phase, TableState

ALL = tuple(Phase)
DEFINITION = Definition(
    (PublishedColumn(1, "id", 23, -1, True), PublishedColumn(3, "v", 1043, 14, False)),
    3,
    Layout(1, 2, 3, 4),
    "pub",
    ((9, 7),),
)
SHAPE = Shape(TableName("public", "t"), (("id", 23, -1), ("w", 25, -1)))
EVENTS: dict[str, tuple[Callable[[TableState], TableState], dict[Phase, Phase]]] = {
    "copy_started": (
        lambda t: s.copy_started(t, Lsn(100)),
        {Phase.INIT: Phase.DATA_SYNC, Phase.DATA_SYNC: Phase.DATA_SYNC},
    ),
    "copy_committed": (lambda t: s.copy_committed(t, DEFINITION, rows=7), {Phase.DATA_SYNC: Phase.FINISHED_COPY}),
    "copy_again": (lambda t: s.copy_again(t, "why"), dict.fromkeys(Phase, Phase.INIT)),
    "redefined": (
        lambda t: s.redefined(t, SHAPE, Lsn(500)),
        {phase: phase for phase in (Phase.FINISHED_COPY, Phase.SYNC_DONE, Phase.READY)},
    ),
    "applied": (
        lambda t: s.applied(t, Lsn(500)),
        {Phase.FINISHED_COPY: Phase.SYNC_DONE, Phase.SYNC_DONE: Phase.READY, Phase.READY: Phase.READY},
    ),
}


def table(phase: Phase, applied: int = 0) -> TableState:
    return TableState(TableName("public", "t"), 16384, phase, Lsn(applied), Lsn(applied))


@pytest.mark.parametrize(("event", "phase"), list(itertools.product(EVENTS, ALL)))
def test_each_event_leads_where_it_should_or_is_refused(event: str, phase: Phase) -> None:
    happen, transitions = EVENTS[event]
    if phase in transitions:
        assert happen(table(phase)).phase is transitions[phase]
    else:
        with pytest.raises(InvalidTransition, match=phase.value):
            happen(table(phase))


def test_a_table_goes_through_all_phases_with_its_positions() -> None:
    t = s.copy_started(TableState(TableName("public", "t"), 1), Lsn(100))
    assert (t.snapshot_lsn, t.applied_lsn, t.phase.copied) == (Lsn(100), INVALID_LSN, False)
    t = s.copy_committed(t, DEFINITION, rows=3, rejects=1)
    assert (t.applied_lsn, t.rows_copied, t.rejects, t.phase.copied) == (Lsn(100), 3, 1, True)
    t = s.applied(t, Lsn(520), rejects=2)
    assert (t.phase, t.applied_lsn, t.rejects) == (Phase.SYNC_DONE, Lsn(520), 2)
    assert s.applied(t, Lsn(600)).rejects == 2
    assert s.applied(t, Lsn(530)).phase is Phase.READY


def test_a_batch_that_ends_before_the_snapshot_changes_nothing() -> None:
    t = table(Phase.FINISHED_COPY, applied=450)
    assert s.applied(t, Lsn(300)) == t


@pytest.mark.parametrize(
    ("phase", "applied", "commit", "expected"),
    [
        (Phase.INIT, 0, 500, False),
        (Phase.DATA_SYNC, 0, 500, False),
        (Phase.FINISHED_COPY, 100, 99, False),  # in the copy
        (Phase.FINISHED_COPY, 100, 100, True),  # begins where the snapshot ended
        (Phase.FINISHED_COPY, 100, 101, True),
        (Phase.SYNC_DONE, 520, 519, False),
        (Phase.SYNC_DONE, 520, 520, True),
        (Phase.READY, 520, 519, False),  # a replay
        (Phase.READY, 520, 900, True),
    ],
)
def test_the_hand_over(phase: Phase, applied: int, commit: int, expected: bool) -> None:
    position = table(phase, applied).position
    assert should_apply(position, Lsn(commit)) is expected
    if position is not None:
        assert should_apply(position, np.array([commit, commit], np.uint64)).tolist() == [expected, expected]


def test_the_log_is_needed_from_the_oldest_position_and_since_the_snapshot_of_a_copy() -> None:
    ready, copying = (
        table(Phase.READY, applied=900),
        TableState(TableName("public", "c"), 2, Phase.DATA_SYNC, snapshot_lsn=Lsn(700)),
    )
    assert s.needed_from([], Lsn(900)) == 900
    assert s.needed_from([ready, table(Phase.INIT)], Lsn(900)) == 900
    assert s.needed_from([ready, copying], Lsn(900)) == 700
    assert s.needed_from([ready, copying, table(Phase.FINISHED_COPY, applied=600)], Lsn(900)) == 600
    assert s.needed_from([ready, s.copy_started(table(Phase.INIT))], Lsn(900)) == INVALID_LSN


@pytest.mark.parametrize("phase", ALL)
def test_a_state_survives_json(phase: Phase) -> None:
    for t in (table(phase), TableState(TableName("a.b", 'odd "name".😀'), 1, phase, Lsn(1), Lsn(2), 3, 4, "broken")):
        assert s.from_json(json.loads(json.dumps(s.to_json(t)))) == t


def test_the_letters_are_those_of_pg_subscription_rel() -> None:
    assert "".join(Phase) == "idfsr"


def test_a_state_of_an_earlier_version_is_read() -> None:
    """`publication_fingerprint` was called `how`."""
    column = PublishedColumn(1, "id", 23, -1, True)
    definition = Definition((column,), 1, Layout(), "all tables")
    known = TableState(TableName("public", "t"), 1, Phase.READY, definition=definition)
    stored = json.loads(json.dumps(s.to_json(known)))
    stored["definition"]["how"] = stored["definition"].pop("publication_fingerprint")
    assert s.from_json(stored) == known


def test_what_a_copy_hides_is_remembered_until_the_next_copy() -> None:
    rules = Shaping(
        (ShapedColumn("v", mask="hash"), ShapedColumn("id", type="bigint")), (("uuid", "binary"),), "f", "d"
    )
    shaped = replace(DEFINITION, shaping=rules)
    started = replace(table(Phase.DATA_SYNC), renamed_from=TableName("public", "other"))
    copied = s.copy_committed(started, shaped, rows=7)
    assert copied.hidden == ((3, "v"),)
    assert s.from_json(json.loads(json.dumps(s.to_json(copied)))) == copied
    for again in (s.copy_again(copied), s.set_aside(copied, "why", 0.0), s.copy_failed(s.copy_again(copied), "why")):
        assert (again.hidden, again.source_table) == (copied.hidden, TableName("public", "other"))
    assert s.evolved(copied, DEFINITION).hidden == ()
    other, elsewhere = TableName("public", "other"), TableName("lake", "other")
    assert s.waiting_for_copy(elsewhere, other, 16384, copied).hidden == copied.hidden
    renamed = s.waiting_for_copy(elsewhere, TableName("public", "new"), 16384, copied)
    assert renamed.hidden == ((3, "public.other.v"),), "other sections match it now: they have to name the column"
