"""Wherever it dies, the next start finds what was confirmed, and with what is sent again, all of it once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from changelog.crashing import TRUTH, stream
from changelog.walsender import START, assert_sound, begin_log, read
from walmere.lsn import Lsn


@pytest.mark.parametrize("how", ["kill", "power"])
def test_the_log_holds_the_truth_after_a_death_at_any_step(tmp_path: Path, how: str) -> None:
    tests = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "changelog.crashing", tmp_path, how],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])},
    )
    died = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))[:-1]
    assert len(died) > 100, "there are many ways to die"
    for directory in died:
        log = directory / "log"
        confirmed = Lsn.parse((directory / "confirmed").read_text() or str(START))
        writer, assembly = begin_log(log, confirmed)
        assert writer.durable >= confirmed, directory
        trimmed = writer.summary.header.start_lsn > START  # it died after retention had done its work
        for frames in stream():
            assembly.feed(frames)
        writer.flush()
        writer.close()
        assert read(log) == ([] if trimmed else TRUTH), directory
        assert_sound(log)
        writer, _ = begin_log(log, writer.durable)  # and it can be opened once more
        writer.close()
