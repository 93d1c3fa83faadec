from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from psycopg.sql import SQL, Identifier

from conftest import Database
from processes import eventually
from publisher.conftest import source_of
from walmere.config import Source
from walmere.errors import NotConfigured, PublicationMissing, SlotMissing, SourceError, SourceUnavailable
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.replication import XLogData, decode_frame
from walmere.publisher import copy, slot, snapshot
from walmere.publisher.catalog import emit_message, published_tables, require_publications, wal_position
from walmere.publisher.connect import connect
from walmere.publisher.stream import Stream, end_when_lost, identify_system

HARD_NAMES = [
    "Pub",
    "with space",
    'dou"ble',
    "sin'gle",
    "com,ma",
    "back\\slash",
    "per%cent {brace}",
    "🐘",
    "é" * 31 + "x",
]


@contextmanager
def streaming(source: Source, *, create: bool = True) -> Iterator[Stream]:
    with closing(connect(source, "test", replication=True)) as connection:
        if create:
            slot.create(connection, source)
        yield Stream(source, connection, INVALID_LSN)


def payloads(stream: Stream, last: bytes, seconds: float = 10) -> list[bytes]:
    """What the plugin sends, up to the first message that begins with this letter."""
    frames: list[memoryview] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stream.read(frames, 1 << 20)
        messages = [frame.data for frame in map(decode_frame, frames) if isinstance(frame, XLogData)]
        if any(message[:1] == last for message in messages):
            return messages
        stream.wait(0.05)
    raise AssertionError(f"no message {last!r}")


def letters(messages: list[bytes]) -> str:
    return "".join(chr(message[0]) for message in messages)


def test_publications_with_any_name_are_streamed_from(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    for number, name in enumerate(HARD_NAMES):
        database.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY)")
        database.connection.execute(SQL(f"CREATE PUBLICATION {{}} FOR TABLE t{number}").format(Identifier(name)))
    source = source_of(database, *HARD_NAMES)
    require_publications(database.connection, source.publications)
    with streaming(source) as stream:
        database.execute("BEGIN", *(f"INSERT INTO t{n} VALUES (1)" for n in range(len(HARD_NAMES))), "COMMIT")
        assert letters(payloads(stream, b"C")) == "B" + "RI" * len(HARD_NAMES) + "C"


def test_a_publication_is_streamed_alone_though_its_name_looks_like_two(database: Database) -> None:
    database.execute(
        "CREATE TABLE a (id int)", "CREATE TABLE b (id int)", "CREATE PUBLICATION a FOR TABLE a",
        'CREATE PUBLICATION "a,b" FOR TABLE b WITH (publish = \'insert\')',
    )  # fmt: skip
    with streaming(source_of(database, "a,b")) as stream:
        database.execute("INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1)")
        [_, relation, _, _] = payloads(stream, b"C")
        assert b"\0b\0" in relation


