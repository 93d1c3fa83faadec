"""Versions of relations: repeated, altered, streamed, rolled back, restored."""

from __future__ import annotations

import pickle

import pytest

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput import Column, Relation, RelationVersion, RelMap, ReplicaIdentity, Type

OID, MOOD = 16384, 16400


def table(*columns: str, xid: int | None = None, type_oid: int = 25) -> Relation:
    made = tuple(Column(0, name, type_oid, -1) for name in columns)
    return Relation(OID, "public", "t", ReplicaIdentity.DEFAULT, made, xid)


def raw(message: Relation) -> bytes:
    return ",".join(column.name for column in message.columns).encode()


def say(relmap: RelMap, lsn: int, *columns: str, xid: int | None = None, subxid: int | None = None) -> RelationVersion:
    message = table(*columns, xid=subxid or xid)
    return relmap.update(message, raw(message), Lsn(lsn), xid)


def test_the_first_definition_is_version_1_and_keeps_what_it_came_with() -> None:
    relmap = RelMap()
    version = say(relmap, 10, "a")
    assert version == RelationVersion(OID, 1, Lsn(10), table("a"), b"a")
    assert relmap.current(OID) is version
    assert relmap.get(OID, 1) is version
    assert pickle.loads(pickle.dumps(version)) == version


def test_the_same_definition_again_is_the_same_version() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    assert say(relmap, 20, "a") is first


def test_another_definition_is_the_next_version_and_so_is_going_back_to_the_first() -> None:
    relmap = RelMap()
    versions = [say(relmap, 10, "a"), say(relmap, 20, "a", "b"), say(relmap, 30, "a")]
    assert [v.version for v in versions] == [1, 2, 3]
    assert relmap.current(OID) is versions[2]
    assert [relmap.as_of(OID, Lsn(n)).version for n in (10, 19, 20, 29, 30, 99)] == [1, 1, 2, 2, 3, 3]
    assert relmap.get(OID, 2) is versions[1]


@pytest.mark.parametrize(
    "changed",
    [
        Relation(OID, "other", "t", ReplicaIdentity.DEFAULT, (Column(0, "a", 25, -1),)),
        Relation(OID, "public", "renamed", ReplicaIdentity.DEFAULT, (Column(0, "a", 25, -1),)),
        Relation(OID, "public", "t", ReplicaIdentity.FULL, (Column(0, "a", 25, -1),)),
        Relation(OID, "public", "t", ReplicaIdentity.DEFAULT, (Column(1, "a", 25, -1),)),
        Relation(OID, "public", "t", ReplicaIdentity.DEFAULT, (Column(0, "a", 1043, -1),)),
        Relation(OID, "public", "t", ReplicaIdentity.DEFAULT, (Column(0, "a", 25, 14),)),
    ],
)
def test_any_part_of_a_definition_makes_it_another(changed: Relation) -> None:
    relmap = RelMap()
    say(relmap, 10, "a")
    assert relmap.update(changed, b"", Lsn(20)).version == 2


def test_what_the_server_sends_again_from_an_earlier_point_is_known() -> None:
    relmap = RelMap()
    first, second = say(relmap, 10, "a"), say(relmap, 20, "a", "b")
    assert say(relmap, 15, "a") is first
    assert relmap.current(OID) is first  # the rows that come now are of that time
    assert say(relmap, 20, "a", "b") is second
    assert relmap.current(OID) is second


def test_the_newest_definition_is_known_even_at_an_lsn_before_it() -> None:
    relmap = RelMap()
    say(relmap, 10, "a")
    second = say(relmap, 20, "a", "b")
    assert say(relmap, 5, "a", "b") is say(relmap, 15, "a", "b") is second


def test_an_unknown_relation_is_named() -> None:
    relmap = RelMap()
    with pytest.raises(ProtocolError, match="16384"):
        relmap.current(OID)
    with pytest.raises(ProtocolError, match="16384"):
        relmap.get(OID, 1)
    say(relmap, 10, "a")
    with pytest.raises(ProtocolError, match="16384"):
        relmap.as_of(OID, Lsn(9))
    with pytest.raises(ProtocolError, match="no version 2"):
        relmap.get(OID, 2)


