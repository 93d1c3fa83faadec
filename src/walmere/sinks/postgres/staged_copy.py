"""The last step of a copy that was staged: its rows become those of the table."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.sql import SQL, Composable, Identifier

from walmere.sinks.postgres.connect import Connection
from walmere.sinks.postgres.relation import TargetRelation


def insert_rows(connection: Connection, relation: TargetRelation, staged: Composable, names: Sequence[str]) -> None:
    """Insert all rows."""
    columns = SQL(", ").join(map(Identifier, names))
    query = SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}")
    if not names:  # no column is published
        query = SQL("INSERT INTO {} {} SELECT {} FROM {}")
    connection.execute(query.format(relation.sql, columns, columns, staged))


def replace_rows(
    connection: Connection, relation: TargetRelation, staged: Composable, names: Sequence[str], kept_rows: Composable
) -> None:
    """Insert all rows in place of those of an earlier copy. Columns of the target's own keep their values, by the key.

    Not by an UPDATE: rows may have swapped values of another unique column. `kept_rows`: the name of a table that is
    created for these values, and dropped. Not every role may create a temporary one.
    """
    key = next((key for key in relation.keys if set(key) <= set(names)), None)
    local = relation.local(names)
    if key is None or not local:
        empty(connection, relation)
        insert_rows(connection, relation, staged, names)
        return
    kept = SQL(", ").join([*map(Identifier, key), *(each.sql for each in local)])
    query = SQL("CREATE UNLOGGED TABLE {} AS SELECT {} FROM {}")
    connection.execute(query.format(kept_rows, kept, relation.only))
    empty(connection, relation)
    same = SQL(" AND ").join(
        SQL("s.{0} {1} k.{0}").format(Identifier(name), relation.columns[name].equals) for name in key
    )
    values = [*(SQL("s.{}").format(Identifier(name)) for name in names), *(SQL("k.{}").format(c.sql) for c in local)]
    connection.execute(
        SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {} AS s JOIN {} AS k ON {}").format(
            relation.sql,
            SQL(", ").join([*map(Identifier, names), *(each.sql for each in local)]),
            SQL(", ").join(values),
            staged,
            kept_rows,
            same,
        )
    )
    query = SQL("DELETE FROM {} AS s USING {} AS k WHERE {}")
    connection.execute(query.format(staged, kept_rows, same))
    connection.execute(SQL("DROP TABLE {}").format(kept_rows))
    insert_rows(connection, relation, staged, names)  # the others get the defaults of those columns


def empty(connection: Connection, relation: TargetRelation) -> None:
    """Remove all rows. A table that a foreign key references cannot be truncated alone."""
    query = SQL("DELETE FROM {}") if relation.referenced else SQL("TRUNCATE {}")
    connection.execute(query.format(relation.only))
