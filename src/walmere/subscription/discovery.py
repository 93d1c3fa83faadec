"""The regular read of the source's catalogs: which tables are published, and how they were altered.

Most changes of a table are in its stream. This module finds the others: tables that were added or removed, altered
publications, attached or detached partitions, rewritten tables, and altered columns of a table that has had no change
since. It takes no lock on tables, so a locked table does not block it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Final

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
from walmere.shaping.rules import TableRules
from walmere.subscription import state
from walmere.subscription.state import TableState
from walmere.subscription.tables import Tables

_SINCE: Final = re.compile(" there since [0-9]+")


@dataclass(frozen=True, slots=True)
class _Altered:
    """A definition that is in the catalogs and not yet in the target. The ALTER committed before this LSN."""

    shape: Shape
    lsn: Lsn


class Discovery:
    """Reads the catalogs for one subscription."""

    def __init__(
        self, source: Source, tables: Tables, rules: TableRules | None = None, *, gather: bool = False
    ) -> None:
        self._source = source
        self._tables = tables
        self._rules = rules or TableRules()
        self._gather = gather
        self._altered: dict[int, _Altered] = {}
        self._leaving: dict[int, Lsn] = {}  # tables that are not published any more, but have not reached this LSN
        self._previous: dict[int, PublishedTable] = {}
        self.changed: set[int] = set()
        """Tables that wait for a copy and were altered since the last read: a copy may succeed now."""

    @property
    def altered_lsn(self) -> Lsn | None:
        """The LSN that tables have to reach before their targets can adopt what the catalogs show."""
        lsns = [each.lsn for each in list(self._altered.values())]
        return max([*lsns, *list(self._leaving.values())], default=None)

    def refresh(self) -> None:
        """Update the states of the tables: which are published, and what was altered."""
        with (
            closing(connect(self._source, "walmere launcher")) as connection,
            translate_errors(self._source, "reading catalogs"),
        ):
            catalog.set_timeouts(connection)
            catalog.require_publications(connection, self._source.publications)
            all_published = catalog.published_tables(connection, self._source.publications, self._gather)
            chosen = self._rules.choose(all_published)
            now = {each.oid: each for each in chosen.values()}
            targets = {each.oid: target for target, each in chosen.items()}
            sources = {each.oid: TableName(each.schema, each.name) for each in all_published}
            changes: dict[int, Callable[[TableState], TableState]] = {}
            leaving: dict[int, Lsn] = {}
            for known in [each for each in self._tables if each.published and not each.of_messages]:
                published = now.get(known.oid)
                if published is None or (targets[known.oid], sources[known.oid]) != (known.table, known.source_table):
                    # not by the source, but by the configuration; or another table gets its place in the target
                    at_once = sources.get(known.oid) == known.source_table or known.table in chosen
                    lsn = None if at_once else self._leaves_at(connection, known)
                    if lsn is None or known.applied_lsn >= lsn:
                        changes[known.oid] = state.unpublished
                    else:
                        leaving[known.oid] = lsn
                elif (change := self._change(connection, known, published)) is not None:
                    changes[known.oid] = change
        waiting = {each.oid for each in self._tables if each.waits_for_copy}
        self.changed |= {oid for oid in waiting & self._previous.keys() & now.keys() if self._previous[oid] != now[oid]}
        self._previous = now
        if changes:
            self._tables.change(changes)
        self._altered = {oid: each for oid, each in self._altered.items() if oid in now and oid not in changes}
        self._leaving = leaving
        messages = self._tables.get(MESSAGES_OID)
        require_other_name(None if messages is None else messages.table, chosen)
        before = {each.oid: each for each in self._tables if each.hidden}
        new = [
            state.waiting_for_copy(target, sources[published.oid], published.oid, before.get(published.oid))
            for target, published in chosen.items()
            if published.oid not in self._tables
        ]
        if new:
            self._tables.put(*new)

    def _change(
        self, connection: Connection, known: TableState, published: PublishedTable
    ) -> Callable[[TableState], TableState] | None:
        had = known.definition
        if had is None:
            self._altered.pop(known.oid, None)  # a new copy will have the columns of the catalogs
            return None
        change: Callable[[TableState], TableState] | None
        if known.waits_for_copy:
            change = state.copy_again if _is_altered(had, published) else None
        else:
            change = self._change_of_sections(known, had) or _change_outside_stream(connection, had, published)
        if change is None and known.follows and published.layout.shape != had.layout.shape:
            change = self._adopt_columns(connection, known, had, published)
        else:
            self._altered.pop(known.oid, None)  # the stream had it first, or the table was altered back
        return None if change is None else functools.partial(_unless_redefined, had, change)

    def _change_of_sections(self, known: TableState, had: Definition) -> Callable[[TableState], TableState] | None:
        """A new copy, if the configuration says something else about the table than when it was copied."""
        key = () if had.key_identity is None else had.key_identity.key
        try:
            now = self._rules.shaping(known.source_table, had.columns, key, self._tables.types, known.hidden)
        except ConfigError as error:  # the copy will be refused, too
            return functools.partial(state.copy_again, error=str(error))
        return None if now == had.shaping else state.copy_again

    def _adopt_columns(
        self, connection: Connection, known: TableState, had: Definition, published: PublishedTable
    ) -> Callable[[TableState], TableState] | None:
        """For a table with altered columns that has had no change since: the stream does not have the ALTER yet.

        Changes that committed before the ALTER have the old columns. So they are applied up to an LSN after it. If the
        stream does not have the new definition until then, the target adopts the one in the catalogs.
        """
        shape = replace(had, columns=columns_of(connection, known.oid, published.columns)).shape(known.source_table)
        if shape == had.shape(known.source_table):
            # no published column was altered: only the stored layout is updated
            return lambda now: replace(
                now, definition=replace(had, layout=published.layout, leaves=published.leaves, xid=published.xid)
            )
        noticed = self._altered.get(known.oid)
        if noticed is not None and noticed.shape == shape:
            return functools.partial(_wait_for_definition, shape) if known.applied_lsn >= noticed.lsn else None
        self._altered[known.oid] = _Altered(shape, self._position_after_catalogs(connection))
        return None

    def _leaves_at(self, connection: Connection, known: TableState) -> Lsn | None:
        """The LSN that a table has to reach after it was removed from the publication; None: it stays as it is.

        The stream has the changes that committed before the table was removed, and none after it. They are applied up
        to an LSN after it. A table without a copy stays as it is, and so does one whose columns were altered before it
        was removed: its definition cannot be read any more.
        """
        if not known.follows:
            return None
        return self._leaving.get(known.oid) or self._position_after_catalogs(connection)

    def _position_after_catalogs(self, connection: Connection) -> Lsn:
        """An LSN after everything that the catalogs have shown. The log will reach it."""
        position = catalog.insert_position(connection)
        with (
            suppress(SourceError),
            translate_errors(self._source, "writing a heartbeat message"),
        ):  # not possible on a standby
            catalog.emit_message(connection, HEARTBEAT)
            catalog.push_wal(connection)
        return position


def require_other_name(messages: TableName | None, tables: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if the table of logical messages has the name of another table in the target."""
    if messages is not None and messages in set(tables):
        raise ConfigError(
            "creating the table of logical messages",
            f"target.messages is {messages}, and a table of the source has this name in the target",
            "choose another name for target.messages",
        )


