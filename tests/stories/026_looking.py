"""Story 26: what people look at tells the truth: the lag, which tables are behind, and what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import Database
from mirror import Mirror
from processes import Here, eventually
from receiving import receive_all
from walmere import Subscription
from walmere.changelog.search import ManifestSearch
from walmere.names import TableName
from walmere.sinks.base import Upkeep
from walmere.sinks.delta.sink import DeltaSink
from walmere.subscription.requests.cuts import Cut
from walmere.subscription.state import copy_again
from walmere.subscription.status import status
from walmere.subscription.target import target_status
from walmere.verify import point, proof
from walmere.verify.open_transactions import Visible, boundary

HEAVY = {"numpy", "pyarrow", "deltalake", "pyspark", "obstore", "psycopg2", "rich"}
"""What `walmere status --json` of a local subscription does not import: it would take longer than all the rest."""
MODULES_AT_THE_END = """
import sys
from walmere.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.fixture
def mirror(database_under_test: Database, tmp_path: Path) -> Mirror:
    database_under_test.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE TABLE quiet (id int PRIMARY KEY)",
        "CREATE TABLE private (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 100)",
        "CREATE PUBLICATION pub FOR TABLE t, u, quiet",
    )
    return Mirror(database_under_test, tmp_path, heartbeat=0.5)


def committed(mirror: Mirror, statement: str) -> float:
    """Do it, and return when it was committed."""
    mirror.database.execute(statement)
    return float(mirror.database.value("SELECT extract(epoch FROM clock_timestamp())::float8"))


def lags(state: dict[str, Any]) -> dict[str, float | None]:
    return {each["name"].removeprefix("public."): each["lag_seconds"] for each in state["tables"]}


def test_the_lag_is_the_age_of_the_oldest_commit_that_is_not_applied(mirror: Mirror, here: Here) -> None:
    mirror.run_once()
    committed(mirror, "INSERT INTO private VALUES (1)")
    first = committed(mirror, "INSERT INTO t VALUES (101)")
    mirror.database.execute("SELECT pg_sleep(1.2)")
    second = committed(mirror, "INSERT INTO u VALUES (1)")
    unknown = status(mirror.config)
    assert unknown["lag_seconds"] is None, "nothing receives, and the source has more"
    assert not unknown["caught_up"]
    assert (unknown["receiver"]["running"], unknown["receiver"]["lag_seconds"]) == (False, None)
    code, said, _ = here("status", "-c", mirror.file)
    assert (code, "seconds unknown: no receiver is running" in said) == (0, True)
    receive_all(mirror.database, mirror.config)
    state = status(mirror.config)
    now = time.time()
    assert state["lag_seconds"] == pytest.approx(now - first, abs=1)
    assert lags(state) == {
        "quiet": 0.0,
        "t": pytest.approx(now - first, abs=1),
        "u": pytest.approx(now - second, abs=1),
    }
    assert (lags(state)["t"] or 0) - (lags(state)["u"] or 0) >= 1.2
    assert (state["behind"], state["caught_up"]) == (["public.t", "public.u"], False)
    code, said, _ = here("status", "-c", mirror.file)
    assert "behind    public.t, public.u" in said
    assert re.search(r"^  lag +[0-9.]+ k?B, [0-9.]+ s$", said, re.MULTILINE), said
    with mirror.following():
        mirror.becomes(lambda: status(mirror.config)["caught_up"])
        with closing(Cut(mirror.config.subscription.directory, 60)):  # no batch is planned meanwhile
            time.sleep(0.5)  # one that was planned before ends
            held = committed(mirror, "INSERT INTO quiet VALUES (1)")
            eventually(lambda: status(mirror.config)["behind"] == ["public.quiet"])
            mirror.database.execute("SELECT pg_sleep(1.2)")
            state = status(mirror.config)
            assert state["lag_seconds"] == pytest.approx(time.time() - held, abs=1)
            assert lags(state)["t"] == 0.0
        mirror.becomes(lambda: status(mirror.config)["caught_up"])
        mirror.assert_equal("t", "u", "quiet")
        for _ in range(10):  # heartbeats come, and changes of a table that is not published
            committed(mirror, "INSERT INTO private SELECT count(*) + 1 FROM private")
            mirror.database.execute("SELECT pg_sleep(0.2)")
            state = status(mirror.config)
            assert (state["lag_seconds"], state["behind"], {*lags(state).values()}) == (0.0, [], {0.0})
            assert state["receiver"]["running"]
            assert state["receiver"]["lag_seconds"] < 1


