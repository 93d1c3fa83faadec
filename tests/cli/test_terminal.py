"""Commands on a terminal: a live status, a run that shows what it does, a question before a drop."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror
from processes import eventually, running, walmere, write_config
from receiving import receive_all
from terminal import Terminal


@pytest.fixture
def path(database18: Database, tmp_path: Path) -> Path:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database18.config(tmp_path / "s")
    receive_all(database18, config)
    return write_config(config, tmp_path / "walmere.toml")


def slots(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", database.slot))


def test_watch_shows_what_changes_until_ctrl_c(database18: Database, path: Path, tmp_path: Path) -> None:
    with Terminal("status", "--watch", "-c", path) as terminal:
        terminal.expect("nothing receives, and the source keeps its WAL meanwhile")
        terminal.expect(f"hint: walmere receive -c {path}")
        terminal.expect("public.t  i waits for its copy")
        terminal.expect("rate ")
        assert walmere("pause", "-c", path).returncode == 0
        terminal.forget()
        terminal.expect("paused: changes are received, and not applied")
        with running("receive", "-c", path, output=tmp_path / "out"):
            eventually(database18.streaming)
            terminal.forget()
            terminal.expect("receiver  running")
        terminal.interrupt()
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
    assert "\x1b[" in terminal.output


def test_watch_through_a_pipe_has_no_control_characters(path: Path, tmp_path: Path) -> None:
    for form in ((), ("--json",)):
        output = tmp_path / f"out{len(form)}"
        with running("status", "--watch", "-c", path, *form, output=output) as process:
            eventually(lambda: output.read_text().count("walmere_t") > 1, why=output.read_text)  # noqa: B023
            process.terminate()
            assert process.wait(10) == 0
        assert "\x1b" not in output.read_text()


def test_a_drop_asks_first_and_does_nothing_without_a_yes(database18: Database, path: Path) -> None:
    for answer in ("", "n"):
        with Terminal("drop", "-c", path) as terminal:
            terminal.expect(f"Drop slot {database18.slot}, and delete the change log and all state of test in ")
            terminal.send(answer)
            assert terminal.wait() == 1
            assert "walmere: nothing was done" in terminal.text
        assert slots(database18) == 1
    with Terminal("drop", "-c", path) as terminal:
        terminal.expect("[y/N]")
        terminal.send("y")
        assert terminal.wait() == 0
    assert slots(database18) == 0
    with Terminal("drop", "--yes", "-c", path) as terminal:
        assert terminal.wait() == 0
        assert "[y/N]" not in terminal.text


def test_a_run_shows_what_it_does_and_quiet_shows_nothing(database18: Database, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 50000) i",
        "CREATE PUBLICATION pub FOR TABLE t",
    )
    mirror = Mirror(database18, tmp_path)
    with Terminal("run", "-c", mirror.file) as terminal:
        terminal.expect("starting Spark")
        terminal.expect("public.t: 50,000 rows copied", 120)
        terminal.expect("1 of 1 tables copied", 60)
        database18.execute("DELETE FROM t WHERE id <= 10")
        terminal.expect("10 changes, 1 of 1 tables copied", 60)
        terminal.interrupt()
        assert terminal.wait() == 0
        assert "1 table, 10 changes applied, up to " in terminal.text
    quiet = walmere("run", "--once", "--quiet", "-c", mirror.file)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
