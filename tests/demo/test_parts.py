"""The demo's parts by themselves: the comparison, the lag, the place, the display, and signals."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from conftest import Database
from walmere.config import DeltaTarget, PostgresTarget
from walmere.demo.compare import compare_databases, compare_tables
from walmere.demo.display import Display, View, line
from walmere.demo.interruption import Interrupted, Interruptions
from walmere.demo.lag import Lag
from walmere.demo.place import MARK, Place
from walmere.demo.subscriber import RunReport
from walmere.demo.target import opened
from walmere.errors import ConfigError
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.subscription.state import Phase, TableState
from walmere.testing.server import Server

SCHEMA = pa.schema([("id", pa.int64()), ("total", pa.decimal128(12, 2)), ("tags", pa.list_(pa.string()))])
ROWS = [{"id": i, "total": Decimal(i), "tags": ["a", str(i)]} for i in range(100)]


def table(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


def test_tables_of_the_same_rows_are_equal_in_any_order() -> None:
    verdict = compare_tables("t", table(ROWS), table(ROWS[::-1]), ["id"])
    assert verdict.equal
    assert (verdict.rows, str(verdict)) == (100, "equal")


def test_what_differs_is_counted_and_named_by_key() -> None:
    target = [*ROWS[1:50], *ROWS[51:], ROWS[7], {**ROWS[3], "id": 200}]
    target[1] = {**ROWS[2], "tags": ["a"]}
    verdict = compare_tables("t", table(ROWS), table(target), ["id"])
    assert not verdict.equal
    assert (verdict.missing, verdict.extra, verdict.different) == (2, 2, 1)
    assert str(verdict) == "2 missing, 2 extra, 1 different: (0), (2), (7), (50), (200)"


def test_null_and_a_value_are_different() -> None:
    verdict = compare_tables("t", table(ROWS), table([{**ROWS[0], "total": None}, *ROWS[1:]]), ["id"])
    assert verdict.different == 1


def test_two_databases_are_compared_by_every_column(server18: Server) -> None:
    source, target = Database(server18), Database(server18)
    try:
        for database in (source, target):
            database.execute(
                "CREATE TABLE carts (id uuid PRIMARY KEY, total numeric)",
                "INSERT INTO carts SELECT md5(i::text)::uuid, i / 7.0 FROM generate_series(1, 100) i",
            )
        with opened(source.dsn) as here, opened(target.dsn) as there:
            assert str(compare_databases(here, there, "carts")) == "equal"
            target.execute(
                "DELETE FROM carts WHERE id = md5('8')::uuid",
                "INSERT INTO carts VALUES (md5('a')::uuid, NULL)",
            )
            assert str(compare_databases(here, there, "carts")).startswith("1 missing, 1 extra: (")
            target.execute("UPDATE carts SET total = total + 0.01 WHERE id = md5('7')::uuid")
            assert compare_databases(here, there, "carts").different == 1
            target.execute("ALTER TABLE carts ALTER total TYPE numeric(20, 2)")
            assert "total numeric(20,2) instead of" in str(compare_databases(here, there, "carts"))
    finally:
        source.drop()
        target.drop()


def test_lag_is_the_time_since_something_is_missing() -> None:
    lag = Lag()
    assert lag.seconds(0.5, Lsn(0)) == 0
    for second in range(1, 11):
        lag.note(float(second), Lsn(second * 100))
    assert lag.seconds(10.5, Lsn(350)) == 7.5, "at second 3 it had all, at second 4 it had not"
    assert lag.seconds(10.5, Lsn(999)) == 1.5
    assert lag.seconds(10.5, Lsn(1000)) == 0, "nothing is missing"


def test_a_place_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "walmere.toml"
    file.write_text("[source]\n")
    with pytest.raises(ConfigError, match="files that are not from a demo") as refused, Place(tmp_path):
        pass
    assert "--directory" in refused.value.hint
    assert file.read_text() == "[source]\n"
    file.unlink()
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="files that are not from a demo"), Place(tmp_path):
        pass
    with pytest.raises(ConfigError, match="files that are not from a demo"), Place(Path("/dev/null")):
        pass


def test_what_an_earlier_demo_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    with Place(tmp_path / "a" / "demo") as place:
        config = place.configure("postgresql://postgres@127.0.0.1:1/shop")
        assert isinstance(config.target, DeltaTarget)
        assert config.target.path == place.lake
        place.lake.mkdir()
        (place.lake / "old").touch()
        (place.directory / "notes").touch()
        with pytest.raises(ConfigError, match="another demo is running"), Place(place.directory):
            pass
    with Place(place.directory):
        assert sorted(path.name for path in place.directory.iterdir()) == ["notes", "walmere.toml"]
        assert place.config_file.read_text() == MARK


def test_a_database_as_the_target_gets_the_tables_from_the_source(tmp_path: Path) -> None:
    with Place(tmp_path / "demo") as place:
        config = place.configure("postgresql://postgres@127.0.0.1:1/shop", "postgresql://postgres@127.0.0.1:2/shop")
    assert isinstance(config.target, PostgresTarget)
    assert config.target.create_tables
    assert config.target.dsn.get_secret_value().endswith(":2/shop")


def test_a_target_whose_server_runs_is_not_replaced(tmp_path: Path) -> None:
    with Place(tmp_path / "demo") as place:
        place.cluster.mkdir()
    pid = place.cluster / "postmaster.pid"
    pid.write_text(f"{os.getpid()}\n")
    with pytest.raises(ConfigError, match="is running there") as refused, Place(place.directory):
        pass
    assert str(os.getpid()) in refused.value.hint
    pid.unlink()
    with Place(place.directory):
        assert not place.cluster.exists()


@contextmanager
def resource(events: list[str], sending: str) -> Iterator[None]:
    def event(name: str) -> None:
        events.append(f"{name} begins")
        if name == sending:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        events.append(f"{name} ends")

    event("start")
    try:
        yield
    finally:
        event("stop")


@pytest.mark.parametrize("sending", ["start", "stop"])
def test_a_resource_is_started_and_ended_to_the_end(sending: str) -> None:
    events: list[str] = []
    with (
        pytest.raises(Interrupted) as interrupted,
        Interruptions() as signals,
        signals.guard(resource(events, sending)),
    ):
        events.append("inside")
    assert interrupted.value.exit_code == 130
    inside = ["inside"] if sending == "stop" else []
    assert events == ["start begins", "start ends", *inside, "stop begins", "stop ends"]


def test_inside_a_signal_interrupts_at_once_and_later_ones_change_nothing() -> None:
    events: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with (  # noqa: PT012
        pytest.raises(Interrupted) as interrupted,
        Interruptions() as signals,
        signals.guard(resource(events, "stop")),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        events.append("slept")
    assert interrupted.value.exit_code == 143
    assert events == ["start begins", "start ends", "stop begins", "stop ends"]
    assert signal.getsignal(signal.SIGTERM) == before


VIEW = View(
    "applying changes of the writers",
    23.4,
    (
        (TableState(TableName("public", "carts"), 1, Phase.READY, rows_copied=6000), 1204),
        (TableState(TableName("public", "orders"), 2), 0),
    ),
    6120,
    212.3,
    Lsn.parse("0/5003000"),
    Lsn.parse("0/5000000"),
    0.84,
    110_000.0,
    1450.0,
)


def test_a_terminal_shows_a_table_and_a_file_gets_lines() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=100))
    with display.watching():
        display.show(VIEW)
        display.show(View("too soon to be seen", 23.5, VIEW.tables))
    shown = screen.getvalue()
    for text in ("r ready", "i waiting", "6,000", "1,204", "0/5003000", "lag 0.8 s, 12 kB", "212/s", "110,000 rows/s"):
        assert text in shown
    assert "too soon" not in shown
    file = io.StringIO()
    display = Display(Console(file=file, soft_wrap=True, highlight=False))
    with display.watching():
        display.show(VIEW)
    assert file.getvalue() == line(VIEW) + "\n"
    assert "\x1b" not in file.getvalue()
    assert "1 waiting, 1 ready; 6,000 rows copied; 6,120 transactions written, 212/s" in line(VIEW)


def test_progress_includes_an_lsn_when_every_table_has_it() -> None:
    said = (
        b'{"time": 1.5, "applied_lsn": "0/20", "tables": [{"name": "public.a", "schema": "public", "table": "a",'
        b' "oid": 1, "phase": "r", "rows_copied": 3, "snapshot_lsn": "0/1", "applied_lsn": "0/20", "rejects": 0,'
        b' "error": null, "published": true, "definition": null, "awaits": null, "changes": 7}]}'
    )
    progress = RunReport.parse(said)
    assert (progress.rows_copied, progress.changes_applied) == (3, 7)
    assert progress.includes(Lsn(0x20))
    assert not progress.includes(Lsn(0x21))
    assert not RunReport().includes(Lsn(0)), "nothing is known of any table"
