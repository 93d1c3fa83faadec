"""The regular look at the source's catalogs: which tables the publications have now, and what was altered about them.

Most of what happens to a table is in its stream. What is not is found here: tables that came or went, publications that
were altered, partitions that were attached or detached, rows that were written again, and columns of a table of which
no row has come since. The look locks no table, so one that somebody has locked keeps nobody from seeing the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from walmere.changelog.assembly import HEARTBEAT
from walmere.config import Source
from walmere.definition import MESSAGES_OID, Definition, Layout, Shape
from walmere.errors import ConfigError, SourceError
from walmere.lsn import Lsn
from walmere.names import Identity, TableName
from walmere.publisher import catalog
from walmere.publisher.catalog import PublishedTable, may_have_come_with_rows
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.table import columns_of
from walmere.subscription import state
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables


@dataclass(frozen=True, slots=True)
class _Altered:
    """A definition that the catalogs have and the target has not; the ALTER is before this position."""

    shape: Shape
    lsn: Lsn


class Discovery:
    """Looks at the catalogs for one subscription."""

    def __init__(self, source: Source, tables: Tables, *, gather: bool = False) -> None:
        self._source = source
        self._tables = tables
        self._gather = gather
        self._altered: dict[int, _Altered] = {}
        self._seen: dict[int, PublishedTable] = {}
        self.changed: set[int] = set()
        """Tables that wait for a copy and were altered since the look before: a copy that was refused may help now."""

    @property
    def altered_lsn(self) -> Lsn | None:
        """Where all tables have to be applied to, so that the definitions which the catalogs have can be taken on."""
        return max((each.lsn for each in list(self._altered.values())), default=None)

    def refresh(self) -> None:
        """Take in what the publications publish now, and what was altered about their tables."""
        with (
            closing(connect(self._source, "walmere launcher")) as connection,
            translate_errors(self._source, "reading catalogs"),
        ):
            catalog.set_timeouts(connection)
            catalog.require_publications(connection, self._source.publications)
            published = catalog.published_tables(connection, self._source.publications, self._gather)
            now = {each.oid: each for each in published}
            changes: dict[int, Callable[[TableState], TableState]] = {}
            for known in [each for each in self._tables if each.published and not each.of_messages]:
                its = now.get(known.oid)
                if its is None or known.table != (its.schema, its.name):
                    changes[known.oid] = state.unpublished
                elif (change := self._change(connection, known, its)) is not None:
                    changes[known.oid] = change
        waiting = {each.oid for each in self._tables if each.waits_for_copy}
        self.changed |= {oid for oid in waiting & self._seen.keys() & now.keys() if self._seen[oid] != now[oid]}
        self._seen = now
        if changes:
            self._tables.change(changes)
        self._altered = {oid: each for oid, each in self._altered.items() if oid in now and oid not in changes}
        messages = self._tables.get(MESSAGES_OID)
        require_other_name(None if messages is None else messages.table, ((its.schema, its.name) for its in published))
        new = [TableState(TableName(its.schema, its.name), oid) for oid, its in now.items() if oid not in self._tables]
        if new:
            self._tables.put(*new)

    def _change(
        self, connection: Connection, known: TableState, its: PublishedTable
    ) -> Callable[[TableState], TableState] | None:
        had = known.definition
        if had is None:
            return None
        change: Callable[[TableState], TableState] | None
        if known.waits_for_copy:
            change = state.copy_again if _is_altered(had, its) else None
        else:
            change = _after_a_look(connection, had, its)
        if change is None and known.follows and its.layout.shape != had.layout.shape:
            change = self._take_on(connection, known, had, its)
        else:
            self._altered.pop(known.oid, None)  # the stream was faster, or the table was altered back
        return None if change is None else functools.partial(_unless_moved, had, change)

    def _take_on(
        self, connection: Connection, known: TableState, had: Definition, its: PublishedTable
    ) -> Callable[[TableState], TableState] | None:
        """For a table with other columns than its target, of which no row has come yet: nobody may wait for one.

        What was committed before the ALTER has the old columns. So the table is applied up to a position after it; if
        the stream has not come to the new definition by then, the target takes on the one that the catalogs have.
        """
        shape = replace(had, columns=columns_of(connection, known.oid, its.columns)).shape(known.table)
        if shape == had.shape(known.table):
            # nothing that is published: only the record of what the table looks like is renewed
            return lambda now: replace(now, definition=replace(had, layout=its.layout, leaves=its.leaves, xid=its.xid))
        noticed = self._altered.get(known.oid)
        if noticed is not None and noticed.shape == shape:
            return functools.partial(_await, shape) if known.applied_lsn >= noticed.lsn else None
        # asked after the catalogs were, so that the ALTER which they show is before it
        self._altered[known.oid] = _Altered(shape, catalog.insert_position(connection))
        with suppress(SourceError), translate_errors(self._source, "moving the stream on"):  # not possible on a standby
            catalog.emit_message(connection, HEARTBEAT)
            catalog.push_wal(connection)
        return None


def require_other_name(messages: TableName | None, tables: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if the table of logical messages has the name of a table of the source."""
    if messages is not None and messages in set(tables):
        raise ConfigError(
            "creating the table of logical messages",
            f"target.messages is {messages}, which is a table of the source",
            "choose another name for target.messages",
        )


