"""`walmere pause` and `walmere resume`: a request that stays until it is taken back, also across restarts.

While a subscription is paused, nothing is copied or applied, and upkeep rests: nothing is written to the target. The
receiver goes on, so that no WAL is retained at the source; the changes wait in the change log. The batch that is being
applied is completed. A copy that is running is cancelled, as by ALTER SUBSCRIPTION … DISABLE, and starts again later.

The request is a file. With a store it is there (`walmere.subscription.shared.requests`), and the driver keeps the file
equal to it.
"""

from __future__ import annotations

import time
from pathlib import Path

from walmere import paths
from walmere.storage import write_durably


def set_paused(directory: Path, paused: bool) -> None:
    """Pause, or resume. Does nothing if that is so already."""
    if not paused:
        (directory / paths.PAUSED).unlink(missing_ok=True)
    elif not is_paused(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / paths.PAUSED, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")


def is_paused(directory: Path) -> bool:
    """Whether nothing is to be copied or applied. Called often."""
    return (directory / paths.PAUSED).exists()
