"""A Spark session that is started when it is first needed. A run that finds nothing to do ends without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pyspark.sql import SparkSession


class LateSession:
    """Starts the session once, in the thread that first needs it."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._session: SparkSession | None = None
        self._starting = threading.Lock()

    def get(self) -> SparkSession:
        """The session. Raises what its start raises."""
        with self._starting:
            if self._session is None:
                self._session = self._start()
            return self._session
