"""Wherever it dies, the next start finds what was confirmed, and with what is sent again, all of it once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from changelog.crashing import TRUTH, stream
from changelog.walsender import START, assert_sound, begin_log, read
from walmere.lsn import Lsn

MEMORY = Path("/dev/shm")


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory if that can be: what a disk may lose is acted here, and real ones would only take their time."""
    with tempfile.TemporaryDirectory(prefix="walmere-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("how", ["power", pytest.param("kill", marks=pytest.mark.long)])
def test_the_log_holds_the_truth_after_a_death_at_any_step(directory: Path, how: str) -> None:
    tests = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "changelog.crashing", directory, how],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])},
    )
    died = sorted(directory.iterdir(), key=lambda path: int(path.name))[:-1]
    assert len(died) > 100, "there are many ways to die"
    for place in died:
        log = place / "log"
        confirmed = Lsn.parse((place / "confirmed").read_text() or str(START))
        writer, assembly = begin_log(log, confirmed)
        assert writer.durable >= confirmed, place
        trimmed = writer.summary.header.start_lsn > START  # it died after retention had done its work
        for frames in stream():
            assembly.feed(frames)
        writer.flush()
        writer.close()
        assert read(log) == ([] if trimmed else TRUTH), place
        assert_sound(log)
