"""The metrics of a receiver, from the file in which it reports: also `walmere run` and the page have them then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from walmere import paths
from walmere.metrics import names
from walmere.metrics.families import Samples, position

_COUNTERS: Final = {
    "received_bytes": names.RECEIVED_BYTES,
    "transactions": names.RECEIVED_TRANSACTIONS,
    "written_bytes": names.LOGGED_BYTES,
    "reconnects": names.RECONNECTS,
}


def receiver_report(directory: Path) -> Mapping[str, Any]:
    """What the receiver has written about itself; empty if none is running."""
    try:
        found = json.loads((directory / paths.RECEIVER).read_bytes())
    except (OSError, ValueError):  # no receiver, or half written: it is not fsynced
        return {}
    return found if isinstance(found, dict) else {}


def add_receiver(samples: Samples, name: str, reported: Mapping[str, Any]) -> None:
    """Its counters; none if it is not running."""
    if reported:
        samples.add(names.RECEIVER_CONNECTED, reported.get("connected"), name)
        for key, metric in _COUNTERS.items():
            samples.add(metric, reported.get(key), name)


def add_receiver_alone(samples: Samples, name: str, reported: Mapping[str, Any]) -> None:
    """All of a `walmere receive`: its counters and positions. The source is not asked."""
    add_receiver(samples, name, reported)
    samples.add(names.RECEIVER_RUNNING, bool(reported), name)
    for stage in names.STAGES[1:]:
        samples.add(names.POSITION, position(reported.get(f"{stage}_lsn")), name, stage)
