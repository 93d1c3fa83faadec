"""The work of one task of a batch, as it is pickled and sent to the task."""

from __future__ import annotations

from dataclasses import dataclass

from walmere.apply.parts import Part
from walmere.changelog.plan import Blocks, TwoPhase
from walmere.definition import MESSAGES_OID, Shape, Shaping
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import Identity, TableName
from walmere.types import PgType


@dataclass(frozen=True, slots=True)
class ApplyJob:
    """What one task applies to one table."""

    oid: int
    target: TableName
    shape: Shape  # that the target has, with the name at the source
    blocks: Blocks
    types: dict[int, PgType]
    end_lsn: Lsn
    partial: bool  # see Definition
    identity: Identity | None  # of a partitioned table, as its leaves have it
    commits: bool  # False: it stages a part of the batch, and the driver commits all parts
    part: Part | None  # of the changes, by key; None: all changes of `blocks`
    version: int | None  # see TableState
    version_lsn: Lsn
    two_phase: bool = False  # its blocks belong to `Batch.two_phase`
    shaping: Shaping | None = None  # see Definition

    @property
    def of_messages(self) -> bool:
        """Whether the table is that of logical messages."""
        return self.oid == MESSAGES_OID


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch itself. Every plan has one, even if no table has changes."""

    end_lsn: Lsn
    commit_time: int | None
    tables: tuple[int, ...]  # that take part: those whose copy was committed when the batch was planned
    log_start: Lsn = INVALID_LSN  # where the log begins
    not_in_log: tuple[int, ...] = ()  # tables that need changes which the log no longer has
    skip: Lsn | None = None  # leave out the transaction with this commit LSN
    two_phase: TwoPhase | None = None  # what the batch ends with
