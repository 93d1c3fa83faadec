"""The definitions of each relation, current and past: PostgreSQL's LogicalRepRelMap, with versions.

PostgreSQL's subscriber applies rows as they arrive, so it needs only the newest definition. Walmere decodes them later,
in another process. So every definition of a relation has a version number, and a row is decoded with the version that
was current when it arrived. The rules follow pgoutput (`get_rel_sync_entry`, `streamed_txns`):

- walsender sends a definition again after each reconnect, after a TRUNCATE, and in other cases without a change. An
  equal definition is the same version. After a reconnect, walsender starts *before* the end of the change log and sends
  the definitions of that time. So a definition is compared first with the version at its LSN.
- A definition inside a stream is valid only for that transaction, which may have altered the table and may roll back.
  After Stream Commit (or Commit Prepared) it is valid for all, because the server does not send it again.
- When a subtransaction rolls back, the server sends all definitions of the stream again with the next row. So the
  definitions of the subtransaction are dropped, and its DDL has no effect.
- A transaction that is prepared without a stream (Begin Prepare) is not a stream. The server does not repeat its
  definitions, even if it is rolled back: pass no xid for it.

The xid of these methods is that of the top-level transaction, as Stream Start has it. The subtransaction's is in the
message.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, replace
from typing import NamedTuple

from walmere.errors import ProtocolError
from walmere.lsn import Lsn
from walmere.pgoutput.messages import Relation, Type


@dataclass(frozen=True, slots=True)
class RelationVersion:
    """One definition of a relation."""

    oid: int
    version: int  # 1, 2, … per relation; a number is never reused, and some may be missing
    lsn: Lsn  # valid from this LSN on
    relation: Relation
    raw: bytes  # the message, for the manifest
    types: tuple[Type, ...] = ()  # types of its columns that are not built in, by OID

    def same(self, relation: Relation, types: tuple[Type, ...]) -> bool:
        """Whether the definition is equal. The xid of the message is ignored."""
        return self.types == types and self.relation == replace(relation, xid=self.relation.xid)


class _StreamedDefinition(NamedTuple):
    """A definition inside a stream."""

    when: int
    subxid: int | None
    version: RelationVersion


def _in_order(version: RelationVersion) -> tuple[Lsn, int]:
    return version.lsn, version.version


class RelMap:
    """The definitions of all relations seen."""

    def __init__(self) -> None:
        self._types: dict[int, Type] = {}
        self._versions: dict[int, dict[int, RelationVersion]] = {}  # all, for `get`
        self._next: dict[int, int] = {}  # the next version number; kept apart, so that no number is reused
        self._history: dict[int, list[RelationVersion]] = {}  # valid for all transactions, ordered by LSN
        self._current: dict[int, tuple[int, RelationVersion]] = {}  # with the clock of its message
        self._streams: dict[int, dict[int, list[_StreamedDefinition]]] = {}  # by top-level xid, by OID
        self._clock = 0

    def update_type(self, message: Type) -> None:
        """Add a Type message. The server sends it again before every Relation that needs it."""
        self._types[message.oid] = replace(message, xid=None)

    def update(self, message: Relation, raw: bytes, lsn: Lsn, xid: int | None = None) -> RelationVersion:
        """Add a Relation message. Returns its version, a new one if the definition is new."""
        oid = message.oid
        types = self._types_of(message)
        self._clock += 1
        streamed = self._streams.get(xid, {}).get(oid, []) if xid is not None else []
        known = [entry.version for entry in streamed[-1:]]
        known += [v for v in (self._at(oid, lsn), self._newest(oid)) if v is not None]
        version = next((v for v in known if v.same(message, types)), None)
        if version is None:
            number = self._next.get(oid, 1)
            version = RelationVersion(oid, number, lsn, message, bytes(raw), types)
            self._keep(version)
            if xid is None:
                insort(self._history.setdefault(oid, []), version, key=_in_order)
        if xid is None:
            self._current[oid] = (self._clock, version)
        else:
            entries = self._streams.setdefault(xid, {}).setdefault(oid, [])
            entries.append(_StreamedDefinition(self._clock, message.xid, version))
        return version

    def commit(self, xid: int, lsn: Lsn | None = None) -> tuple[RelationVersion, ...]:
        """Make the definitions of a stream that committed at `lsn` valid for all. Returns the versions that are new."""
        new: dict[tuple[int, int], RelationVersion] = {}
        for oid, entries in self._streams.pop(xid, {}).items():
            history = self._history.setdefault(oid, [])
            for entry in entries:
                version = self.get(oid, entry.version.version)
                if all(other.version != version.version for other in history):
                    version = replace(version, lsn=version.lsn if lsn is None else lsn)
                    self._keep(version)
                    insort(history, version, key=_in_order)
                    new[oid, version.version] = version
                # A later message of another transaction is newer, even if this one commits after it.
                if oid not in self._current or self._current[oid][0] < entry.when:
                    self._current[oid] = (entry.when, version)
        return tuple(new.values())

    def forget(self, xid: int, subxid: int | None = None) -> None:
        """Drop the definitions of a subtransaction; without `subxid`, or if it is `xid`, of the whole transaction."""
        whole = subxid is None or subxid == xid
        stream = self._streams.get(xid, {})
        for oid, entries in stream.items():
            stream[oid] = kept = [] if whole else [entry for entry in entries if entry.subxid != subxid]
            needed = [entry.version for entry in kept] + self._history.get(oid, [])
            for number in {entry.version.version for entry in entries} - {version.version for version in needed}:
                del self._versions[oid][number]
        if whole:
            self._streams.pop(xid, None)

    def add(self, version: RelationVersion) -> None:
        """Restore a version from the manifest of the change log. The order does not matter."""
        oid = version.oid
        if version.version in self._versions.get(oid, {}):
            return
        for each in version.types:
            self.update_type(each)
        self._keep(version)
        insort(self._history.setdefault(oid, []), version, key=_in_order)
        self._current[oid] = (0, self._history[oid][-1])

    def current(self, oid: int, xid: int | None = None) -> RelationVersion:
        """The version for a row that arrives now. `xid`: the row is inside that stream."""
        if xid is not None:
            streamed = self._streams.get(xid, {}).get(oid)
            if streamed:
                return streamed[-1].version
        if oid not in self._current:
            raise self._unknown(oid, "there was no Relation message for it")
        return self._current[oid][1]

    def as_of(self, oid: int, lsn: Lsn) -> RelationVersion:
        """The newest version that is valid at the LSN."""
        version = self._at(oid, lsn)
        if version is None:
            raise self._unknown(oid, f"there was no Relation message for it before {lsn}")
        return version

    def get(self, oid: int, version: int) -> RelationVersion:
        """A version by its number, also one of a stream that has not committed."""
        try:
            return self._versions[oid][version]
        except KeyError:
            raise self._unknown(oid, f"there is no version {version} of it") from None

    def _types_of(self, relation: Relation) -> tuple[Type, ...]:
        oids = sorted({column.type_oid for column in relation.columns})
        return tuple(self._types[oid] for oid in oids if oid in self._types)

    def _keep(self, version: RelationVersion) -> None:
        self._versions.setdefault(version.oid, {})[version.version] = version
        self._next[version.oid] = max(self._next.get(version.oid, 1), version.version + 1)

    def _at(self, oid: int, lsn: Lsn) -> RelationVersion | None:
        history = self._history.get(oid, [])
        index = bisect_right(history, lsn, key=lambda version: version.lsn)
        return history[index - 1] if index else None

    def _newest(self, oid: int) -> RelationVersion | None:
        history = self._history.get(oid)
        return history[-1] if history else None

    def _unknown(self, oid: int, why: str) -> ProtocolError:
        return ProtocolError(
            f"looking up relation {oid}", why, "read the change log or the stream from an earlier point"
        )
