"""Who owns the tables of a subscription: the subscription, by its name, of one database of one system.

The change log's header has both. A subscription that has no log yet asks the source, and also which tables it will
have: so tables of another owner are refused before a slot is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from walmere.changelog.writer import header_of
from walmere.config import Config
from walmere.errors import SourceUnavailable
from walmere.names import TableName
from walmere.owner import Owner
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.publisher.database import database_oid
from walmere.publisher.stream import identify_system
from walmere.subscription.state import TableState


def find(config: Config) -> tuple[Owner, Sequence[TableState]]:
    """The owner; and, if there is no change log yet, the tables that are published now."""
    header = header_of(config.changelog)
    name = config.subscription.name
    if header is not None and header.database_oid:
        return Owner(name, header.system_identifier, header.database_oid), ()
    if header is not None:  # of an earlier version, without the OID
        try:
            return Owner(name, header.system_identifier, _ask(config)[1]), ()
        except SourceUnavailable:
            return Owner(name, header.system_identifier, 0), ()
    identifier, oid, tables = _ask(config)
    return Owner(name, identifier, oid), tables


def _ask(config: Config) -> tuple[str, int, Sequence[TableState]]:
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
        tables = [TableState(TableName(each.schema, each.name), each.oid) for each in published]
        return system.identifier, database_oid(connection), tables
