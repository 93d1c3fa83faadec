"""Captures the corpus: what a real server sends for one workload, as each kind of subscriber would ask for it.

    python tests/pgoutput/capture.py 'host=… user=postgres dbname=postgres' [DSN …] > tests/pgoutput/corpus.hex

It makes a database `po_corpus` on each server, logical slots `po_…` and a replication origin, and drops them at the
end. The server needs wal_level = logical and max_prepared_transactions > 0. A line of the corpus is one CopyData from
walsender, in hexadecimal; `[section]` begins another connection.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

DATABASE = "po_corpus"
PUBLICATION = "po_pub"

# name, slot is two_phase, server versions to ask this of, options of START_REPLICATION
SECTIONS: list[tuple[str, bool, range, dict[str, str]]] = [
    ("plain", False, range(14, 99), {"proto_version": "1", "messages": "true"}),
    ("binary", False, range(16, 99), {"proto_version": "1", "binary": "true"}),
    ("streamed", False, range(14, 16), {"proto_version": "2", "streaming": "on", "messages": "true"}),
    ("two_phase", True, range(15, 16), {"proto_version": "3", "streaming": "on", "two_phase": "on"}),
    (
        "parallel",
        True,
        range(16, 99),
        {"proto_version": "4", "streaming": "parallel", "two_phase": "on", "messages": "true"},
    ),
]

SCHEMA = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN positive AS int CHECK (value > 0);
CREATE TABLE item (id int PRIMARY KEY, name text, price numeric(10,2), mood mood, at timestamptz, bin bytea, doc jsonb);
CREATE TABLE toasted (id int PRIMARY KEY, n int, big text);
ALTER TABLE toasted ALTER big SET STORAGE EXTERNAL;
CREATE TABLE full_identity (id int, n positive, big text);
ALTER TABLE full_identity ALTER big SET STORAGE EXTERNAL;
ALTER TABLE full_identity REPLICA IDENTITY FULL;
CREATE TABLE by_index (a int, "größe 1" varchar(20) NOT NULL UNIQUE, moods mood[]);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX "by_index_größe 1_key";
CREATE TABLE no_identity (a int);
ALTER TABLE no_identity REPLICA IDENTITY NOTHING;
CREATE TABLE no_columns ();
CREATE TABLE parent (id serial PRIMARY KEY);
CREATE TABLE child (id serial PRIMARY KEY, parent int REFERENCES parent);
CREATE TABLE by_range (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE by_range_1 PARTITION OF by_range FOR VALUES FROM (0) TO (100);
CREATE TABLE unpublished (filler int);
CREATE PUBLICATION po_pub FOR TABLE item, toasted, full_identity, by_index, no_identity, no_columns, parent, child,
    by_range WITH (publish_via_partition_root);
"""

# Rows of a table that is not published fill logical_decoding_work_mem and so make the server stream; they are not sent.
FILL = "INSERT INTO unpublished SELECT generate_series(1, 1500)"

WORKLOAD: list[list[str]] = [
    [
        "INSERT INTO item VALUES (1, 'anvil', 12.50, 'ok', '2024-02-29 12:00+00', '\\x00ff', '{\"a\": [1]}')",
        "INSERT INTO item (id, name) VALUES (2, ''), (3, NULL), (4, 'Größe ✓')",
        "UPDATE item SET price = 1 WHERE id = 1",
        "UPDATE item SET id = 5 WHERE id = 2",
        "DELETE FROM item WHERE id = 3",
    ],
    [
        "INSERT INTO toasted VALUES (1, 1, repeat('x', 2100))",
        "UPDATE toasted SET n = 2",
        "UPDATE toasted SET id = 2",
    ],
    [
        "INSERT INTO full_identity VALUES (1, 1, repeat('y', 2100)), (2, NULL, '')",
        "UPDATE full_identity SET n = 2",
        "DELETE FROM full_identity WHERE id = 2",
    ],
    [
        "INSERT INTO by_index VALUES (1, 'one', '{sad,happy}'), (NULL, 'two', NULL)",
        "UPDATE by_index SET a = 3 WHERE a = 1",
        "UPDATE by_index SET \"größe 1\" = 'three' WHERE a = 3",
        "DELETE FROM by_index",
    ],
    ["INSERT INTO no_identity VALUES (1), (NULL)", "INSERT INTO no_columns DEFAULT VALUES"],
    ["INSERT INTO by_range VALUES (7, 'seven')", "UPDATE by_range SET v = NULL"],
    ["INSERT INTO parent DEFAULT VALUES", "INSERT INTO child (parent) VALUES (1)"],
    ["TRUNCATE parent RESTART IDENTITY CASCADE"],
    ["TRUNCATE no_identity, no_columns"],
    ["SELECT pg_logical_emit_message(false, 'po', 'between transactions')"],
    ["SELECT pg_logical_emit_message(true, 'po', '\\x00616200'::bytea)", "INSERT INTO item (id) VALUES (10)"],
    [
        "SELECT pg_replication_origin_session_setup('po_origin')",
        "SELECT pg_replication_origin_xact_setup('16/B374D848', '2024-02-29 12:00+00')",
        "INSERT INTO item (id, name) VALUES (11, 'from elsewhere')",
    ],
    ["SELECT pg_replication_origin_session_reset()"],
    ["ALTER TABLE item ADD COLUMN extra int DEFAULT 7", "INSERT INTO item (id) VALUES (12)"],
    # streamed: every kind of row message, a rolled back savepoint, a table changed on the way, a commit
    [
        FILL,
        "INSERT INTO item (id, name) VALUES (20, 'streamed')",
        "UPDATE item SET id = 21 WHERE id = 20",
        "INSERT INTO full_identity VALUES (20, 20, 'old')",
        "UPDATE full_identity SET n = 21 WHERE id = 20",
        "DELETE FROM item WHERE id = 21",
        "SELECT pg_logical_emit_message(true, 'po', 'streamed')",
        FILL,
        "SAVEPOINT one",
        "INSERT INTO by_index VALUES (20, 'rolled back', NULL)",
        FILL,
        "ROLLBACK TO SAVEPOINT one",
        "INSERT INTO by_index VALUES (21, 'kept', '{ok}')",
        "SAVEPOINT two",
        "ALTER TABLE no_identity ADD COLUMN gone int",
        "INSERT INTO no_identity VALUES (20, 20)",
        FILL,
        "ROLLBACK TO SAVEPOINT two",
        "ALTER TABLE no_identity ADD COLUMN stays text",
        "INSERT INTO no_identity VALUES (21, 'twenty-one')",
        "TRUNCATE child, parent CASCADE",
        FILL,
    ],
    [FILL, "INSERT INTO item (id) VALUES (30)", FILL, "ROLLBACK"],
    ["INSERT INTO item (id) VALUES (40)", "PREPARE TRANSACTION 'po_commit'"],
    ["COMMIT PREPARED 'po_commit'"],
    ["INSERT INTO item (id) VALUES (41)", "PREPARE TRANSACTION 'po_rollback'"],
    ["ROLLBACK PREPARED 'po_rollback'"],
    [FILL, "INSERT INTO item (id) VALUES (42)", FILL, "PREPARE TRANSACTION 'po_streamed'"],
    ["COMMIT PREPARED 'po_streamed'"],
    ["INSERT INTO no_identity VALUES (50, 'the end')"],
]


