"""The rows that the benchmarks write at the source: the same for `bench.receive` and `bench.stream`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bench.source import Source

_INSERTS = """
CREATE TABLE a1 (id bigint PRIMARY KEY, customer int, status text, amount numeric(12,2), created timestamptz,
                 note text, payload text)
"""
_FILL_INSERTS = """
DO $$ BEGIN
    FOR t IN 0 .. {transactions} - 1 LOOP
        INSERT INTO a1 SELECT t * 1000 + i, i % 777, 'shipped', (i * 13.37)::numeric(12,2), now(),
                              'note ' || md5((t * 1000 + i)::text), md5(i::text) || md5((i + t)::text)
                       FROM generate_series(0, 999) i;
        COMMIT;
    END LOOP;
END $$
"""
_MIXED = "CREATE TABLE a2 (id bigint PRIMARY KEY, customer int, amount numeric(12,2), note text)"
_EXISTING = "INSERT INTO a2 SELECT i, i % 777, i, md5(i::text) FROM generate_series(-{existing}, 0) i"
_FILL_MIXED = """
DO $$ BEGIN
    FOR i IN 1 .. {rows} LOOP
        IF i % 10 < 5 THEN
            INSERT INTO a2 VALUES (i, i % 777, i, md5(i::text));
        ELSIF i % 10 < 9 THEN
            UPDATE a2 SET amount = amount + 1 WHERE id = -(i::bigint * 7919 % {existing});
        ELSE
            DELETE FROM a2 WHERE id = i - 9;
        END IF;
        COMMIT;
    END LOOP;
END $$
"""
_UPDATES = """
CREATE TABLE {table} (id bigint PRIMARY KEY, number bigint, customer int, quantity int, amount numeric(12,2),
                      changed timestamptz, status text, note text, address text)
"""
_FILL_ROWS = """
INSERT INTO {table} SELECT i, -1, i % 777, i % 10, i % 100000 * 1.37, '2026-01-01 00:00+00', 'shipped', md5(i::text),
                           'street, house number, floor and doorbell of customer ' || i % 777 || ', in city ' || i % 131
                    FROM generate_series(1, {rows}) i
"""
_FILL_UPDATES = """
DO $$ DECLARE key bigint; BEGIN
    PERFORM setseed(0.5);
    FOR i IN 1 .. {count} LOOP
        key := 1 + floor(random() * {rows})::bigint;  -- first: in the WHERE clause it would be computed for every row
        UPDATE {table} SET number = i, amount = amount + 1, changed = clock_timestamp() WHERE id = key;
        COMMIT;
    END LOOP;
END $$
"""
_UPDATE = """
UPDATE {table} SET number = %s, amount = amount + 1, changed = clock_timestamp() WHERE id = ANY(%s)
"""


@dataclass(frozen=True)
class Load:
    """A table, its existing rows, and the changes that are written after a slot was created."""

    table: str
    create: str
    existing: str
    fill: str

    def prepare(self, source: Source) -> None:
        """Create the table with its existing rows, and its publication, unless it exists."""
        if source.value("SELECT to_regclass(%s) IS NOT NULL", self.table) == "True":
            return
        source.sql.execute(self.create.encode())
        if self.existing:
            source.sql.execute(self.existing.encode())
            source.sql.execute(f"VACUUM (ANALYZE) {self.table}".encode())
        source.sql.execute(f"CREATE PUBLICATION {self.table} FOR TABLE {self.table}".encode())

    def backlog(self, source: Source, name: str) -> str:
        """Create everything, and a slot with the table's name before the changes. Returns where the WAL then ends."""
        print(f"making {name} …")
        self.prepare(source)
        source.slot(self.table)
        source.sql.execute(self.fill.encode())
        return source.end()


def inserts(transactions: int) -> Load:
    """Transactions of 1,000 rows of about 180 bytes."""
    return Load("a1", _INSERTS, "", _FILL_INSERTS.format(transactions=transactions))


def mixed(rows: int, existing: int) -> Load:
    """One-row transactions: 50% inserts, 40% updates of existing rows, 10% deletes."""
    return Load("a2", _MIXED, _EXISTING.format(existing=existing), _FILL_MIXED.format(rows=rows, existing=existing))


def updates(table: str, rows: int, count: int = 0) -> Load:
    """One-row transactions, each an update of a random row of about 180 bytes."""
    return Load(
        table,
        _UPDATES.format(table=table),
        _FILL_ROWS.format(table=table, rows=rows),
        _FILL_UPDATES.format(table=table, rows=rows, count=count),
    )


def update(table: str, rows: int, each: int, seed: int, number: int) -> tuple[bytes, list[Any]]:
    """The update of some random rows in one transaction. Another seed gives other rows."""
    ids = random.Random(f"{seed} {number}").sample(range(1, rows + 1), each)
    return _UPDATE.format(table=table).encode(), [number, ids]
