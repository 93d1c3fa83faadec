"""The columns of a query of the `pgoutput` source.

With option `table` they are those of the table's newest definition when the query starts. Rows of older definitions are
mapped to them by name. A newer definition with other columns ends the query, and its next start has the new columns:
nothing is dropped silently. Without that option, rows are JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from walmere import paths
from walmere.changelog.manifest import Manifest
from walmere.changelog.manifest_file import NAME as MANIFEST
from walmere.errors import ChangeLogDamaged, ConfigError, PublicationMissing, TypeMismatch, UnknownType
from walmere.lsn import Lsn
from walmere.pgoutput.messages import Relation
from walmere.pgoutput.relation import RelationVersion
from walmere.source.change_rows import Format, OutputColumn
from walmere.source.json_rows import JsonRows
from walmere.source.options import SourceOptions
from walmere.source.table_rows import TableRows
from walmere.subscription.tables import Tables
from walmere.types import PgType
from walmere.types.codec import codec

if TYPE_CHECKING:
    from walmere.source.feed import SourceServer

_DOING: Final = "reading with format pgoutput"
_SHOWN_TABLES: Final = 10
"""Tables that an error lists."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """The columns of a table from an LSN on."""

    lsn: Lsn
    columns: tuple[OutputColumn, ...]


def _columns(relation: Relation) -> tuple[OutputColumn, ...]:
    return tuple(OutputColumn(each.name, each.type_oid, each.type_modifier) for each in relation.columns)


class QueryColumns:
    """Finds the columns of a query, from the change log or from the source."""

    def __init__(self, options: SourceOptions, directory: Path, server: SourceServer | None) -> None:
        self._options = options
        self._directory = directory
        self._changelog = directory / paths.CHANGELOG
        self._server = server
        self._types: dict[int, PgType] = {}

    def format(self, schema: StructType | None = None) -> Format:
        """The format of the rows; with `schema`, the columns that Spark got when the query was created."""
        if self._options.table is None:
            return self._with_schema(JsonRows({}), schema)
        for each in reversed(self._definitions()):
            rows = TableRows(each.columns, self._load_types(each.columns), since=each.lsn)
            _require_no_reserved_name(rows)
            if schema is None or self._has_schema(rows, schema):
                break
        return self._with_schema(rows, schema)

    def struct(self, rows: Format) -> StructType:
        """The columns as Spark's types."""
        assert isinstance(rows, JsonRows | TableRows)
        found: StructType = from_arrow_schema(rows.schema(), prefer_timestamp_ntz=True)
        wanted = self._options.columns
        if not wanted:
            return found
        unknown = [name for name in wanted if name not in found.names]
        if unknown:
            raise ConfigError(
                _DOING,
                f"option columns: there is no column {', '.join(unknown)}",
                f"the columns are {', '.join(found.names)}",
            )
        return StructType([found[name] for name in wanted])

    def accept(self, rows: Format, used: Iterable[RelationVersion]) -> Format:
        """The format that can read rows of these definitions. Raises TypeMismatch if one has other columns."""
        if isinstance(rows, JsonRows):
            self._load_types(column for each in used for column in _columns(each.relation))
            return replace(rows, types=self._types)
        assert isinstance(rows, TableRows)
        for each in used:
            if each.lsn > rows.since and (changed := self._changed(rows, _columns(each.relation))):
                raise TypeMismatch(
                    f"reading table {'.'.join(self._options.table or ())} at {each.lsn}",
                    f"its columns were altered there: {', '.join(changed)}",
                    "start the query again from the same checkpoint: it then has the new columns",
                )
        return rows

    def _changed(self, rows: TableRows, columns: Sequence[OutputColumn]) -> list[str]:
        """The names of columns that differ, of those that the query has or would have with this definition."""
        had = {name: each.arrow for name, each in rows.codecs.items()}
        has: dict[str, pa.DataType | None] = {}
        for each in columns:
            with contextlib.suppress(UnknownType):
                has[each.name] = None
                self._load_types([each])
                has[each.name] = codec(each.type_oid, each.typmod, self._types).arrow
        changed = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
        if not self._options.columns or {"_before", "_unchanged"} & {*rows.wanted}:  # these contain all columns
            return changed
        return [name for name in changed if name in rows.wanted]

    def _has_schema(self, rows: Format, schema: StructType) -> bool:
        try:
            found = self.struct(rows)
        except ConfigError:
            return False
        return {each.name: each.dataType for each in found} == {each.name: each.dataType for each in schema}

    def _with_schema(self, rows: JsonRows | TableRows, schema: StructType | None) -> Format:
        if schema is None:
            return rows
        if not self._has_schema(rows, schema):
            raise ConfigError(
                _DOING,
                "the columns of the query are not those of the table",
                'load it again without schema(…); to select columns, use option("columns", "id, amount, _op")',
            )
        return replace(rows, wanted=tuple(schema.names))

    def _definitions(self) -> list[_Definition]:
        """The definitions of the table, oldest first. There is at least one."""
        schema, name = self._options.table or ("", "")
        found, others = self._logged_definitions(schema, name)
        if found:
            return sorted(found, key=lambda each: each.lsn)
        if self._server is not None and self._options.publications:
            published = self._server.columns(schema, name)
            if published is None:
                raise PublicationMissing(
                    f"looking for table {schema}.{name}",
                    "neither the change log nor the publications have it",
                    "add it with ALTER PUBLICATION … ADD TABLE, or correct option table; without"
                    " publish_via_partition_root, changes of a partitioned table are those of its partitions",
                )
            now, columns = published
            return [_Definition(now, tuple(OutputColumn(each.name, each.type_oid, each.typmod) for each in columns))]
        more = " …" if len(others) > _SHOWN_TABLES else ""
        has = f"it has {', '.join(sorted(others)[:_SHOWN_TABLES])}{more}" if others else "it is empty"
        raise ConfigError(
            f"looking for table {schema}.{name} in {self._changelog}",
            f"the log does not have it; {has}",
            "a table is in the log after its first change; with options dsn and publications, it is found before that",
        )

    def _logged_definitions(self, schema: str, name: str) -> tuple[list[_Definition], set[str]]:
        """The definitions of the table in the change log, and the names of all tables there."""
        found: list[_Definition] = []
        names: set[str] = set()
        try:
            with Manifest(self._changelog) as manifest:
                for entry in manifest.entries():
                    if isinstance(entry, RelationVersion):
                        relation = entry.relation
                        if (relation.namespace, relation.name) == (schema, name):
                            found.append(_Definition(entry.lsn, _columns(relation)))
                        names.add(f"{relation.namespace}.{relation.name}")
        except ChangeLogDamaged:
            if self._server is None or (self._changelog / MANIFEST).exists():
                raise
        return found, names

    def _load_types(self, columns: Iterable[OutputColumn]) -> dict[int, PgType]:
        """All types that are known and not built in, including those of these columns. Raises UnknownType."""
        unknown = [each for each in columns if not self._is_known(each)]
        if unknown:
            self._types |= Tables(self._directory).types
            unknown = [each for each in unknown if not self._is_known(each)]
        if unknown and self._server is not None:
            self._types |= self._server.types(each.type_oid for each in unknown)
            unknown = [each for each in unknown if not self._is_known(each)]
        if unknown:
            raise UnknownType(
                f"looking up the type of column {unknown[0].name}",
                f"OID {unknown[0].type_oid} is not built in, and "
                + ("the source does not have it any more" if self._server else "the source is not known"),
                "the type may have been dropped" if self._server else 'give option("dsn", "postgresql://…")',
            )
        return self._types

    def _is_known(self, column: OutputColumn) -> bool:
        try:
            codec(column.type_oid, column.typmod, self._types)
        except UnknownType:
            return False
        return True


def _require_no_reserved_name(rows: TableRows) -> None:
    names = rows.schema().names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            _DOING,
            f"the table has a column {', '.join(twice)}, which is a name that the format itself uses",
            'remove option("table", …): rows as JSON can have such a column',
        )