def identity_of(published: PublishedTable) -> Identity | None:
    """The replica identity of a partitioned table; None: the stream has it."""
    return None if published.identity is None else Identity(published.identity.mode, published.identity.key)


def _wait_for_definition(shape: Shape, known: TableState) -> TableState:
    return state.redefined(known, shape, known.applied_lsn) if known.follows else known


def _unless_redefined(had: Definition, change: Callable[[TableState], TableState], known: TableState) -> TableState:
    """Apply the change, unless the table has another definition by now."""
    return change(known) if known.definition == had else known


def _change_outside_stream(
    connection: Connection, had: Definition, published: PublishedTable
) -> Callable[[TableState], TableState] | None:
    """The change of state for something that was altered and is not in the stream; None: nothing was altered.

    A table is copied again if the publication has other columns, filters or operations for it; if a partition was
    dropped or detached, or attached with rows; if the replica identity of its partitions changed; if rows have other
    values although the columns look the same (a column was replaced by one of the same name and type, or ALTER TYPE …
    USING); and if it may have been UNLOGGED for a time.
    """
    now = published.layout
    attached = set(published.leaves) - set(had.leaves)
    if (
        had.publication_fingerprint not in (published.publication_fingerprint, fingerprint_of_0_1(published))
        or not set(had.leaves) <= set(published.leaves)
        or (attached and had.gathered)  # changes of the new partition may have been skipped
        or any(may_have_come_with_rows(connection, leaf) for leaf, _ in attached)
        or (now.shape == had.layout.shape and now.attnums != had.layout.attnums)
        or (now.versions != had.layout.versions and now.filenodes != had.layout.filenodes)
        or had.identity != identity_of(published)
        or _may_be_rewritten(connection, had, now)
    ):
        return state.copy_again
    layout = now if now.shape == had.layout.shape else had.layout
    fingerprint = published.publication_fingerprint
    if (published.leaves, layout, fingerprint) == (had.leaves, had.layout, had.publication_fingerprint):
        return None
    now_has = replace(
        had, leaves=published.leaves, layout=layout, publication_fingerprint=fingerprint, xid=published.xid
    )
    return lambda known: replace(known, definition=now_has)


def fingerprint_of_0_1(published: PublishedTable) -> str:
    """As Walmere 0.1 has stored it: without the transactions that have put tables into published schemas."""
    return _SINCE.sub("", published.publication_fingerprint)


def _is_altered(had: Definition, published: PublishedTable) -> bool:
    """Whether a table that was set aside was altered so that a copy may succeed. New rows do not count."""
    old, new = had.layout, published.layout
    return (had.publication_fingerprint, had.leaves, had.identity) != (
        published.publication_fingerprint,
        published.leaves,
        identity_of(published),
    ) or (
        (old.shape, old.attnums, old.versions, old.replica_identity)
        != (new.shape, new.attnums, new.versions, new.replica_identity)
    )


def _may_be_rewritten(connection: Connection, had: Definition, now: Layout) -> bool:
    """Whether ALTER TABLE may have rewritten a heap that existed before.

    If TRUNCATE is not published, it must not be mistaken for a rewrite.
    """
    before = dict(had.layout.rewrites)
    changed = [
        heap for heap, number in now.rewrites if before.get(heap, number) != number and (number > 0 or not had.partial)
    ]
    return bool(changed) and catalog.rewritten_since(connection, changed, had.xid)
