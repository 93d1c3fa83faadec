"""One machine works, another one that runs the same subscription waits: the slot decides.

PostgreSQL lets one receiver stream from a slot. A driver takes over the state in the store only when the receiver
beside it has the slot. It is free when the run on the other machine has ended; or when that machine is lost, and the
server has ended its connection (`receiver.LOST_AFTER`). Otherwise each start would take over from the other machine,
whose supervisor would start it again, and so on.

If the source does not answer, it is not known who has the slot. Then only the machine whose driver was the last one
goes on, with what is in the log.

`wait_until_free` is called before Spark is started, so that a machine that waits holds no executors. The slot may be
taken after that, so `wait_for_slot` is called again before anything is written. A run without an end waits as long as
it takes; one with an end fails after `PATIENCE`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Final, Protocol

from walmere.changelog.store.log_store import read_head
from walmere.config import Config
from walmere.errors import SlotInUse, SourceUnavailable, StoreUnavailable
from walmere.storage import Lock
from walmere.subscription.shared.state import read_state
from walmere.subscription.shared.store import slot_user, store_of_config

_log = logging.getLogger(__name__)

PATIENCE: Final = 90.0
"""Seconds: more than it takes until the slot of a machine or a driver that is lost is free."""
_POLL: Final = 5.0
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


def wait_until_free(config: Config, stopping: threading.Event, *, ends: bool) -> None:
    """Return when the subscription is not running on another machine, or `stopping` is set.

    `ends`: of a run with an end. Raises SlotInUse.
    """
    if config.subscription.store is None or Lock.holder(config.changelog) is not None:
        return  # with a receiver on this machine, it is running here
    patience = _Patience(ends)
    while not _is_free(config, patience) and not stopping.wait(_POLL):
        pass


def wait_for_slot(receiver: Receiving, config: Config, stopping: threading.Event, *, ends: bool) -> None:
    """Return when the receiver has the slot, or `stopping` is set; or without the source, see above."""
    patience = _Patience(ends)
    look_at = time.monotonic() + _POLL
    while not receiver.has_slot() and not stopping.wait(_POLL_RECEIVER):
        receiver.check()
        if time.monotonic() < look_at:
            continue
        try:
            why = _why_wait(config)
        except SourceUnavailable:
            return
        except StoreUnavailable:  # the receiver waits for it
            why = None
        if why is not None and not receiver.has_slot():
            patience.wait_because(why)
        look_at = time.monotonic() + _POLL


class _Patience:
    """How long to wait, and one warning."""

    def __init__(self, ends: bool) -> None:
        self.warned = False
        self._until = time.monotonic() + PATIENCE if ends else None

    def wait_because(self, why: str) -> None:
        """Warn once. Raises SlotInUse if it has taken too long."""
        if self._until is not None and time.monotonic() > self._until:
            hint = "it applies the changes; end it first if they should be applied here"
            raise SlotInUse("running the subscription up to an LSN", why, hint)
        if not self.warned:
            _log.warning("%s; waiting until it has ended", why)
        self.warned = True


def _is_free(config: Config, patience: _Patience) -> bool:
    try:
        why = _why_wait(config)
    except SourceUnavailable:  # the run itself waits for it
        return True
    except StoreUnavailable:  # likewise, unless another machine was running
        return not patience.warned
    if why is not None:
        patience.wait_because(why)
    return why is None


def _why_wait(config: Config) -> str | None:
    """Why this machine has to wait; None: it need not.

    Raises SourceUnavailable if the source does not answer, and the last driver was on this machine.
    """
    try:
        receiver = slot_user(config)
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
