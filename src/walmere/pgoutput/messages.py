"""The messages of pgoutput: one class per message, with PostgreSQL's field names.

The letters and the order of the fields are those of "Logical Replication Message Formats" in PostgreSQL's manual and of
`proto.c`. A message of a transaction that is streamed while in progress (protocol 2) has the transaction id of its
*subtransaction* in the last field `xid`. Outside a stream, `xid` is None: the Begin has it.

A tuple is a Python tuple with one value per published column:

    bytes        the type's text output, in UTF-8                                  't'
    Binary       the type's binary (send) output; only with the option binary      'b'
    None         SQL NULL, and in a key tuple every column outside the key         'n'
    UNCHANGED    a TOASTed value that the UPDATE did not touch: it is not sent     'u'

Times are integers, microseconds since the Unix epoch, in a field that ends in `_us`; the property of the same name
without `_us` is a `datetime`. A message can have any 64-bit number there. Outside the range of `datetime`, the property
is the nearest `datetime`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import ClassVar, Final, Literal, TypeAlias

from walmere.lsn import Lsn

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01, the epoch of PostgreSQL, in microseconds since 1970-01-01."""

_INT64_MAX: Final = (1 << 63) - 1
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
_LATEST: Final = datetime.max.replace(tzinfo=UTC)
_EARLIEST_US: Final = (_EARLIEST - _UNIX_EPOCH) // timedelta(microseconds=1)
_LATEST_US: Final = (_LATEST - _UNIX_EPOCH) // timedelta(microseconds=1)


def unix_us(timestamptz: int) -> int:
    """Convert PostgreSQL's microseconds since 2000 to Unix microseconds, limited to 64 bits."""
    return min(timestamptz + POSTGRES_EPOCH_US, _INT64_MAX)


def at(us: int) -> datetime:
    """Convert Unix microseconds to a time in UTC; outside the years 1 to 9999, to the nearest one."""
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
    """`pg_class.relreplident`: which columns of the old row an UPDATE or DELETE sends."""

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
    """The start of a committed transaction."""

    kind: ClassVar[Kind] = Kind.BEGIN
    final_lsn: Lsn  # start of its commit record; equal to commit_lsn of Commit
    commit_time_us: int
    xid: int

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of the transaction."""

    kind: ClassVar[Kind] = Kind.COMMIT
    flags: int  # PostgreSQL defines none yet
    commit_lsn: Lsn  # start of the commit record
    end_lsn: Lsn  # end of the commit record; the LSN to confirm
    commit_time_us: int

    @property
    def commit_time(self) -> datetime:
        return at(self.commit_time_us)


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction arrived at this server by replication. Comes after Begin, or after the first Stream Start."""

    kind: ClassVar[Kind] = Kind.ORIGIN
    commit_lsn: Lsn  # of the commit on the other server
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
        """Whether it is part of the replica identity, so that key tuples have it. With FULL, every column is."""
        return bool(self.flags & 1)


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a table. Comes before its first row, and again when the definition has changed."""

    kind: ClassVar[Kind] = Kind.RELATION
    oid: int
    namespace: str  # empty for pg_catalog
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in. Comes before the Relation that has a column of the type.

    For a domain, the OID is that of the domain, and the name is that of its base type.
    """

    kind: ClassVar[Kind] = Kind.TYPE
    oid: int
    namespace: str  # empty for pg_catalog
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    """A row was inserted."""

    kind: ClassVar[Kind] = Kind.INSERT
    relation: int  # the relation's OID
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """A row was updated. Without key and old, the columns of the replica identity have not changed."""

    kind: ClassVar[Kind] = Kind.UPDATE
    relation: int
    key: Tuple | None  # 'K': the old key, all other columns None
    old: Tuple | None  # 'O': the whole old row, with REPLICA IDENTITY FULL
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A row was deleted. Exactly one of key and old is present."""

    kind: ClassVar[Kind] = Kind.DELETE
    relation: int
    key: Tuple | None
    old: Tuple | None
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """These relations were truncated by one command."""

    kind: ClassVar[Kind] = Kind.TRUNCATE
    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of `pg_logical_emit_message`. If it is not transactional, it is sent between transactions."""

    kind: ClassVar[Kind] = Kind.MESSAGE
    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes = field(repr=False)  # user data, which must not be logged
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The start of a segment of a transaction in progress."""

    kind: ClassVar[Kind] = Kind.STREAM_START
    xid: int  # of the top-level transaction
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The end of a segment. Other segments and whole transactions may come before the next one."""

    kind: ClassVar[Kind] = Kind.STREAM_STOP


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction has committed."""

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
    """A streamed subtransaction was rolled back; if `subxid` is `xid`, the whole transaction was."""

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
    """The start of a prepared transaction. Only sent by a slot with two_phase."""

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
    """The end of a prepared transaction. Its rows count only after Commit Prepared."""

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
    """COMMIT PREPARED: the rows that were sent with this gid are committed."""

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
    """ROLLBACK PREPARED: the rows that were sent with this gid are rolled back."""

    kind: ClassVar[Kind] = Kind.ROLLBACK_PREPARED
    flags: int
    prepare_end_lsn: Lsn  # with prepare_time, identifies the prepare: a gid can be reused
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
    """A streamed transaction was prepared."""

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
