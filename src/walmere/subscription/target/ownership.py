"""The owner of a subscription's tables: the subscription's name, the database, and the system identifier.

The change log's header has database and system. Without a log, they are read from the source, together with the
published tables, so that tables of another owner are refused before a slot is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress

from walmere.changelog.writer import header_of
from walmere.config import Config
from walmere.errors import SinkMismatch, SinkUnavailable, SourceUnavailable
from walmere.libpq import describe
from walmere.names import TableName
from walmere.owner import Owner
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.publisher.database import database_oid, is_same_database
from walmere.publisher.stream import identify_system
from walmere.shaping.rules import TableRules
from walmere.sinks.base import Sink
from walmere.sinks.delta.sink import DeltaSink
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription.state import TableState, waiting_for_copy


def find(config: Config) -> tuple[Owner, Sequence[TableState]]:
    """The owner and, if there is no change log yet, the published tables."""
    header = header_of(config.changelog)
    name = config.subscription.name
    if header is not None and header.database_oid:
        return Owner(name, header.system_identifier, header.database_oid), ()
    if header is not None:  # written by an earlier version, without the OID
        try:
            return Owner(name, header.system_identifier, _read_source(config)[1]), ()
        except SourceUnavailable:
            return Owner(name, header.system_identifier, 0), ()
    identifier, oid, tables = _read_source(config)
    return Owner(name, identifier, oid), tables


def require_target(config: Config, sink: Sink) -> None:
    """Before anything is created or copied: raise if the target cannot be used.

    An object store must honour the condition of a put. A database must have the published tables and columns, and must
    not be that of the source.
    """
    if isinstance(sink, DeltaSink):
        sink.require_store()
    if not isinstance(sink, PostgresSink):
        return
    has_log = header_of(config.changelog) is not None
    with suppress(SourceUnavailable, SinkUnavailable) if has_log else nullcontext():
        require_other_database(config, sink)
    if has_log:
        return
    source = config.source
    gather = config.target is not None and config.target.gather_partitions
    with (
        closing(connect(source, "walmere launcher")) as connection,
        translate_errors(source, "reading catalogs"),
    ):
        catalog.require_publications(connection, source.publications)
        published = catalog.published_tables(connection, source.publications, gather)
    chosen = TableRules.of(config).choose(published)
    sink.require_tables({target: each.columns for target, each in chosen.items()})


def require_other_database(config: Config, sink: PostgresSink) -> None:
    """Raise SinkMismatch if the target is the database of the source: its rows would be copied to their own tables."""
    source, doing = config.source, "comparing the databases of source and target"
    with (
        closing(connect(source, "walmere launcher")) as of_source,
        sink.connection(doing) as of_target,
        translate_errors(source, doing),
    ):
        if is_same_database(of_source, of_target):
            wrong = f"target.dsn and source.dsn are one database, {describe(source)}"
            raise SinkMismatch(doing, wrong, "correct target.dsn")


def _read_source(config: Config) -> tuple[str, int, Sequence[TableState]]:
    source = config.source
    gather = config.target is not None and config.target.gather_partitions
    with (
        closing(connect(source, "walmere launcher", replication=True)) as replication,
        closing(connect(source, "walmere launcher")) as connection,
        translate_errors(source, "reading catalogs"),
    ):
        system = identify_system(replication)
        catalog.require_publications(connection, source.publications)
        published = catalog.published_tables(connection, source.publications, gather)
        chosen = TableRules.of(config).choose(published)
        tables = [
            waiting_for_copy(target, TableName(each.schema, each.name), each.oid) for target, each in chosen.items()
        ]
        return system.identifier, database_oid(connection), tables
