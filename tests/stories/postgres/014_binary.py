"""Story 14: a native subscription with `binary` gets values in binary format. Ours always has their text."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.long


def test_values_are_the_same_as_those_that_native_receives_in_binary_format(both: SideBySide) -> None:
    both.everywhere(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t (a int[] PRIMARY KEY, b bytea, c numeric, d timestamptz, e float8, f jsonb, g pair)",
    )
    row = (
        "ARRAY[{0}, {0}], '\\x00ff', {0}.50, '2026-01-01 00:00+02', {0}::float8 / 3, '{{\"k\": [1, null]}}',"
        " ROW({0}, E'\\t')"
    )
    both.source(
        f"INSERT INTO t VALUES ({row.format(1)}), ({row.format(2)})",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    both.start(native={"binary": "true"})
    both.source(
        f"INSERT INTO t VALUES ({row.format(3)})",
        "UPDATE t SET e = 'NaN', c = 'Infinity', g = ROW(NULL, '') WHERE a = '{1,1}'",
        "UPDATE t SET a = '{7}', d = 'infinity' WHERE a = '{2,2}'",
        "DELETE FROM t WHERE a = '{3,3}'",
    )
    both.sync()
    both.assert_equal()
    both.assert_equal("SELECT t::text FROM t ORDER BY 1", source=True)
