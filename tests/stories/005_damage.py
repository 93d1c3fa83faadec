"""Story 5: the disk loses, tears or refuses something. What PostgreSQL still has is received again, or it is named."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Database
from processes import eventually, running, walmere, write_config
from receiving import changes, files, named_files, receive_all, summary
from walmere.changelog.manifest_file import NAME
from walmere.config import Config
from walmere.errors import ChangeLogDamaged, ChangeLogError
from walmere.lsn import Lsn
from walmere.subscription.receiver import Receiver
from workload import log_says, source_says

Damage = Callable[[Path], None]


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def deleted(path: Path) -> None:
    path.unlink()


@pytest.fixture
def log(database18: Database, tmp_path: Path) -> Config:
    """Three segments, and a slot `before_…` that remembers how it was before the last two."""
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    config = database.config(tmp_path / "s")
    receive_all(database, config)
    database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'truth_{database.name}')")
    for number in (1, 2, 3):
        database.execute(f"INSERT INTO t VALUES ({number}, repeat('x', 1000))")
        receive_all(database, config)
        if number == 1:
            database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'before_{database.name}')")
    assert len(files(config)) == 3
    return config


def forget_confirmation(database: Database) -> None:
    """The slot as it was before the last two segments, as after a crash of the server."""
    database.execute(
        f"SELECT pg_drop_replication_slot('{database.slot}')",
        f"SELECT pg_copy_logical_replication_slot('before_{database.name}', '{database.slot}')",
    )


def contents(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in config.changelog.iterdir() if path.name != "lock"}


def confirmed(database: Database) -> Lsn:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return Lsn.parse(database.value(query, database.slot))


def assert_truth(database: Database, config: Config) -> None:
    assert log_says(config) == source_says(database, f"truth_{database.name}")
    assert files(config) == named_files(config)
    assert confirmed(database) <= summary(config).end_lsn


@pytest.mark.parametrize("which", [1, 2], ids=["second", "last"])
@pytest.mark.parametrize("damage", [truncated, flipped, deleted])
def test_a_damaged_segment_that_was_not_confirmed_is_received_again(
    database18: Database, log: Config, damage: Damage, which: int
) -> None:
    forget_confirmation(database18)
    damage(sorted(log.changelog.glob("*.arrow"))[which])
    database18.execute("INSERT INTO t VALUES (4)")
    receive_all(database18, log)
    assert [change[2]["id"] for change in changes(log)] == ["1", "2", "3", "4"]
    assert_truth(database18, log)


@pytest.mark.parametrize("damage", [truncated, deleted])
def test_a_damaged_segment_that_was_confirmed_stops_the_receiver_and_is_named(
    database18: Database, log: Config, tmp_path: Path, damage: Damage
) -> None:
    last = max(log.changelog.glob("*.arrow"))
    damage(last)
    before, position = contents(log), confirmed(database18)
    database18.execute("INSERT INTO t VALUES (4)")
    with pytest.raises(ChangeLogDamaged, match=last.name):
        receive_all(database18, log)
    said = walmere("receive", "--once", "-c", write_config(log, tmp_path / "walmere.toml"))
    assert said.returncode == 1
    assert str(last) in said.stderr
    assert "walmere drop" in said.stderr
    assert contents(log) == before
    assert confirmed(database18) == position


def test_a_flipped_bit_in_what_was_confirmed_is_found_when_it_is_read(
    database18: Database, log: Config, tmp_path: Path
) -> None:
    """Reading all of it at every start would take too long."""
    first = min(log.changelog.glob("*.arrow"))
    flipped(first)
    with pytest.raises(ChangeLogDamaged, match=f"{first.name}: block [0-9] fails its checksum"):
        changes(log)
    said = walmere("log", "-c", write_config(log, tmp_path / "walmere.toml"))
    assert said.returncode == 1
    assert str(first) in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("left", [0, 9, 120, -1])
def test_a_torn_last_line_of_the_manifest_is_cut_off_and_received_again(
    database18: Database, log: Config, left: int
) -> None:
    forget_confirmation(database18)
    path = log.changelog / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    receive_all(database18, log)
    assert_truth(database18, log)


def test_a_torn_manifest_that_was_confirmed_stops_the_receiver_and_nothing_is_cut(
    database18: Database, log: Config
) -> None:
    path = log.changelog / NAME
    path.write_bytes(path.read_bytes()[:-3])
    before = contents(log)
    with pytest.raises(ChangeLogDamaged, match=NAME):
        receive_all(database18, log)
    assert contents(log) == before


def test_a_flipped_bit_inside_the_manifest_is_named(database18: Database, log: Config) -> None:
    forget_confirmation(database18)
    path = log.changelog / NAME
    data = bytearray(path.read_bytes())
    assert data.count(b"\n") > 2, "the last line may be torn, and is no error then"
    data[data.index(b"\n") + 20] ^= 1  # in the second
    path.write_bytes(data)
    before = contents(log)
    with pytest.raises(ChangeLogDamaged, match=r"manifest\.jsonl.*fails its checksum"):
        receive_all(database18, log)
    assert contents(log) == before


def test_a_manifest_that_is_gone_does_not_make_the_segments_left_overs(database18: Database, log: Config) -> None:
    (log.changelog / NAME).unlink()
    before = contents(log)
    with pytest.raises(ChangeLogDamaged, match="no manifest"):
        receive_all(database18, log)
    assert contents(log) == before


# No room


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_full_disk_ends_the_receiver_with_a_hint_and_with_room_it_goes_on(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    with small_disk(tmp_path / "disk", "1m") as disk:
        config = database.config(disk / "s")
        receive_all(database, config)
        database.execute(f"SELECT pg_copy_logical_replication_slot('{database.slot}', 'truth_{database.name}')")
        path, output = write_config(config, tmp_path / "walmere.toml"), tmp_path / "out"
        with running("receive", "-c", path, output=output) as process:

            def filled() -> bool:
                database.execute(
                    "INSERT INTO t SELECT coalesce(max(id), 0) + 1, (SELECT string_agg(md5(random()::text), '')"
                    " FROM generate_series(1, 2000)) FROM t"
                )
                return process.poll() is not None

            eventually(filled, why=output.read_text)
            assert process.returncode == 1
        assert "No space left on device" in output.read_text()
        assert "make room" in output.read_text()
        assert "Traceback" not in output.read_text()
        assert confirmed(database) <= summary(config).end_lsn, "nothing is confirmed that is not durable"
        with pytest.raises(ChangeLogError, match="No space left"):
            receive_all(database, config)
        assert confirmed(database) <= summary(config).end_lsn
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        receive_all(database, config)
        assert_truth(database, config)
        assert len(log_says(config)) > 3


def test_a_disk_that_is_full_at_the_very_start_is_told(database18: Database, tmp_path: Path) -> None:
    database = database18
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    with small_disk(tmp_path / "disk", "64k") as disk:
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(b"x" * 65536)
        config = database.config(disk / "s")
        with pytest.raises(ChangeLogError, match="No space left"):
            Receiver(config).run(Lsn(1))
        dropped = walmere("drop", "-c", write_config(config, tmp_path / "walmere.toml"))
        assert dropped.returncode == 0, "one can always make room"
        (disk / "filler").unlink()
        database.execute("INSERT INTO t VALUES (1)")
        receive_all(database, config)
        database.execute("INSERT INTO t VALUES (2)")
        receive_all(database, config)
        assert changes(config)[-1] == ("I", "t", {"id": "2", "v": None})
