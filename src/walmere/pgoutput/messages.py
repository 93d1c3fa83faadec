"""What pgoutput says: one class per message, with PostgreSQL's own field names.

The letters and the order of the fields are those of "Logical Replication Message Formats" in PostgreSQL's manual and of
`proto.c`. A message that belongs to a transaction streamed while in progress (protocol 2) carries the transaction id of
the *subtransaction* it was done in, as its last field `xid`; outside a stream that is None, because the Begin before it
has said it.

A tuple is a Python tuple with one value per published column:

    bytes        the type's text output, in UTF-8                                  't'
    Binary       the type's binary (send) output; only if binary was asked for     'b'
    None         SQL NULL, and in a key tuple any column that is not of the key    'n'
    UNCHANGED    a TOASTed value that the UPDATE did not touch: it is not sent     'u'

Times are kept as the integer they are, microseconds since the Unix epoch, in a field that ends in `_us`; the property
of the same name without the ending gives a `datetime`. The wire may hold any 64-bit number there, far outside what
`datetime` knows, so the property saturates instead of failing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import ClassVar, Final, Literal, TypeAlias

from walmere.lsn import Lsn

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01, where PostgreSQL's clock begins, in microseconds since 1970-01-01."""

_INT64_MAX: Final = (1 << 63) - 1
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
_LATEST: Final = datetime.max.replace(tzinfo=UTC)
_EARLIEST_US: Final = (_EARLIEST - _UNIX_EPOCH) // timedelta(microseconds=1)
_LATEST_US: Final = (_LATEST - _UNIX_EPOCH) // timedelta(microseconds=1)


def unix_us(timestamptz: int) -> int:
    """PostgreSQL's microseconds since 2000 as Unix microseconds, which must still fit an Arrow int64 column."""
    return min(timestamptz + POSTGRES_EPOCH_US, _INT64_MAX)


def at(us: int) -> datetime:
    """Unix microseconds as a time in UTC; outside the years 1 to 9999, the nearest time that there is."""
    if us <= _EARLIEST_US:
        return _EARLIEST
    return _LATEST if us >= _LATEST_US else _UNIX_EPOCH + timedelta(microseconds=us)


class Kind(StrEnum):
    """The first byte of a message."""

    BEGIN = "B"
    COMMIT = "C"
    ORIGIN = "O"
    RELATION = "R"
    TYPE = "Y"
    INSERT = "I"
    UPDATE = "U"
    DELETE = "D"
    TRUNCATE = "T"
    MESSAGE = "M"
    STREAM_START = "S"
    STREAM_STOP = "E"
    STREAM_COMMIT = "c"
    STREAM_ABORT = "A"
    BEGIN_PREPARE = "b"
    PREPARE = "P"
    COMMIT_PREPARED = "K"
    ROLLBACK_PREPARED = "r"
    STREAM_PREPARE = "p"


class ReplicaIdentity(StrEnum):
    """`pg_class.relreplident`: what an UPDATE or DELETE says about the old row."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


class Unchanged(Enum):
    """The type of UNCHANGED; an enum, so that it stays one object through pickle."""

    UNCHANGED = "u"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Binary:
    """A value in its type's binary format."""

    data: bytes


