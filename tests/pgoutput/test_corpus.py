"""What real servers sent is understood, all of it."""

from __future__ import annotations

from itertools import groupby

import pytest

from pgoutput.corpus import captured, lines
from walmere.lsn import Lsn
from walmere.pgoutput import (
    UNCHANGED,
    Begin,
    Binary,
    Commit,
    Delete,
    Insert,
    Kind,
    LogicalMessage,
    Origin,
    Relation,
    RelMap,
    ReplicaIdentity,
    StreamAbort,
    StreamCommit,
    Truncate,
    Type,
    Update,
    XLogData,
    decode,
    decode_frame,
)


def test_every_kind_of_message_and_of_frame_is_in_the_corpus_and_decodes() -> None:
    assert {decode_frame(raw).letter for _, raw in lines()} == {"w", "k"}
    for each in captured():
        assert decode(each.data, streamed=each.streamed) == each.message
    assert {each.message.kind for each in captured()} == set(Kind)


def test_the_corpus_has_every_shape_of_a_message_that_changes_how_it_is_read() -> None:
    messages = [each.message for each in captured()]
    relations = [m for m in messages if isinstance(m, Relation)]
    assert {m.replica_identity for m in relations} == set(ReplicaIdentity)
    assert any(not m.columns for m in relations)
    updates = [m for m in messages if isinstance(m, Update)]
    assert {(m.key is None, m.old is None) for m in updates} == {(True, True), (False, True), (True, False)}
    assert {m.key is None for m in messages if isinstance(m, Delete)} == {True, False}
    values = {type(v) for m in messages if isinstance(m, Insert | Update) for v in m.new}
    assert values == {bytes, Binary, type(None), type(UNCHANGED)}
    assert {m.transactional for m in messages if isinstance(m, LogicalMessage)} == {True, False}
    assert {(m.cascade, m.restart_identity) for m in messages if isinstance(m, Truncate)} == {
        (True, True),
        (True, False),
        (False, False),
    }
    assert {m.abort_lsn is None for m in messages if isinstance(m, StreamAbort)} == {True, False}
    assert Origin(Lsn.parse("16/B374D848"), "po_origin") in messages
    streamed = {each.message.kind for each in captured() if each.streamed}
    assert streamed >= {Kind.RELATION, Kind.TYPE, Kind.INSERT, Kind.UPDATE, Kind.DELETE, Kind.TRUNCATE, Kind.MESSAGE}


def test_a_transaction_sent_whole_ends_where_its_begin_said() -> None:
    begin = None
    for each in captured():
        if isinstance(each.message, Begin):
            begin = each.message
        elif isinstance(each.message, Commit):
            assert begin is not None
            assert each.message.commit_lsn == begin.final_lsn < each.message.end_lsn
            assert each.message.commit_time == begin.commit_time
            begin = None
    assert begin is None


def test_wal_start_is_missing_on_relations_types_and_a_begin_before_an_origin_only() -> None:
    kinds = set()
    for each in captured():
        frame = decode_frame(each.frame)
        assert isinstance(frame, XLogData)
        if not frame.wal_start:
            kinds.add(each.message.kind)
        else:
            assert each.message.kind not in (Kind.RELATION, Kind.TYPE)
    assert kinds == {Kind.RELATION, Kind.TYPE, Kind.BEGIN}


def test_a_domain_comes_with_the_name_of_its_base_type() -> None:
    names = {(m.namespace, m.name) for each in captured() if isinstance(m := each.message, Type)}
    assert names == {("public", "mood"), ("public", "_mood"), ("", "int4")}


@pytest.mark.parametrize("section", sorted({section for section, _ in lines()}))
def test_every_row_finds_the_definition_it_was_sent_under(section: str) -> None:
    relmap, lsn = RelMap(), Lsn(1)
    for each in captured():
        if each.section != section:
            continue
        message = each.message
        match message:
            case Type():
                relmap.update_type(message)
            case Relation():
                relmap.update(message, each.data, lsn, each.stream)
            case StreamCommit():
                relmap.commit(message.xid, message.commit_lsn)
            case StreamAbort():
                relmap.forget(message.xid, message.subxid)
            case Commit():
                lsn = message.end_lsn
            case Insert() | Update():
                columns = relmap.current(message.relation, each.stream).relation.columns
                assert len(message.new) == len(columns)
            case Delete():
                relmap.current(message.relation, each.stream)
            case Truncate():
                for oid in message.relations:
                    relmap.current(oid, each.stream)
            case _:
                pass


def test_the_definition_a_relation_is_sent_again_with_makes_no_new_version() -> None:
    for _, group in groupby(captured(), key=lambda each: each.section):
        relmap, sent, versions = RelMap(), 0, set()
        for each in group:
            if isinstance(each.message, Type):
                relmap.update_type(each.message)
            elif isinstance(each.message, Relation) and each.stream is None:
                version = relmap.update(each.message, each.data, Lsn(1))
                versions.add((version.oid, version.version))
                sent += 1
        assert len(versions) < sent
        assert max(number for _, number in versions) == 2  # item and no_identity are altered, each once
