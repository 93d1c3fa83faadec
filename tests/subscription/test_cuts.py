"""Who wants a batch to end at an LSN holds the run first, then says where; and if it ends, is forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from walmere.lsn import Lsn
from walmere.subscription.requests.cuts import ActiveCuts, Cut, active

START, LSN, END = Lsn.parse("0/100"), Lsn.parse("0/180"), Lsn.parse("0/200")


def test_a_hold_becomes_a_cut_and_both_end_with_it(tmp_path: Path) -> None:
    assert active(tmp_path) == ActiveCuts()
    cut = Cut(tmp_path, 60)
    assert active(tmp_path) == ActiveCuts(hold=True)
    assert active(tmp_path).end(START, END) == START
    cut.at(LSN)
    assert active(tmp_path) == ActiveCuts(at=(LSN,))
    assert active(tmp_path).end(START, END) == LSN
    cut.close()
    assert active(tmp_path) == ActiveCuts()


def test_a_cut_counts_while_the_batch_can_end_there() -> None:
    cut = ActiveCuts(at=(END, LSN))
    assert cut.end(START, END) == LSN, "the first of them"
    assert cut.end(LSN, END) == END
    assert cut.end(END, Lsn(END + 1)) is None, "that is over"
    assert cut.end(START, Lsn(LSN - 1)) is None, "the log has not come so far"
    assert ActiveCuts().end(START, END) is None


def test_a_hold_expires(tmp_path: Path) -> None:
    cut = Cut(tmp_path, 0)
    assert active(tmp_path) == ActiveCuts()
    cut.at(LSN)
    assert active(tmp_path) == ActiveCuts(at=(LSN,)), "but it can still become a cut"
    cut.close()


def test_who_was_killed_holds_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from walmere.subscription.requests.cuts import Cut;"
            f"cut = Cut(pathlib.Path({str(tmp_path)!r}), 600); print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert active(tmp_path) == ActiveCuts(hold=True)
    child.kill()
    child.communicate()
    assert active(tmp_path) == ActiveCuts()
    assert not list(tmp_path.glob("cuts/*"))
