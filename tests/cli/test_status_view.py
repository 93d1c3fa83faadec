"""What `walmere status` prints: what is wrong comes first, each with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from walmere.cli import status_view
from walmere.subscription.advice import Advice

TABLE: dict[str, Any] = {
    "name": "public.orders[1]", "phase": "d", "published": True, "rows_copied": 10, "rows_estimated": 100,
    "applied_lsn": None, "lag_seconds": None, "rejects": 0, "files": None,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "subscription": "shop", "slot": None, "store": None, "source_lsn": "0/1", "received_lsn": None, "durable_lsn": None,
    "applied_lsn": "0/0", "lag_bytes": None, "lag_seconds": None, "caught_up": False, "behind": ["public.orders[1]"],
    "receiver": {"running": False, "lag_bytes": None, "lag_seconds": None}, "tables": [TABLE],
    "disk": {"log_bytes": 0, "lake_bytes": None},
}  # fmt: skip


def test_what_is_wrong_is_first_and_of_a_table_last_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    advice = [
        Advice("problem", "casting: no [red]", "alter it", "public.orders[1]"),
        Advice("warning", "paused", "walmere resume -c [shop].toml"),
    ]
    status_view.status(STATUS, advice)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["shop", "  paused", "    hint: walmere resume -c [shop].toml"]
    assert lines[-2:] == ["  public.orders[1]: casting: no [red]", "    hint: alter it"]
    assert "  applied   –" in lines, "nothing is applied yet"
    assert any("d being copied" in line and "10 of about 100" in line for line in lines)
