"""The part of `walmere check` for a target that is a database: role, schema, origins, and each published table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress

from walmere.config import Config, PostgresTarget
from walmere.errors import SourceError, WalmereError
from walmere.libpq import describe
from walmere.names import TableName
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.publisher.finding import Finding, Level
from walmere.shaping.rules import TableRules
from walmere.sinks.postgres import origin
from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.relation import TargetRelation, read_relations, require_creation
from walmere.sinks.postgres.sink import PostgresSink
from walmere.subscription.target.ownership import require_other_database

_DOING = "checking the tables of the target"


def check_target(config: Config, sink: PostgresSink) -> Iterator[Finding]:
    """Check the target. Each problem comes with its fix."""
    assert isinstance(config.target, PostgresTarget)
    try:
        with sink.connection("connecting to the target") as connection:
            yield Finding(
                "target", Level.OK, f"connected to {describe(config.target)}, PostgreSQL {_version(connection)}"
            )
            with suppress(SourceError):  # the checks of the source report it
                require_other_database(config, sink)
            yield _progress(connection, sink)
            yield from _schema(connection, sink)
            yield from _two_phase(connection, sink)
            try:
                published = _published(config)
            except WalmereError:
                return  # the checks of the source report it
            relations = read_relations(connection, list(published))
            for table, names in published.items():
                yield from _table(connection, table, names, relations.get(table), sink)
    except WalmereError as error:
        yield Finding("target", Level.PROBLEM, error.wrong, error.hint)


def _version(connection: Connection) -> int:
    return connection.info.server_version // 10000


def _progress(connection: Connection, sink: PostgresSink) -> Finding:
    if origin.may_use(connection):
        if (free := origin.places_free(connection, sink.subscription)) < origin.PLACES:
            text = f"the target has {free} free places for replication origins; a subscription needs {origin.PLACES}"
            return Finding("origin", Level.PROBLEM, text, origin.MORE_PLACES)
        if origin.places_left(connection, sink.subscription) < origin.PLACES:
            text = f"the target has places for {origin.PLACES} more replication origins only if others are not used"
            return Finding("origin", Level.WARNING, text, origin.MORE_PLACES)
        return Finding(
            "origin", Level.OK, f"progress is stored in replication origin {origin.name_of(sink.subscription)}"
        )
    text = "the role may not use replication origins: progress is stored in a table, and changes are not marked"
    fix = "GRANT EXECUTE ON FUNCTION pg_replication_origin_create(text), … TO …;  -- needed only against loops"
    return Finding("origin", Level.WARNING, text, fix)


def _schema(connection: Connection, sink: PostgresSink) -> Iterator[Finding]:
    if sink.state.exists(connection):
        yield Finding("target_schema", Level.OK, f"schema {sink.schema} has the tables of Walmere")
        return
    try:
        require_creation(connection, sink.schema, f"schema {sink.schema}, or tables in it", _DOING)
    except WalmereError as error:
        yield Finding("target_schema", Level.PROBLEM, error.wrong, error.hint)
    else:
        yield Finding("target_schema", Level.OK, f"schema {sink.schema} can be created for the tables of Walmere")


def _two_phase(connection: Connection, sink: PostgresSink) -> Iterator[Finding]:
    if not sink.two_phase:
        return
    [row] = connection.execute("SELECT current_setting('max_prepared_transactions')").fetchall()
    if row[0] == "0":
        text = "source.two_phase is on, and the target does not allow prepared transactions"
        fix = "ALTER SYSTEM SET max_prepared_transactions = 10;  -- at the target, then restart it"
        yield Finding("target_two_phase", Level.PROBLEM, text, fix)
    else:
        yield Finding("target_two_phase", Level.OK, f"the target allows {row[0]} prepared transactions")


def _published(config: Config) -> Mapping[TableName, Sequence[str]]:
    source = config.source
    gather = config.target is not None and config.target.gather_partitions
    with closing(connect(source, "walmere check")) as connection, translate_errors(source, "reading catalogs"):
        tables = catalog.published_tables(connection, source.publications, gather)
    return {target: each.columns for target, each in TableRules.of(config).choose(tables).items()}


def _table(
    connection: Connection,
    table: TableName,
    names: Sequence[str],
    relation: TargetRelation | None,
    sink: PostgresSink,
) -> Iterator[Finding]:
    name = "target_table"
    try:
        sink.require_table(connection, table, names, relation, _DOING)
    except WalmereError as error:
        yield Finding(name, Level.PROBLEM, error.wrong, error.hint)
        return
    if relation is None:
        yield Finding(name, Level.OK, f"{table} will be created in the target")
        return
    if relation.fires_per_statement:
        text = f"{table} has statement triggers that are enabled for replicas: they fire for each changed row"
        yield Finding(name, Level.WARNING, text, f"ALTER TABLE {table} ENABLE TRIGGER …;  -- not ALWAYS or REPLICA")
    elif relation.fires:
        text = f"{table}: {', '.join(relation.fires)} fire, so its changes are applied row by row"
        yield Finding(name, Level.OK, text)
    elif relation.linked_roots or relation.deferred:
        text = f"{table} has foreign keys or deferred constraints that are enabled for replicas"
        yield Finding(name, Level.OK, f"{text}, so its changes may be applied row by row")
    elif not relation.keys:
        text = f"{table} has no unique index: an UPDATE or DELETE has to search the whole table"
        yield Finding(name, Level.WARNING, text, f"ALTER TABLE {table} ADD PRIMARY KEY (…);")
    else:
        yield Finding(name, Level.OK, f"{table} can be written")
