"""One machine works, another one that runs the same subscription waits: the slot decides.

PostgreSQL lets one receiver stream from a slot. A driver takes over the state in the store only when the receiver
beside it has the slot. It is free when the run on the other machine has ended; or when that machine is lost, and the
server has ended its connection (`wal_sender_timeout`). Otherwise each start would take over from the other machine,
whose supervisor would start it again, and so on.

If the source does not answer, it is not known who has the slot. Then only the machine whose driver was the last one
goes on, with what is in the log.

`wait_until_free` is called before Spark is started, so that a machine that waits holds no executors. The slot may be
taken after that, so `wait_for_slot` is called again before anything is written.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Final, Protocol

from walmere.changelog.store.log_store import read_head
from walmere.config import Config
from walmere.errors import SourceUnavailable, StoreUnavailable
from walmere.subscription.shared.state import read_state
from walmere.subscription.shared.store import running_elsewhere, store_of_config

_log = logging.getLogger(__name__)

_POLL: Final = 2.0
"""Seconds between two looks at the source."""
_POLL_RECEIVER: Final = 0.05


class Receiving(Protocol):
    """The receiver beside the driver."""

    def check(self) -> None:
        """Raise the error that has ended it."""

    def has_slot(self) -> bool:
        """Whether it streams from the slot."""


def has_log(config: Config) -> bool:
    """Whether there is a log in the store. Then there is a slot, which decides. Raises StoreError."""
    store = store_of_config(config)
    return store is not None and read_head(store) is not None


def wait_until_free(config: Config, stopping: threading.Event) -> None:
    """Return when the subscription is not running on another machine, or `stopping` is set."""
    if config.subscription.store is None:
        return
    warned = False
    with suppress(SourceUnavailable, StoreUnavailable):  # the run waits for them itself
        while (why := _why_wait(config)) is not None:
            warned = _warn(why, warned=warned)
            if stopping.wait(_POLL):
                return


def wait_for_slot(receiver: Receiving, config: Config, stopping: threading.Event) -> None:
    """Return when the receiver has the slot, or `stopping` is set."""
    look_at = time.monotonic() + _POLL
    warned = False
    while not receiver.has_slot() and not stopping.wait(_POLL_RECEIVER):
        receiver.check()
        if time.monotonic() >= look_at:
            try:
                if (why := _why_wait(config)) is not None:
                    warned = _warn(why, warned=warned)
            except SourceUnavailable:
                return
            except StoreUnavailable:  # the receiver waits for it
                pass
            look_at = time.monotonic() + _POLL


def _warn(why: str, *, warned: bool) -> bool:
    if not warned:
        _log.warning("%s; waiting until it has ended", why)
    return True


def _why_wait(config: Config) -> str | None:
    """Why this machine has to wait; None: it need not.

    Raises SourceUnavailable if the source does not answer, and the last driver was on this machine.
    """
    try:
        receiver = running_elsewhere(config)
    except SourceUnavailable as error:
        if (driver := _last_driver_elsewhere(config)) is None:
            raise
        return f"{error.wrong}, and the subscription was last running on another machine, as {driver}"
    if receiver is None:
        return None
    return f"the subscription is running on another machine: {receiver} uses replication slot {config.source.slot}"


def _last_driver_elsewhere(config: Config) -> str | None:
    """The driver that has written the state last, if it was on another machine."""
    store = store_of_config(config)
    head = None if store is None else read_head(store)
    found = None if store is None or head is None else read_state(store, head[0].generation)
    if found is None or found[0].writer.startswith(f"{socket.gethostname()}:"):
        return None
    return found[0].writer
