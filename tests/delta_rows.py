"""The rows of a Delta table, read by `deltalake`'s own query engine: code that the mirror does not use."""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def read_delta(opened: DeltaTable) -> pa.Table:
    """All rows at the version that is open. `to_pyarrow_table` refuses tables with deletion vectors."""
    schema = pa.schema(opened.schema().to_arrow())
    found = pa.table(QueryBuilder().register("t", opened).execute("SELECT * FROM t").read_all())
    return pa.Table.from_arrays([found[field.name].cast(field.type) for field in schema], schema=schema)
