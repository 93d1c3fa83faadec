"""Replication origin progress: the slowest sink counts, and it survives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from walmere.lsn import Lsn
from walmere.subscription.progress import SinkPositions


def test_without_a_sink_there_is_no_applied_position(tmp_path: Path) -> None:
    assert SinkPositions(tmp_path).applied() is None
    (tmp_path / "positions").mkdir()
    assert SinkPositions(tmp_path).applied() is None


def test_the_slowest_sink_counts(tmp_path: Path) -> None:
    positions = SinkPositions(tmp_path)
    positions.advance("delta", Lsn(300))
    positions.advance("postgres", Lsn(100))
    assert positions.applied() == Lsn(100)
    positions.advance("postgres", Lsn(400))
    assert SinkPositions(tmp_path).applied() == Lsn(300), "from disk"


def test_the_log_is_kept_for_a_sink_from_when_it_joins(tmp_path: Path) -> None:
    positions = SinkPositions(tmp_path)
    positions.advance("query-report", Lsn(300))
    positions.join("target")
    assert positions.positions() == {"query-report": Lsn(300), "target": Lsn(0)}
    positions.join("query-report")
    assert positions.positions()["query-report"] == Lsn(300), "it goes on"


def test_a_file_half_written_by_a_crash_is_not_read(tmp_path: Path) -> None:
    positions = SinkPositions(tmp_path)
    positions.advance("delta", Lsn(300))
    (tmp_path / "positions" / "delta.json.tmp").write_text('{"ls')
    assert positions.applied() == Lsn(300)


def test_a_new_sinks_name_is_durable_before_it_is_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its file a sink would count as none, and retention would not wait for it."""
    synced = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    SinkPositions(tmp_path / "s").advance("delta", Lsn(1))
    assert synced == ["delta.json.tmp", "positions", "s"]


def test_positions_of_an_earlier_version_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "origins").mkdir()
    (tmp_path / "origins" / "query-report.json").write_text('{"lsn": "0/64"}')
    assert SinkPositions(tmp_path).positions() == {"query-report": Lsn(100)}
    assert SinkPositions(tmp_path).applied() == Lsn(100)
    assert not (tmp_path / "origins").exists()
