"""`walmere status --watch`: the status, read again every second, in the same place of the terminal."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.live import Live

from walmere.cli.rate import Speeds
from walmere.cli.status_view import lines

if TYPE_CHECKING:
    from walmere.api import Subscription

_INTERVAL: Final = 1.0


def watch(subscription: Subscription, *, as_json: bool) -> None:
    """Show the status until Ctrl-C. `as_json`: a line of JSON for each look."""
    console = Console(highlight=False)
    speeds = Speeds()
    terminal = console.is_terminal and not as_json
    with (
        subscription.watching() as read,
        Live(console=console, auto_refresh=False) if terminal else nullcontext() as live,
    ):
        while True:
            began = time.monotonic()
            state = read()
            if as_json:
                print(json.dumps({"time": round(time.time(), 3), **state}), flush=True)
            else:
                speeds.add(state, began)
                shown = Group(*lines(state, subscription.advice(state), speeds))
                if live is None:
                    console.print(shown, soft_wrap=True)
                else:
                    live.update(shown, refresh=True)
            time.sleep(max(0.0, began + _INTERVAL - time.monotonic()))
