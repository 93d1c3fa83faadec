"""Follows the log in the store, for `walmere run --no-receiver`: another machine receives.

A thread looks for the next object, and appends its lines to the local manifest. From time to time it reads the head of
the log: if retention has removed what is old there, it is removed here, too.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Final

from walmere.changelog.store.cache import Cache
from walmere.config import Config
from walmere.errors import StoreUnavailable
from walmere.lsn import Lsn
from walmere.storage import Lock
from walmere.subscription.backoff import Backoff
from walmere.subscription.shared.store import cache_of

_log = logging.getLogger(__name__)

HEAD_INTERVAL: Final = 30.0
"""Seconds between two reads of the head."""
_NO_LOG_INTERVAL: Final = 2.0
_BACKOFF: Final = (0.5, 10.0)


class Follower:
    """Keeps the local copy of the log up to date. It has the methods of `ReceiverProcess` that a launcher uses."""

    def __init__(self, config: Config) -> None:
        cache = cache_of(config)
        assert cache is not None  # the caller has checked the configuration
        self._cache: Cache = cache
        self._interval = config.subscription.upload_seconds / 2
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.until: Lsn | None = None
        self._lock = Lock(config.changelog)
        self._thread = threading.Thread(target=self._run, name="walmere-follower", daemon=True)
        self._thread.start()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.terminate()
        self._thread.join(5.0)
        self._lock.close()

    def terminate(self) -> None:
        """Request its end."""
        self._stopping.set()

    def kill(self) -> None:
        """The same: there is nothing that must be completed."""
        self._stopping.set()

    def check(self) -> None:
        """Raise the error that has ended it."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF)
        filled = False
        while not self._stopping.is_set():
            try:
                if not filled:
                    filled = self._fill()
                self._follow()
            except StoreUnavailable as error:
                pause = backoff.next(None) or 0.0
                _log.warning("%s: %s; retry in %.1f s", error.doing, error.wrong, pause)
                self._stopping.wait(pause)
            except BaseException as error:  # `check` raises it in the launcher's thread
                self._failure = error
                return

    def _fill(self) -> bool:
        """Fill the cache; waits until there is a log."""
        told = False
        while not self._stopping.is_set():
            if self._cache.fill():
                return True
            if not told:
                _log.warning("there is no change log in %s yet; waiting for a receiver", self._cache.store.url)
                told = True
            self._stopping.wait(_NO_LOG_INTERVAL)
        return False

    def _follow(self) -> None:
        head_at = time.monotonic() + HEAD_INTERVAL
        while not self._stopping.is_set():
            if time.monotonic() >= head_at:
                self._cache.refresh()
                head_at = time.monotonic() + HEAD_INTERVAL
            if not self._cache.follow():
                self._stopping.wait(self._interval)