Value: TypeAlias = bytes | Binary | Literal[Unchanged.UNCHANGED] | None
Tuple: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction follows, whole, because it has committed already."""

    kind: ClassVar[Kind] = Kind.BEGIN
    final_lsn: Lsn  # where its commit record begins; equal to the Commit's commit_lsn
    commit_time_us: int
    xid: int

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of the transaction."""

    kind: ClassVar[Kind] = Kind.COMMIT
    flags: int  # none is defined yet
    commit_lsn: Lsn  # where the commit record begins
    end_lsn: Lsn  # just after the commit record: what to confirm
    commit_time_us: int

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came to this server by replication from elsewhere. Follows Begin, or the first Stream Start."""

    kind: ClassVar[Kind] = Kind.ORIGIN
    commit_lsn: Lsn  # of the commit on that other server
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """One published column of a relation."""

    flags: int  # 1: part of the key
    name: str
    type_oid: int
    type_modifier: int  # atttypmod: length of a varchar, precision and scale of a numeric; -1 is none

    @property
    def is_key(self) -> bool:
        """Part of the replica identity, hence sent in key tuples. With REPLICA IDENTITY FULL, every column is."""
        return bool(self.flags & 1)


@dataclass(frozen=True, slots=True)
class Relation:
    """What a table looks like from here on; comes before its first row and again after every change of it."""

    kind: ClassVar[Kind] = Kind.RELATION
    oid: int
    namespace: str  # empty for pg_catalog
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in; comes before the Relation that has a column of it.

    For a domain, the OID is the domain's but the name is that of its base type, which is how we learn it.
    """

    kind: ClassVar[Kind] = Kind.TYPE
    oid: int
    namespace: str  # empty for pg_catalog
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    """A row came."""

    kind: ClassVar[Kind] = Kind.INSERT
    relation: int  # the relation's OID
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A row changed. Neither key nor old: the replica identity's columns kept their values."""

    kind: ClassVar[Kind] = Kind.UPDATE
    relation: int
    key: Tuple | None  # 'K': the old key, all other columns None
    old: Tuple | None  # 'O': the whole old row, with REPLICA IDENTITY FULL
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A row went. Exactly one of key and old is there."""

    kind: ClassVar[Kind] = Kind.DELETE
    relation: int
    key: Tuple | None
    old: Tuple | None
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """All rows of these relations went, by one command."""

    kind: ClassVar[Kind] = Kind.TRUNCATE
    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """`pg_logical_emit_message`. One that is not transactional stands between transactions."""

    kind: ClassVar[Kind] = Kind.MESSAGE
    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes = field(repr=False)  # the user's data, not for logs
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A segment of a transaction that is still in progress follows."""

    kind: ClassVar[Kind] = Kind.STREAM_START
    xid: int  # of the top-level transaction
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The segment ends; others, and whole transactions, may come before its next one."""

    kind: ClassVar[Kind] = Kind.STREAM_STOP


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The transaction that was streamed has committed."""

    kind: ClassVar[Kind] = Kind.STREAM_COMMIT
    xid: int
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The subtransaction has rolled back; if `subxid` is `xid`, the whole transaction has."""

    kind: ClassVar[Kind] = Kind.STREAM_ABORT
    xid: int
    subxid: int
    abort_lsn: Lsn | None = None  # protocol 4 with streaming = parallel
    abort_time_us: int | None = None

    @property
    def abort_time(self) -> datetime | None:
        return None if self.abort_time_us is None else at(self.abort_time_us)


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """A transaction follows, whole, that is prepared but not committed. The slot must be two_phase."""

    kind: ClassVar[Kind] = Kind.BEGIN_PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str  # the name given to PREPARE TRANSACTION

    @property
    def prepare_time(self) -> datetime:
        return at(self.prepare_time_us)


@dataclass(frozen=True, slots=True)
class Prepare:
    """The end of the prepared transaction: its rows wait for Commit Prepared."""

    kind: ClassVar[Kind] = Kind.PREPARE
    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str

    @property
    def prepare_time(self) -> datetime:
        return at(self.prepare_time_us)


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED: the rows sent before under this gid count now."""

    kind: ClassVar[Kind] = Kind.COMMIT_PREPARED
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int
    xid: int
    gid: str

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED: the rows sent before under this gid never were."""

    kind: ClassVar[Kind] = Kind.ROLLBACK_PREPARED
    flags: int
    prepare_end_lsn: Lsn  # with prepare_time, tells which prepare: a gid may be used again
    rollback_end_lsn: Lsn
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str

    @property
    def prepare_time(self) -> datetime:
        return at(self.prepare_time_us)

    @property
    def rollback_time(self) -> datetime:
        return at(self.rollback_time_us)


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """The transaction that was streamed is prepared: what Prepare is for one sent whole."""

    kind: ClassVar[Kind] = Kind.STREAM_PREPARE
    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str

    @property
    def prepare_time(self) -> datetime:
        return at(self.prepare_time_us)


RowMessage: TypeAlias = Insert | Update | Delete
Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
