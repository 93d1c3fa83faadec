"""What each relation looks like, and looked like: PostgreSQL's LogicalRepRelMap, with a memory.

PostgreSQL's subscriber applies rows as they come and so needs only the newest definition. We decode them later, perhaps
in another process, so every definition gets a version number per relation, and a row is decoded with the version that
was current when it came. The rules follow what pgoutput does on its side (`get_rel_sync_entry`, `streamed_txns`):

- walsender sends a definition again after each reconnect, after a TRUNCATE, and after much else that did not change it.
  The same definition is the same version. After a reconnect it also starts somewhat *before* the end of what we have,
  and then sends the definitions of that time: so "the same" is asked first of the version at that LSN.
- A definition sent inside a stream holds for that transaction only, which may have altered the table and may still roll
  back. Stream Commit (or Commit Prepared) makes it hold for all, because from then on the server takes it as sent.
- When a subtransaction rolls back, the server forgets what it sent in the whole stream, and sends it again with the
  next row. So nothing is lost by dropping what the subtransaction had said, and its DDL must not leak.
- A transaction prepared whole (Begin Prepare) is not a stream. What is said in it, the server takes as sent at once,
  and does not repeat even if it is rolled back: give no xid for it.

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
    version: int  # 1, 2, … per relation; a number is never used for another definition, though some may be missing
    lsn: Lsn  # from where on it holds
    relation: Relation
    raw: bytes  # the message as it came, for the manifest
    types: tuple[Type, ...] = ()  # of its columns whose types are not built in, by OID

    def same(self, relation: Relation, types: tuple[Type, ...]) -> bool:
        """Equal in all that a reader of rows could notice; the transaction that says it is not part of it."""
        return self.types == types and self.relation == replace(relation, xid=self.relation.xid)


class _Said(NamedTuple):
    """A definition as it was said inside a stream."""

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
        self._next: dict[int, int] = {}  # apart from _versions, so that a number forgotten is not given out again
        self._history: dict[int, list[RelationVersion]] = {}  # those that hold for all, ordered by LSN
        self._current: dict[int, tuple[int, RelationVersion]] = {}  # with when it was said
        self._streams: dict[int, dict[int, list[_Said]]] = {}  # by top-level xid, by OID
        self._clock = 0

    def update_type(self, message: Type) -> None:
        """A Type message came. The server repeats it before every Relation that needs it."""
        self._types[message.oid] = replace(message, xid=None)

    def update(self, message: Relation, raw: bytes, lsn: Lsn, xid: int | None = None) -> RelationVersion:
        """A Relation message came: the version it stands for, a new one if the definition is not known yet."""
        oid = message.oid
        types = self._types_of(message)
        self._clock += 1
        said = self._streams.get(xid, {}).get(oid, []) if xid is not None else []
        known = [entry.version for entry in said[-1:]]
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
            entries.append(_Said(self._clock, message.xid, version))
        return version

    def commit(self, xid: int, lsn: Lsn | None = None) -> tuple[RelationVersion, ...]:
        """The stream has committed, at `lsn`: what it said holds for all. Returns the versions that are new by that."""
        published: dict[tuple[int, int], RelationVersion] = {}
        for oid, entries in self._streams.pop(xid, {}).items():
            history = self._history.setdefault(oid, [])
            for entry in entries:
                version = self.get(oid, entry.version.version)
                if all(other.version != version.version for other in history):
                    version = replace(version, lsn=version.lsn if lsn is None else lsn)
                    self._keep(version)
                    insort(history, version, key=_in_order)
                    published[oid, version.version] = version
                # What another transaction said later is newer, though this one commits after it.
                if oid not in self._current or self._current[oid][0] < entry.when:
                    self._current[oid] = (entry.when, version)
        return tuple(published.values())

    def forget(self, xid: int, subxid: int | None = None) -> None:
        """Stream Abort of the subtransaction; without one, or if it is the transaction itself, of all of it."""
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
        """Restore a version, from the manifest of the change log; in any order."""
        oid = version.oid
        if version.version in self._versions.get(oid, {}):
            return
        for each in version.types:
            self.update_type(each)
        self._keep(version)
        insort(self._history.setdefault(oid, []), version, key=_in_order)
        self._current[oid] = (0, self._history[oid][-1])

    def current(self, oid: int, xid: int | None = None) -> RelationVersion:
        """The version a row that comes now is in; `xid` if it comes inside a stream."""
        if xid is not None:
            said = self._streams.get(xid, {}).get(oid)
            if said:
                return said[-1].version
        if oid not in self._current:
            raise self._unknown(oid, "no Relation message has come for it")
        return self._current[oid][1]

    def as_of(self, oid: int, lsn: Lsn) -> RelationVersion:
        """The newest version that holds at the LSN."""
        version = self._at(oid, lsn)
        if version is None:
            raise self._unknown(oid, f"no Relation message has come for it before {lsn}")
        return version

    def get(self, oid: int, version: int) -> RelationVersion:
        """That very version, also one of a stream that has not committed."""
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
            f"looking up relation {oid}", why, "the change log or the stream was joined after that message"
        )
