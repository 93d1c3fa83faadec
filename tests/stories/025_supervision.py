"""Story 25: nothing stays stuck. A frozen source, killed processes, a full lake, and a run that is told to end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from psycopg.sql import SQL

from conftest import Database
from mirror import Mirror
from processes import Background, Here, eventually, write_config
from proxy import Proxy
from receiving import changes
from walmere.errors import SourceUnavailable
from walmere.publisher import copy, snapshot
from walmere.publisher.connect import connect, speaking
from walmere.subscription.state import Phase

TIMEOUT = 2.0


def test_a_frozen_source_is_noticed_within_the_timeout_and_received_from_when_it_answers_again(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    with Proxy(database.server.port) as proxy:
        config = database.config(tmp_path / "s", dsn=proxy.dsn(database.dsn), timeout=TIMEOUT)
        with Background(config) as background:
            eventually(database.streaming)
            database.execute("INSERT INTO t VALUES (1)")
            eventually(lambda: len(changes(config)) == 1)
            time.sleep(TIMEOUT * 1.5)  # an idle server answers when it is asked: that is no silence
            assert "has come from the server" not in caplog.text
            proxy.freeze()
            frozen = time.monotonic()
            database.execute("INSERT INTO t VALUES (2)")
            eventually(lambda: background.receiver.trouble is not None, 3 * TIMEOUT)
            assert time.monotonic() - frozen > TIMEOUT / 2
            assert isinstance(background.receiver.trouble, SourceUnavailable)
            proxy.thaw()
            eventually(lambda: len(changes(config)) == 2)
            proxy.freeze()
            background.receiver.stop()
            stopped = time.monotonic()
            background.join(10)
            assert time.monotonic() - stopped < 8
    assert [row["id"] for _, _, row in changes(config) if row] == ["1", "2"]
    said = [record.getMessage() for record in caplog.records if "has come from the server" in record.getMessage()]
    assert said, caplog.text


def test_a_copy_from_a_frozen_source_ends_and_one_that_is_only_slow_does_not(
    database18: Database, tmp_path: Path
) -> None:
    rows = "COPY (SELECT repeat('x', 1000) FROM generate_series(1, 200000)) TO STDOUT"
    slow = "COPY (SELECT 1 FROM generate_series(1, 3), pg_sleep(3)) TO STDOUT"
    with Proxy(database18.server.port) as proxy:
        source = database18.config(tmp_path, dsn=proxy.dsn(database18.dsn), timeout=TIMEOUT / 2).source
        direct = database18.config(tmp_path).source
        with snapshot.exported(direct, "frozen") as made:
            assert b"".join(copy.copy_out(source, "test", made, SQL(slow).format())) == b"1\n1\n1\n"
            chunks = copy.copy_out(source, "test", made, SQL(rows).format())
            assert next(chunks)
            proxy.freeze()
            with pytest.raises(SourceUnavailable, match="has come from the server"):
                list(chunks)


@pytest.mark.long
def test_a_copy_from_a_frozen_source_is_begun_anew(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 100000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    with Proxy(database.server.port) as proxy:
        mirror = Mirror(database, tmp_path, dsn=proxy.dsn(database.dsn), timeout=TIMEOUT)
        copying = "SELECT 1 FROM pg_stat_progress_copy WHERE datname = current_database() AND tuples_processed > 1000"
        with mirror.following():
            eventually(lambda: database.rows(copying), 60)
            proxy.freeze()
            eventually(lambda: mirror.phase("t") is Phase.INIT)  # Spark has tried it some more times by then
            [table] = mirror.tables()
            assert table.error
            proxy.thaw()
            mirror.becomes_equal("t")
            database.execute("INSERT INTO t VALUES (0, 'later')")
            mirror.becomes_equal("t")


def test_a_query_of_a_frozen_source_ends_and_one_that_only_takes_long_does_not(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    with Proxy(database.server.port) as proxy:
        source = database.config(tmp_path, dsn=proxy.dsn(database.dsn), timeout=TIMEOUT / 2).source
        with connect(source, "test") as connection:
            assert connection.execute("SELECT 1 FROM pg_sleep(3)").fetchone() == (1,), "it works: it is waited for"
            proxy.freeze()
            with pytest.raises(SourceUnavailable, match="does not answer"), speaking(source, "asking"):
                connection.execute("SELECT 1")
            assert connection.closed
        config = write_config(database.config(tmp_path), tmp_path / "walmere.toml", dsn=f"'{proxy.dsn(database.dsn)}'")
        config.write_text(config.read_text().replace("[source]", "[source]\ntimeout = 2"))
        began = time.monotonic()
        assert here("check", "-c", config)[0] == 1
        assert time.monotonic() - began < 5
