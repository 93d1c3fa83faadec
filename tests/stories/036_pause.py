"""Story 34: a subscription is paused and resumed. Meanwhile nothing is copied or applied, and receiving goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import walmere
from conftest import Database
from mirror import Mirror
from processes import Here
from proxy import Proxy
from walmere.errors import NotCompared, Paused
from walmere.lsn import Lsn
from walmere.subscription.state import Phase

ROWS = 120_000
COPYING = "SELECT 1 FROM pg_stat_progress_copy WHERE datname = current_database()"


@pytest.fixture
def database(database_under_test: Database) -> Database:
    database_under_test.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        f"INSERT INTO big SELECT i, repeat(md5(i::text), 6) FROM generate_series(1, {ROWS}) i",
        "ANALYZE big",
        "CREATE PUBLICATION pub FOR TABLE big",
    )
    return database_under_test


def table(subscription: walmere.Subscription) -> dict[str, Any]:
    [found] = subscription.status()["tables"]
    return dict(found)


def received(subscription: walmere.Subscription, lsn: Lsn) -> bool:
    """Whether the log has everything before the LSN, and the source need not keep it."""
    state = subscription.status()
    positions = [state["durable_lsn"], state["slot"]["confirmed_lsn"]]
    return all(each is not None and Lsn.parse(each) >= lsn for each in positions)


def test_a_copy_is_seen_to_move_on_and_a_pause_ends_it_while_receiving_goes_on(
    database: Database, tmp_path: Path
) -> None:
    with Proxy(database.server.port) as proxy:
        proxy.delay = 0.05
        mirror = Mirror(database, tmp_path, dsn=proxy.dsn(database.dsn), heartbeat=0.5)
        shop = walmere.Subscription(mirror.file)
        with mirror.following():
            seen: list[int] = []

            def moving() -> bool:
                state = table(shop)
                if state["phase"] == Phase.DATA_SYNC:
                    seen.append(state["rows_copied"])
                assert state["rows_estimated"] == ROWS
                return len({*seen} - {0}) > 1

            mirror.becomes(moving, lambda: str(seen))
            assert seen == sorted(seen)
            assert seen[-1] < ROWS
            assert shop.status()["paused"] is False

            shop.pause()
            mirror.becomes(lambda: mirror.phase("big") is Phase.INIT and not database.rows(COPYING))
            database.execute("INSERT INTO big VALUES (0, 'while it is paused')")
            position = shop.source_position()
            mirror.becomes(lambda: received(shop, position))
            state = shop.status()
            assert state["paused"] is True
            assert state["behind"] == ["public.big"]
            assert state["disk"]["log_bytes"] > 0
            assert table(shop)["phase"] == Phase.INIT
            assert table(shop)["error"] is None

            proxy.delay = 0.0
            shop.resume()
            mirror.becomes_equal("big")
            state = shop.status()
            assert state["paused"] is False
            assert state["disk"]["lake_bytes"] > 0


@pytest.mark.long
def test_a_pause_survives_restarts_and_what_cannot_end_is_refused(
    database: Database, tmp_path: Path, here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(database, tmp_path, heartbeat=0.5)
    mirror.run_once()
    shop = walmere.Subscription(mirror.file)
    assert here("pause", "-c", mirror.file)[:2] == (
        0,
        "paused: changes are received, and not applied; no process on this machine runs it\n",
    )
    for done, error in (
        (lambda: shop.run(once=True), Paused),
        (mirror.run_once, Paused),
        (lambda: shop.resync(["big"]), Paused),
        (shop.verify, NotCompared),
    ):
        with pytest.raises(error, match="paused"):
            done()
    code, _, err = here("run", "--once", "-c", mirror.file)
    assert code == 1
    assert "walmere resume" in err
    assert here("verify", "-c", mirror.file)[0] == 3

    database.execute("CREATE TABLE added (id int PRIMARY KEY)", "INSERT INTO added VALUES (1)")
    caplog.clear()
    with mirror.following():
        mirror.becomes(lambda: "paused: changes are received" in caplog.text)
        database.execute("ALTER PUBLICATION pub ADD TABLE added", "DELETE FROM big WHERE id <= 10")
        position = shop.source_position()
        mirror.becomes(lambda: received(shop, position))
        mirror.becomes(lambda: mirror.phase("added") is Phase.INIT)
        assert len(list(mirror.rows("big"))) == ROWS, "nothing was applied"
        code, said, _ = here("status", "-c", mirror.file)
        assert (code, "paused: changes are received, and not applied" in said) == (0, True)
        assert "i waits for its copy" in said
        assert shop.status()["lag_seconds"] > 0

        assert here("resume", "-c", mirror.file)[:2] == (0, "resumed\n")
        mirror.becomes_equal("big", "added")
        shop.pause()  # between two batches
        database.execute("DELETE FROM big WHERE id <= 20")
        position = shop.source_position()
        mirror.becomes(lambda: received(shop, position))
        state = shop.status()
        assert Lsn.parse(state["applied_lsn"]) < position
        assert not state["caught_up"]
    assert shop.status()["paused"] is True
    shop.resume()
    mirror.run_once()
    mirror.assert_equal("big", "added")