def test_the_highest_protocol_that_the_server_has_is_asked_for(database: Database, role: str) -> None:
    # what the server is asked for is in its log, and a Stream Abort tells when it was only from version 4 on
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, filler text)",
        "CREATE PUBLICATION pub FOR TABLE t",
        f'ALTER ROLE "{role}" SET log_replication_commands = on',
        f"ALTER ROLE \"{role}\" SET logical_decoding_work_mem = '64kB'",
    )
    source = source_of(database, user=role)
    protocol, abort_bytes = {15: (3, 9), 18: (4, 25)}[database.connection.info.server_version // 10_000]
    with streaming(source) as stream:
        database.execute(
            "BEGIN",
            "INSERT INTO t VALUES (0, 'kept')",
            "SAVEPOINT s",
            "INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(1, 2000) n",
            "ROLLBACK TO s",
            "INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(1, 2000) n",
            "COMMIT",
        )
        messages = payloads(stream, b"c")
    assert messages[0][:1] == b"S"
    assert {len(message) for message in messages if message[:1] == b"A"} == {abort_bytes}
    assert f"\"proto_version\" '{protocol}'" in database.server.log()


def test_without_streaming_a_large_transaction_comes_at_its_end(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE t (id int, filler text)",
        "CREATE PUBLICATION pub FOR TABLE t",
        f"ALTER ROLE \"{role}\" SET logical_decoding_work_mem = '64kB'",
    )
    with streaming(source_of(database, user=role, streaming=False)) as stream:
        database.execute("INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(1, 2000) n")
        assert letters(payloads(stream, b"C")) == "BR" + "I" * 2000 + "C"


def test_values_look_the_same_whatever_the_role_has_set(database: Database, role: str) -> None:
    database.execute(
        "CREATE TABLE t (at timestamptz, span interval, number float8, bytes bytea)",
        "CREATE PUBLICATION pub FOR TABLE t",
        *(
            f'ALTER ROLE "{role}" SET {setting}'
            for setting in (
                "DateStyle = 'German'",
                "IntervalStyle = 'iso_8601'",
                "TimeZone = 'Asia/Kolkata'",
                "extra_float_digits = -15",
                "bytea_output = 'escape'",
            )
        ),
    )
    with streaming(source_of(database, user=role)) as stream:
        database.execute("INSERT INTO t VALUES ('2024-02-03 04:05:06+00', '1 day 2:00', 0.1::float8 + 0.2, '\\x00ff')")
        insert = payloads(stream, b"C")[2]
    for text in (b"2024-02-03 04:05:06+00", b"1 day 02:00:00", b"0.30000000000000004", b"\\x00ff"):
        assert text in insert


@pytest.mark.parametrize(
    ("slot_has_it", "asked_for", "sent"),
    [(True, True, "bRIP"), (False, True, "bRIP"), (True, False, "bRIP"), (False, False, "BRIC")],
)
def test_prepared_transactions_come_at_prepare_if_slot_or_receiver_says_so(
    database: Database, slot_has_it: bool, asked_for: bool, sent: str
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with closing(connect(source_of(database), "test", replication=True)) as connection:
        slot.create(connection, source_of(database, two_phase=slot_has_it))
    with streaming(source_of(database, two_phase=asked_for), create=False) as stream:
        gid = f"gid {database.name}"
        database.execute("BEGIN", "INSERT INTO t VALUES (1)", f"PREPARE TRANSACTION '{gid}'")
        if sent == "bRIP":
            assert letters(payloads(stream, b"P")) == sent
            database.execute(f"ROLLBACK PREPARED '{gid}'")
        else:
            database.execute(f"COMMIT PREPARED '{gid}'")
            assert letters(payloads(stream, b"C")) == sent


def test_origin_none_leaves_out_what_came_by_replication(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database, origin="none")
    if database.connection.info.server_version < 160_000:
        with pytest.raises(NotConfigured, match=r"source\.origin needs PostgreSQL 16"), streaming(source):
            pass
        return
    with streaming(source) as stream:
        origin = f"origin_{database.name}"
        database.execute(
            f"SELECT pg_replication_origin_create('{origin}')",
            f"SELECT pg_replication_origin_session_setup('{origin}')",
            "INSERT INTO t VALUES (1)",
            "SELECT pg_replication_origin_session_reset()",
            "INSERT INTO t VALUES (2)",
            f"SELECT pg_replication_origin_drop('{origin}')",
        )
        messages = payloads(stream, b"C")
    assert letters(messages) == "BRIC"
    assert messages[2].endswith(b"2")


def test_only_what_is_confirmed_is_forgotten_by_the_server(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database)

    def confirmed() -> Lsn:
        found = slot.read(database.connection, source.slot)
        assert found is not None
        assert found.confirmed_lsn is not None
        return found.confirmed_lsn

    with streaming(source) as stream:
        before = confirmed()
        database.execute("INSERT INTO t VALUES (1)")
        payloads(stream, b"C")
        end = wal_position(database.connection)
        stream.confirm(end, before, before)
        time.sleep(0.1)
        assert confirmed() == before
        stream.confirm(end, end, before)
        eventually(lambda: confirmed() == end)
        eventually(lambda: stream.read([], 1 << 20) is not None and stream.keepalive_lsn >= end)


def test_a_heartbeat_message_comes_through(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with streaming(source_of(database)) as stream:
        emit_message(database.connection, "walmere")
        [message] = payloads(stream, b"M")
        assert b"walmere\0" in message


def test_one_read_takes_all_that_has_arrived_whatever_its_size(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with streaming(source_of(database)) as stream:
        for size in range(1024, 48 << 10, 1024):
            database.execute(f"SELECT pg_logical_emit_message(true, 'test', repeat('x', {size}))")
            all_of_it = size + 150  # Begin, the message, Commit, with headers
            eventually(lambda: stream._pending() >= all_of_it)  # noqa: B023
            frames: list[memoryview] = []
            assert stream.read(frames, 1 << 20)[1]
            sent = [frame.data for frame in map(decode_frame, frames) if isinstance(frame, XLogData)]
            assert letters(sent) == "BMC", f"a part of {size} bytes was left in the socket"


def test_a_slot_that_is_missing_is_named(database: Database) -> None:
    with (
        pytest.raises(SlotMissing, match=f'"walmere_{database.name}" does not exist'),
        streaming(source_of(database), create=False),
    ):
        pass


def test_a_publication_that_is_missing_is_found_in_the_catalog_or_in_the_stream(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    source = source_of(database, "pub", 'No "such" one')
    with pytest.raises(PublicationMissing, match=f'no publication No "such" one in database {database.name}') as caught:
        require_publications(database.connection, source.publications)
    assert 'CREATE PUBLICATION "No ""such"" one"' in caught.value.hint
    if database.connection.info.server_version >= 180_000:
        return  # that version warns in its log and goes on
    with streaming(source) as stream:
        database.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(PublicationMissing, match='publication "No "such" one" does not exist'):
            payloads(stream, b"C")


@pytest.mark.parametrize(
    ("row_filter", "wrong"),
    [("to_tsquery('simple', note) IS NOT NULL", "SQLSTATE 42601"), ("decode(note, 'hex') <> ''", "SQLSTATE 22023")],
)
def test_a_value_is_not_shown_by_a_row_filter_that_fails(database: Database, row_filter: str, wrong: str) -> None:
    """In the stream, and in the copy."""
    if database.major < 15:
        pytest.skip("PostgreSQL 14 has no row filters")
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"CREATE PUBLICATION pub FOR TABLE t WHERE ({row_filter})",
    )
    source = source_of(database)
    with streaming(source) as stream:
        database.execute("INSERT INTO t VALUES (1, '~secret |')")
        with pytest.raises(SourceError, match=wrong) as streamed:
            payloads(stream, b"C")
    command = SQL(f"COPY (SELECT note FROM public.t WHERE {row_filter}) TO STDOUT").format()
    with snapshot.exported(source, f"{source.slot}_copy") as made, pytest.raises(SourceError, match=wrong) as copied:
        list(copy.copy_out(source, "test", made, command))
    for caught in (streamed, copied):
        assert "~" not in str(caught.value)
        assert "row filter" in caught.value.hint


def test_a_walsender_that_is_ended_is_a_passing_trouble(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    source = source_of(database)
    with streaming(source) as stream:
        database.execute(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{source.slot}'"
        )
        with pytest.raises(SourceUnavailable):
            payloads(stream, b"C")


def test_the_system_is_the_one_that_the_catalog_says(database: Database) -> None:
    with closing(connect(source_of(database), "test", replication=True)) as connection:
        system = identify_system(connection)
    identifier: Any = database.value("SELECT system_identifier FROM pg_control_system()")
    assert (system.identifier, system.timeline, system.database) == (str(identifier), 1, database.name)
    assert system.wal_position <= wal_position(database.connection)


def test_published_tables_come_with_their_columns(database: Database) -> None:
    database.execute(
        'CREATE SCHEMA "My Schema"',
        'CREATE TABLE "My Schema"."T 1" (id int PRIMARY KEY, "Größe" text, hidden text)',
        "CREATE TABLE whole (id int PRIMARY KEY, v text)",
        'CREATE PUBLICATION pub FOR TABLE "My Schema"."T 1" (id, "Größe"), whole',
        "CREATE PUBLICATION also FOR TABLE whole",
    )
    with closing(connect(source_of(database), "test")) as connection:
        tables = published_tables(connection, ("pub", "also"))
    assert [(table.schema, table.name, table.columns) for table in tables] == [
        ("My Schema", "T 1", ("id", "Größe")),
        ("public", "whole", ("id", "v")),
    ]


def test_a_partition_is_its_ancestors_where_one_publication_says_so(database: Database) -> None:
    database.execute(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE branch PARTITION OF root FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (id)",
        "CREATE TABLE mid PARTITION OF branch FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE high PARTITION OF branch FOR VALUES FROM (20) TO (30)",
        "CREATE PUBLICATION leaves FOR TABLE root",
        "CREATE PUBLICATION one FOR TABLE branch WITH (publish_via_partition_root)",
        "CREATE PUBLICATION all_of_it FOR TABLE root WITH (publish_via_partition_root)",
    )
    with closing(connect(source_of(database), "test")) as connection:

        def published(*names: str) -> list[str]:
            return [table.name for table in published_tables(connection, names)]

        assert published("leaves") == ["high", "low", "mid"]
        assert published("leaves", "one") == ["branch", "low"]
        assert published("leaves", "one", "all_of_it") == ["root"]


@pytest.mark.parametrize(
    ("on_server", "in_dsn", "expected"),
    [("60s", "", "20s"), ("0", "", "20s"), ("3s", "", "3s"), ("60s", "5min", "5min"), ("60s", "0", "0")],
)
def test_the_time_after_which_the_server_ends_a_lost_connection_is_shortened_and_never_extended(
    database: Database, on_server: str, in_dsn: str, expected: str
) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET wal_sender_timeout = '{on_server}'")
    options = f"?options=-cwal_sender_timeout%3D{in_dsn}" if in_dsn else ""
    source = source_of(database, dsn=f"{database.dsn}{options}")
    with closing(connect(source, "test", replication=True)) as connection:
        end_when_lost(source, connection, 20.0)
        row = connection.execute("SHOW wal_sender_timeout").fetchone()
    assert row == (expected,)
