"""Story 9: logical messages reach the change log, and a table of messages on request."""

from __future__ import annotations

from pathlib import Path

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from walmere.changelog.reader import Reader
from walmere.lsn import Lsn
from walmere.pgoutput import messages as m


def test_messages_are_a_table_if_one_is_asked_for(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database, tmp_path)
    mirror.run_once()
    database.execute(
        "SELECT pg_logical_emit_message(true, 'before', 'in the log, and nobody wanted a table yet')",
    )
    mirror.run_once()
    mirror.set("target", messages="app.outbox")
    database.execute(
        "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'größe', '\\x00ff0a'::bytea);"
        " SELECT pg_logical_emit_message(true, 'größe', ''); COMMIT",
        "BEGIN; SELECT pg_logical_emit_message(true, 'rolled back', 'x'); ROLLBACK",
        "BEGIN; SELECT pg_logical_emit_message(false, 'rolled back', 'and yet said'); ROLLBACK",
        # streamed in progress, with a subtransaction that is rolled back
        "BEGIN; INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1000, 4000) i;"
        " SELECT pg_logical_emit_message(true, 'streamed', 'kept'); SAVEPOINT s;"
        " SELECT pg_logical_emit_message(true, 'streamed', 'lost'); ROLLBACK TO s; COMMIT",
    )
    mirror.run_once()
    mirror.assert_equal("t")
    with Reader(mirror.config.changelog) as reader:
        logged = [
            (t.commit_lsn, t.xid, change.message.transactional, change.message.prefix, bytes(change.message.content))
            for t in reader.transactions(Lsn(0))
            for change in t.changes
            if isinstance(change.message, m.LogicalMessage)
        ]
    rows = read_delta(mirror.delta("outbox", "app")).sort_by("lsn").to_pylist()
    found = [(r["commit_lsn"], r["xid"], r["transactional"], r["prefix"], r["content"]) for r in rows]
    assert sorted(found) == sorted((int(lsn), *rest) for lsn, *rest in logged)
    assert [(prefix, content) for *_, prefix, content in found] == [
        ("before", b"in the log, and nobody wanted a table yet"),
        ("größe", b"\x00\xff\x0a"),
        ("größe", b""),
        ("rolled back", b"and yet said"),
        ("streamed", b"kept"),
    ]
    assert all(row["commit_time"] is not None for row in rows)
    mirror.run_once()
    assert read_delta(mirror.delta("outbox", "app")).num_rows == 5
    (tmp_path / "lake/app/outbox").rename(tmp_path / "elsewhere")
    database.execute("SELECT pg_logical_emit_message(true, 'after', 'it was taken away')")
    mirror.run_once()
    assert read_delta(mirror.delta("outbox", "app"))["prefix"].to_pylist() == ["after"]