def identity_of(its: PublishedTable) -> Identity | None:
    """By what the rows of a partitioned table are told apart; None: the stream says it."""
    return None if its.identity is None else Identity(its.identity.mode, its.identity.key)


def _await(shape: Shape, known: TableState) -> TableState:
    return state.redefined(known, shape, known.applied_lsn) if known.follows else known


def _unless_moved(had: Definition, change: Callable[[TableState], TableState], known: TableState) -> TableState:
    """The change, unless the table has got another definition meanwhile."""
    return change(known) if known.definition == had else known


def _after_a_look(
    connection: Connection, had: Definition, its: PublishedTable
) -> Callable[[TableState], TableState] | None:
    """What to do about a table in which something has changed that is not in the stream; None: nothing has.

    It is copied again if it is published in another way; if a partition has gone, by DROP or DETACH, or has come with
    rows in it; if its partitions tell rows apart in another way; if rows have other values although the columns look
    the same (another one of the same name and type, or ALTER TYPE … USING); and if it may have been UNLOGGED meanwhile.
    """
    now = its.layout
    come = set(its.leaves) - set(had.leaves)
    if (
        had.publication_fingerprint != its.publication_fingerprint
        or not set(had.leaves) <= set(its.leaves)
        or (come and had.gathered)  # what its stream had meanwhile may have been passed over
        or any(may_have_come_with_rows(connection, leaf) for leaf, _ in come)
        or (now.shape == had.layout.shape and now.attnums != had.layout.attnums)
        or (now.versions != had.layout.versions and now.filenodes != had.layout.filenodes)
        or had.identity != identity_of(its)
        or _may_be_rewritten(connection, had, now)
    ):
        return state.copy_again
    layout = now if now.shape == had.layout.shape else had.layout
    if (its.leaves, layout) == (had.leaves, had.layout):
        return None
    return lambda known: replace(known, definition=replace(had, leaves=its.leaves, layout=layout, xid=its.xid))


def _is_altered(had: Definition, its: PublishedTable) -> bool:
    """Whether something was altered that may let a table be applied which was set aside. New rows are no such thing."""
    old, new = had.layout, its.layout
    return (had.publication_fingerprint, had.leaves, had.identity) != (
        its.publication_fingerprint,
        its.leaves,
        identity_of(its),
    ) or (
        (old.shape, old.attnums, old.versions, old.replica_identity)
        != (new.shape, new.attnums, new.versions, new.replica_identity)
    )


def _may_be_rewritten(connection: Connection, had: Definition, now: Layout) -> bool:
    """Whether ALTER TABLE may have written the rows again of a heap that was there before.

    Where not all operations are published, a TRUNCATE may be one that is not: then it must not be taken for a rewrite.
    """
    before = dict(had.layout.rewrites)
    changed = [
        heap for heap, number in now.rewrites if before.get(heap, number) != number and (number > 0 or not had.partial)
    ]
    return bool(changed) and catalog.rewritten_since(connection, changed, had.xid)