def deleted_rows_by_quick_status(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By table, from `walmere status` in a process of its own, which must not import Arrow, and must be right."""
    command = [sys.executable, "-c", MODULES_AT_THE_END, "status", "-c", str(mirror.file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stderr.split())
    found = sizes(json.loads(done.stdout))
    assert found == sizes(by_replay(mirror, monkeypatch))
    return {each["name"]: each["deleted_rows"] for each in found["tables"]}


def sizes(state: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "files", "bytes", "deleted_rows")
    return {"disk": state["disk"], "tables": [{key: each[key] for key in keys} for each in state["tables"]]}


def by_replay(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The status if no commit says how large a table is."""
    with monkeypatch.context() as patch:
        patch.setattr(target_status, "_recorded", lambda *_: {})
        return Subscription(mirror.file).status()


@pytest.mark.long
def test_a_table_that_waits_for_a_new_copy_is_behind_whatever_the_others_have_applied(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.run_once()
    receive_all(mirror.database, mirror.config)
    tables = mirror.tables()
    [waiting] = [each.oid for each in tables if each.name == "public.u"]
    tables.change({waiting: copy_again})
    state = status(mirror.config)
    assert (state["behind"], state["caught_up"]) == (["public.u"], False)
    assert lags(state) == {"quiet": 0.0, "t": 0.0, "u": None}
    mirror.database.execute("INSERT INTO u VALUES (1)", "DELETE FROM t WHERE id < 50")
    mirror.set("maintenance", deleted_share=1.0)  # not purged by this run
    mirror.run_once()
    assert status(mirror.config)["behind"] == []
    assert deleted_rows_by_quick_status(mirror, monkeypatch) == {"public.quiet": 0, "public.t": 49, "public.u": 0}
    DeltaSink(str(tmp_path / "lake")).optimize(TableName("public", "t"), limits=Upkeep(deleted_share=0))
    assert deleted_rows_by_quick_status(mirror, monkeypatch) == {"public.quiet": 0, "public.t": 0, "public.u": 0}
    mirror.delta("t").alter.set_table_properties({"delta.appendOnly": "false"})
    state = Subscription(mirror.file).status()
    assert sizes(state) == sizes(by_replay(mirror, monkeypatch)), "the newest commit is another program's"
    mirror.assert_equal("t", "u", "quiet")


def test_status_without_its_source_shows_what_is_known_here_and_exits_with_1(mirror: Mirror, here: Here) -> None:
    mirror.run_once()
    committed(mirror, "INSERT INTO t VALUES (101)")
    receive_all(mirror.database, mirror.config)
    away = mirror.file.read_text().replace(f":{mirror.database.server.port}/", ":1/")
    mirror.file.write_text(away)
    code, said, _ = here("status", "-c", mirror.file, "--json")
    state = json.loads(said)
    assert code == 1
    assert "refused" in state["error"]
    assert {each["name"] for each in state["tables"]} == {"public.t", "public.u", "public.quiet"}
    assert state["behind"] == ["public.t"]
    assert 0 < state["lag_seconds"] < 60
    code, said, _ = here("status", "-c", mirror.file)
    assert (code, "public.quiet" in said, "refused" in said) == (1, True, True)


@pytest.mark.long
def test_a_table_that_is_rewritten_locked_or_refused_is_not_compared_and_not_called_different(
    mirror: Mirror, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.run_once()
    database = mirror.database
    # rewritten between the snapshot and the look at it: a newer point helps
    original = proof.Prover._describe
    rewrites = ["VACUUM FULL t", "TRUNCATE u", "INSERT INTO u VALUES (7)"]
    compared: list[set[str]] = []

    def describe(prover: Any, tables: Any, gather: bool) -> Any:
        while rewrites:
            database.execute(rewrites.pop(0))
        compared.append({each.name for each in tables})
        return original(prover, tables, gather)

    monkeypatch.setattr(proof.Prover, "_describe", describe)
    code, said, shown = here("verify", "-c", mirror.file, "--json")
    assert (code, json.loads(said)["equal"]) == (0, True), said + shown
    assert compared == [{"public.t", "public.u", "public.quiet"}, {"public.t", "public.u"}]
    assert "not compared" not in shown
    monkeypatch.setattr(point, "LOCK_TIMEOUT", 0.5)
    with psycopg.connect(database.dsn) as other:

        def locked(prover: Any, tables: Any, gather: bool) -> Any:
            other.execute("LOCK TABLE u IN ACCESS EXCLUSIVE MODE")  # after the snapshot, which would wait for it
            return original(prover, tables, gather)

        monkeypatch.setattr(proof.Prover, "_describe", locked)
        code, said, shown = here("verify", "-c", mirror.file, "--json", "--wait", "2")
    report = json.loads(said)
    assert (code, report["equal"]) == (3, None)
    assert [(each["name"], each["outcome"]) for each in report["tables"]][2] == ("public.u", "not compared")
    assert [each["equal"] for each in report["tables"]] == [True, True, None], "the lock concerns its table alone"
    assert "lock timeout" in report["tables"][2]["error"]
    assert "not compared  public.u" in shown
    mirror.assert_equal("t", "u", "quiet")


@pytest.mark.long
def test_a_table_is_compared_beside_transactions_that_stay_open(
    mirror: Mirror, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "SLOT_WAIT", 0.5)
    mirror.run_once()
    database = mirror.database
    with psycopg.connect(database.dsn) as other:
        other.execute("LOCK TABLE u IN ACCESS EXCLUSIVE MODE")
        other.execute("INSERT INTO t VALUES (1000)")
        database.execute(
            "INSERT INTO t VALUES (500)",
            "BEGIN; INSERT INTO t VALUES (501); DELETE FROM t WHERE id = 1; PREPARE TRANSACTION 'open'",
        )
        with mirror.following():
            database.execute("INSERT INTO t VALUES (502)")
            code, said, shown = here("verify", "-c", mirror.file, "--table", "t", "--json")
            assert (code, json.loads(said or "{}").get("equal")) == (0, True), said + shown
            database.execute("COMMIT PREPARED 'open'")
            mirror.becomes_equal("t")
    mirror.run_once()
    mirror.assert_equal("t", "u", "quiet")


def test_a_snapshot_of_a_source_that_writes_nothing_has_an_lsn(mirror: Mirror) -> None:
    mirror.run_once()
    with ManifestSearch(mirror.config.changelog) as log:
        end = log.end_lsn
    visible = Visible.parse(mirror.database.value("SELECT pg_current_snapshot()::text"))
    assert boundary(mirror.config.changelog, end, end, visible) == end
    mirror.assert_equal("t", "u", "quiet")


def test_verify_names_the_transactions_that_are_in_its_way(
    mirror: Mirror, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(point, "snapshot_beside_open_transactions", refuse)
    mirror.run_once()
    database = mirror.database
    with psycopg.connect(database.dsn) as other:
        other.execute("LOCK TABLE u IN ACCESS EXCLUSIVE MODE")
        code, said, shown = here("verify", "-c", mirror.file, "--table", "t", "--wait", "1")
        assert (code, said) == (3, "")
        assert f"pid {other.info.backend_pid} of role postgres" in shown
        assert "idle in transaction" in shown
        assert "--wait" in shown
        assert "Traceback" not in shown
        temporary = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = %s"
        eventually(lambda: database.value(temporary, database.name) == 0)
    code, _, _ = here("verify", "-c", mirror.file)
    assert code == 0
