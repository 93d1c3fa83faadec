"""Bytes → messages → Arrow columns: the logical replication protocol, without any I/O.

    replication    the frame around each message, and the status update
    messages       one class per message of pgoutput
    decode         bytes → one message
    relation       the definitions of each relation, by version
    columns        a block of row messages → Arrow columns

`columns` is not imported here, because it needs NumPy and PyArrow.
"""

from walmere.pgoutput.decode import Decoder, decode
from walmere.pgoutput.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Kind,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    ReplicaIdentity,
    RollbackPrepared,
    RowMessage,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Tuple,
    Type,
    Unchanged,
    Update,
    Value,
)
from walmere.pgoutput.relation import RelationVersion, RelMap
from walmere.pgoutput.replication import Frame, Keepalive, XLogData, decode_frame, standby_status_update

__all__ = [
    "UNCHANGED",
    "Begin",
    "BeginPrepare",
    "Binary",
    "Column",
    "Commit",
    "CommitPrepared",
    "Decoder",
    "Delete",
    "Frame",
    "Insert",
    "Keepalive",
    "Kind",
    "LogicalMessage",
    "Message",
    "Origin",
    "Prepare",
    "RelMap",
    "Relation",
    "RelationVersion",
    "ReplicaIdentity",
    "RollbackPrepared",
    "RowMessage",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "Tuple",
    "Type",
    "Unchanged",
    "Update",
    "Value",
    "XLogData",
    "decode",
    "decode_frame",
    "standby_status_update",
]
