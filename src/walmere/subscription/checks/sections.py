"""The part of `walmere check` for `[[table]]` and `[types]`: whether sections match tables, and can be applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing

from walmere.config import Config
from walmere.definition import PublishedColumn
from walmere.errors import ConfigError, FunctionFailed, WalmereError
from walmere.names import TableName
from walmere.publisher import catalog
from walmere.publisher.catalog import PublishedTable
from walmere.publisher.connect import Connection, connect, translate_errors
from walmere.publisher.finding import Finding, Level
from walmere.publisher.table import columns_of
from walmere.shaping.functions import load
from walmere.shaping.rules import TableRules

_NAME = "table_sections"


def check_sections(config: Config) -> Iterator[Finding]:
    """Compare the sections with the published tables."""
    source, rules = config.source, TableRules.of(config)
    gather = config.target is not None and config.target.gather_partitions
    try:
        with closing(connect(source, "walmere check")) as connection, translate_errors(source, "reading catalogs"):
            catalog.set_timeouts(connection)
            published = catalog.published_tables(connection, source.publications, gather)
            columns = {each.oid: columns_of(connection, each.oid, each.columns) for each in published}
            chosen = rules.choose(published)
            refused = [why for each in chosen.values() for why in _refused(connection, rules, each, columns)]
    except WalmereError as error:
        yield Finding(_NAME, Level.PROBLEM, error.wrong, error.hint)
        return
    for each in refused:
        yield Finding(_NAME, Level.PROBLEM, f"{each.doing}: {each.wrong}", f"-- {each.hint}")
    yield from _unused(rules, published, columns)
    yield from _functions(rules)
    left_out = len(published) - len(chosen)
    yield Finding(_NAME, Level.OK, f"{len(chosen)} tables are mirrored, {left_out} are excluded by [[table]]")


def _refused(
    connection: Connection,
    rules: TableRules,
    table: PublishedTable,
    columns: Mapping[int, tuple[PublishedColumn, ...]],
) -> Iterator[ConfigError]:
    """Why the sections cannot be applied to a table."""
    table_columns = columns[table.oid]
    key = [each.name for each in table_columns if each.is_key] if table.identity is None else table.identity.key
    types = catalog.types_of(connection, (each.type_oid for each in table_columns))
    try:
        name = TableName(table.schema, table.name)
        shaping = rules.shaping(name, table_columns, key, types)
        rules.cluster_by(name, rules.columns(table_columns, types, shaping).schema)
    except ConfigError as error:
        yield error


def _unused(
    rules: TableRules, published: Iterable[PublishedTable], columns: Mapping[int, tuple[PublishedColumn, ...]]
) -> Iterator[Finding]:
    """Sections that match no table, and columns that no table of a pattern has."""
    unmatched = rules.unmatched(published)
    for section in rules.sections:
        if section in unmatched:
            text = f"[[table]] {section.match} matches no published table"
            yield Finding(_NAME, Level.WARNING, text, "-- correct match, or remove the section")
            continue
        matching = [each.oid for each in published if section.matches(TableName(each.schema, each.name))]
        known = {column.name for oid in matching for column in columns[oid]}
        if not section.exact and (missing := sorted(set(section.columns) - known)):
            text = f"[[table]] {section.match}: no table that matches has a column {', '.join(missing)}"
            yield Finding(_NAME, Level.WARNING, text, "-- correct the name, or remove it from the section")


def _functions(rules: TableRules) -> Iterator[Finding]:
    """Functions that this process cannot import. Those that matter are Spark's executors, so it is only a warning."""
    masks = {column.mask for section in rules.sections for column in section.columns.values() if column.mask}
    for mask in sorted(each for each in masks if ":" in each):
        try:
            load(mask)
        except FunctionFailed as error:
            yield Finding(_NAME, Level.WARNING, f"{error.doing}: {error.wrong}", f"-- {error.hint}")