def run_workload(connection: psycopg.Connection) -> None:
    for commands in WORKLOAD:
        alone = len(commands) == 1
        if not alone:
            connection.execute("BEGIN")
        for command in commands:
            connection.execute(command)
        if not alone and not commands[-1].startswith(("ROLLBACK", "PREPARE TRANSACTION")):
            connection.execute("COMMIT")


def frames(dsn: str, slot: str, options: dict[str, str], until: int) -> Iterator[bytes]:
    """CopyData after CopyData, until a keepalive says that the server has read up to `until`."""
    conninfo = make_conninfo(dsn, dbname=DATABASE, replication="database", options="-c logical_decoding_work_mem=64kB")
    pgconn = psycopg.pq.PGconn.connect(conninfo.encode())
    try:
        asked = ", ".join(f"{name} '{value}'" for name, value in options.items())
        command = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 ({asked}, publication_names '{PUBLICATION}')"
        result = pgconn.exec_(command.encode())
        if result.status != psycopg.pq.ExecStatus.COPY_BOTH:
            raise SystemExit(f"{command}: {result.error_message.decode()}")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            size, data = pgconn.get_copy_data(1)
            if size <= 0:
                pgconn.put_copy_data(struct.pack("!cQQQqB", b"r", 0, 0, 0, 0, 1))
                pgconn.flush()
                time.sleep(0.1)
                pgconn.consume_input()
                continue
            frame = bytes(data)
            yield frame
            if frame[:1] == b"k" and struct.unpack("!Q", frame[1:9])[0] >= until:
                return
        raise SystemExit(f"{slot}: the server did not get to the end in 30 s")
    finally:
        pgconn.finish()


def capture(dsn: str) -> Iterator[str]:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} ENCODING 'UTF8' TEMPLATE template0").format(sql.Identifier(DATABASE)))
        version = admin.info.server_version // 10000
        sections = [section for section in SECTIONS if version in section[2]]
        try:
            with psycopg.connect(make_conninfo(dsn, dbname=DATABASE), autocommit=True) as connection:
                connection.execute(SCHEMA.encode())
                connection.execute("SELECT pg_replication_origin_create('po_origin')")
                for name, two_phase, _, _ in sections:
                    connection.execute(
                        "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)",
                        [f"po_{name}", two_phase],
                    )
                run_workload(connection)
                row = connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'").fetchone()
                assert row is not None
                until = int(row[0])
            for name, _, _, options in sections:
                yield f"[pg{version} {name}]"
                kept = 0
                for frame in frames(dsn, f"po_{name}", options, until):
                    # one Keepalive is like another, and how many come depends on the clock
                    kept += frame[:1] == b"k"
                    if frame[:1] != b"k" or kept <= 2:
                        yield frame.hex()
        finally:
            for name, _, _, _ in sections:
                admin.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
                    [f"po_{name}"],
                )
            admin.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE roname = 'po_origin'"
            )
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(DATABASE)))


if __name__ == "__main__":
    print(
        "# Real CopyData from walsender. Captured by tests/pgoutput/capture.py, which says how and from what workload."
    )
    for each in sys.argv[1:]:
        print(*capture(each), sep="\n")