def test_a_streamed_definition_holds_in_its_transaction_only_until_it_commits() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    streamed = say(relmap, 20, "a", "b", xid=700)
    assert relmap.current(OID, 700) is streamed
    assert relmap.current(OID) is relmap.current(OID, 701) is first
    assert relmap.as_of(OID, Lsn(99)) is first
    assert relmap.get(OID, 2) is streamed  # its rows are in the log already
    (committed,) = relmap.commit(700, Lsn(50))
    assert committed == RelationVersion(OID, 2, Lsn(50), table("a", "b", xid=700), b"a,b")
    assert relmap.current(OID) is relmap.as_of(OID, Lsn(50)) is relmap.get(OID, 2) is committed
    assert relmap.as_of(OID, Lsn(49)) is first
    assert say(relmap, 60, "a", "b") is committed


def test_a_streamed_definition_that_is_known_makes_no_new_version() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    assert say(relmap, 20, "a", xid=700, subxid=705) is first
    assert relmap.commit(700, Lsn(30)) == ()
    assert relmap.current(OID) is first


def test_a_rolled_back_stream_leaves_nothing_and_its_number_is_not_used_again() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    say(relmap, 20, "a", "b", xid=700)
    relmap.forget(700)
    assert relmap.current(OID, 700) is relmap.current(OID) is first
    with pytest.raises(ProtocolError):
        relmap.get(OID, 2)
    assert say(relmap, 30, "a", "c").version == 3
    relmap.forget(999)
    assert relmap.commit(999) == ()


def test_a_rolled_back_savepoint_drops_what_it_said_and_keeps_the_rest() -> None:
    relmap = RelMap()
    say(relmap, 10, "a")
    kept = say(relmap, 20, "a", "b", xid=700)
    say(relmap, 21, "a", "b", "gone", xid=700, subxid=701)
    assert len(relmap.current(OID, 700).relation.columns) == 3
    relmap.forget(700, 701)
    assert relmap.current(OID, 700) is kept
    with pytest.raises(ProtocolError):
        relmap.get(OID, 3)
    assert say(relmap, 22, "a", "b", xid=700, subxid=702) is kept  # the server says it again
    assert [v.version for v in relmap.commit(700, Lsn(30))] == [2]


def test_going_back_inside_a_stream_to_what_holds_for_all_is_seen() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    say(relmap, 20, "a", "b", xid=700)
    assert say(relmap, 21, "a", xid=700) is first
    assert relmap.current(OID, 700) is first
    assert [v.version for v in relmap.commit(700, Lsn(30))] == [2]
    assert relmap.current(OID).relation.columns == first.relation.columns


def test_what_was_said_to_all_after_the_stream_said_it_stays_current() -> None:
    relmap = RelMap()
    say(relmap, 10, "a")
    say(relmap, 20, "a", "b", xid=700)
    later = say(relmap, 30, "a", "c")
    relmap.commit(700, Lsn(40))
    assert relmap.current(OID) is later


def test_a_forgotten_stream_does_not_take_a_version_that_holds_for_all() -> None:
    relmap = RelMap()
    first = say(relmap, 10, "a")
    say(relmap, 20, "a", xid=700)
    relmap.forget(700, 700)
    assert relmap.current(OID) is relmap.get(OID, 1) is first


def test_a_version_has_the_types_its_columns_need_and_no_others() -> None:
    relmap = RelMap()
    relmap.update_type(Type(MOOD, "public", "mood", 700))
    relmap.update_type(Type(MOOD + 1, "public", "other"))
    message = table("a", "b", type_oid=MOOD)
    version = relmap.update(message, b"", Lsn(10))
    assert version.types == (Type(MOOD, "public", "mood"),)
    relmap.update_type(Type(MOOD, "public", "mood"))
    assert relmap.update(message, b"", Lsn(20)) is version
    relmap.update_type(Type(MOOD, "public", "renamed"))
    assert relmap.update(message, b"", Lsn(30)).version == 2


def test_versions_restored_in_any_order_are_as_they_were() -> None:
    relmap = RelMap()
    relmap.update_type(Type(MOOD, "public", "mood"))
    message = table("a", type_oid=MOOD)
    versions = [relmap.update(message, b"", Lsn(10)), say(relmap, 20, "a", "b"), say(relmap, 30, "a")]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0, 0]):
        restored = RelMap()
        for index in order:
            restored.add(versions[index])
        assert [restored.get(OID, n) for n in (1, 2, 3)] == versions
        assert restored.current(OID) is versions[2]
        assert restored.as_of(OID, Lsn(25)) is versions[1]
        assert say(restored, 40, "a") is versions[2]
        assert restored.update(message, b"", Lsn(15)) is versions[0]
        assert say(restored, 50, "new").version == 4
