"""Whether a table of the target is where it was left, and files of the state that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from walmere.apply.standing import compare
from walmere.errors import ChangeLogError, StateDamaged
from walmere.ledger.entry import Entry
from walmere.ledger.file import Ledger
from walmere.lsn import INVALID_LSN, Lsn
from walmere.owner import Owner
from walmere.sinks.base import Standing
from walmere.source.feed import Feed, SourceServer
from walmere.subscription.progress import TARGET, SinkPositions
from walmere.subscription.requests import resync
from walmere.subscription.tables import Tables

SHOP = Owner("shop", "7000000000000000000", 16384)


def found(version: int, lsn: int | None) -> Standing:
    return Standing(version, None if lsn is None else Lsn(lsn), None, ())


@pytest.mark.parametrize(
    ("version", "its", "others", "expected"),
    [
        (7, found(7, 100), None, "fine"),
        (7, found(9, 120), None, "fine"),  # in front, by commits of ours
        (None, found(3, 50), "anything", "fine"),  # recorded by an earlier version of Walmere
        (7, found(7, 90), None, Lsn(90)),  # the last commit was emptied
        (7, found(6, 90), None, Lsn(90)),  # or deleted
        (7, found(9, 90), None, Lsn(90)),
        (7, found(2, None), None, "copy"),
        (7, found(2, 0), None, "copy"),
        (7, found(6, 100), None, "copy"),
        (7, found(8, 100), "version 8, RESTORE", "copy"),
        (7, None, None, "copy"),
    ],
)
def test_a_table_is_compared_with_what_was_recorded(
    version: int | None, its: Standing | None, others: str | None, expected: Lsn | str
) -> None:
    behind = compare(version, Lsn(100), its, lambda _, __: others)
    if expected == "fine":
        assert behind is None
    else:
        assert behind is not None
        assert behind.apply_from == (None if expected == "copy" else expected)


def test_a_table_that_lost_commits_is_taken_out_of_the_points_that_have_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in (1, 2, 3, 4):
        ledger.append(Entry(Lsn(100 * number), None, {"public.a": number, "public.b": 1}))
    assert ledger.remove_table("public.a", Lsn(300), 2)
    assert [dict(each.versions) for each in Ledger(tmp_path).entries()] == [
        {"public.a": 1, "public.b": 1},
        {"public.a": 2, "public.b": 1},
        {"public.b": 1},
        {"public.b": 1},
    ]
    assert ledger.remove_table("public.b", Lsn(100), 1)
    assert not ledger.remove_table("public.b", Lsn(100), 1)
    ledger.append(Entry(Lsn(500), None, {"public.a": 3, "public.b": 2}))
    assert [sorted(each.versions) for each in Ledger(tmp_path).entries()][1:] == [
        ["public.a"],
        [],
        [],
        ["public.a", "public.b"],
    ]


def test_owners_are_the_same_by_name_system_and_database() -> None:
    assert SHOP.same(Owner.from_json(SHOP.to_json()))
    assert SHOP.same(Owner("shop", SHOP.system_identifier, 0)), "a log of an earlier version does not know the OID"
    for other in (Owner("s", SHOP.system_identifier, 16384), Owner("shop", "7", 16384), Owner("shop", "7", 5)):
        assert not SHOP.same(other)
    for text in ("", "nonsense", "[]", "{}", b"\xff"):
        assert not SHOP.same(Owner.from_json(text))


def _feed(directory: Path) -> object:
    return Feed(SourceServer.of("host=nowhere", ("pub",), "slot"), directory, "query")


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"\xff\xfe\x00", b"{", b"7", b'{"other": 1}'], ids=repr)
@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("tables.json", Tables),
        ("positions/query-report.json", lambda directory: SinkPositions(directory).applied()),
        ("positions/target.json", lambda directory: SinkPositions(directory).positions()),
        ("resync/1.json", lambda directory: resync.take(directory, Tables(directory))),
        ("feed.json", _feed),
        ("ledger.jsonl", lambda directory: Ledger(directory).last()),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(
    tmp_path: Path, file: str, read: Callable[[Path], object], content: bytes
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    if file == "ledger.jsonl" and not content:
        assert read(tmp_path) is None
        return
    with pytest.raises(ChangeLogError, match=file.rpartition("/")[2]) as caught:
        read(tmp_path)
    assert caught.value.hint
    assert "\n" not in caught.value.wrong


def test_the_position_of_the_target_is_repaired_and_that_of_a_query_is_not_guessed(tmp_path: Path) -> None:
    positions = SinkPositions(tmp_path)
    assert positions.repair(TARGET, INVALID_LSN), "it is new"
    positions.advance(TARGET, Lsn(100))
    assert not positions.repair(TARGET, Lsn(50))
    (tmp_path / "positions" / "target.json").write_bytes(b"\xff")
    with pytest.raises(StateDamaged, match="walmere run"):
        positions.applied()
    assert positions.repair(TARGET, Lsn(50))
    assert positions.applied() == Lsn(50)
