"""The receiver of a query that receives by itself, and the query's connection to the source.

A query that reads the log of a subscription needs no receiver. A query with its own slot runs one, in a thread of its
process. If another process already receives into the same log, this receiver waits, and takes over when the other ends.

Such a log is kept for its query alone: a segment is removed after the query has committed it (`SinkPositions`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import SecretStr, ValidationError

from walmere import paths
from walmere.changelog.manifest import Manifest, summarise
from walmere.changelog.manifest_file import NAME
from walmere.config import PREFIX, Config, Source, SourceAddress, SubscriptionSettings
from walmere.definition import PublishedColumn
from walmere.errors import ChangeLogInUse, ConfigError, WalmereError
from walmere.lsn import INVALID_LSN, Lsn
from walmere.publisher import catalog
from walmere.publisher.connect import connect, translate_errors
from walmere.publisher.table import columns_of
from walmere.storage import read_json, write_durably
from walmere.subscription import receiver
from walmere.subscription.progress import SinkPositions
from walmere.types import PgType

_DOING: Final = "reading with format pgoutput"
_POLL: Final = 0.1
_STOP_TIMEOUT: Final = 10.0
"""Wait this many seconds for the receiver to stop."""
SOURCE_WAIT: Final = 60.0
"""Wait this many seconds, when a query starts, for the source to answer or the slot to be free."""


@dataclass(frozen=True, slots=True)
class SourceServer:
    """The source of a query. Errors never show its connection string."""

    address: SourceAddress | Source  # a Source, if the query receives by itself
    publications: tuple[str, ...] = ()  # empty: the query only looks up types

    @classmethod
    def of(cls, dsn: str, publications: tuple[str, ...], slot: str) -> SourceServer:
        """Check the options. Raises ConfigError, which does not show their values."""
        secret = os.environ.get(f"{PREFIX}SOURCE__PASSWORD")
        password = None if secret is None else SecretStr(secret)
        try:
            if slot:
                source = Source(dsn=SecretStr(dsn), password=password, publications=publications, slot=slot)
                return cls(source, publications)
            return cls(SourceAddress(dsn=SecretStr(dsn), password=password), publications)
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False, include_input=False)
            wrong = str(first["msg"]).removeprefix("Value error, ")
            raise ConfigError(_DOING, f"option {first['loc'][0]}: {wrong}", "correct the option") from None

    @property
    def source(self) -> Source:
        """What a query with a slot of its own receives from."""
        assert isinstance(self.address, Source)
        return self.address

    def columns(self, schema: str, name: str) -> tuple[Lsn, tuple[PublishedColumn, ...]] | None:
        """The current LSN and columns of a published table; None if it is not published."""
        with (
            closing(connect(self.address, "walmere pgoutput")) as connection,
            translate_errors(self.address, f"reading the columns of table {schema}.{name}"),
        ):
            now = catalog.insert_position(connection)
            catalog.require_publications(connection, self.publications)
            for table in catalog.published_tables(connection, self.publications):
                if (table.schema, table.name) == (schema, name):
                    return now, columns_of(connection, table.oid, table.columns)
        return None

    def types(self, oids: Iterable[int]) -> dict[int, PgType]:
        """Types that are not built in."""
        with (
            closing(connect(self.address, "walmere pgoutput")) as connection,
            translate_errors(self.address, "reading types"),
        ):
            return catalog.types_of(connection, oids)

    def position(self) -> Lsn:
        """The current LSN of the source."""
        with (
            closing(connect(self.address, "walmere pgoutput")) as connection,
            translate_errors(self.address, "reading the current LSN of the source"),
        ):
            return catalog.insert_position(connection)


class Feed:
    """A receiver in a thread of this process."""

    def __init__(self, publisher: SourceServer, directory: Path, reader: str) -> None:
        self._publisher = publisher
        subscription = SubscriptionSettings(name=publisher.source.slot, directory=directory, keep_seconds=0.0)
        self._config = Config(source=publisher.source, subscription=subscription)
        self._stopping = threading.Event()
        self._caught_up = threading.Event()
        self._receiver: receiver.Receiver | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._require_same_publications()
        SinkPositions(directory).join(reader)  # before anything is received, or retention would remove it

    def prepare(self) -> None:
        """Create slot and log, if there are none."""
        while not (self._config.changelog / NAME).exists():
            try:
                receiver.prepare(self._config)
            except ChangeLogInUse:
                if self._stopping.wait(_POLL):
                    return

    def receive_now(self) -> None:
        """Receive everything that the source has committed until now, then stop."""
        self.start(catch_up=True)
        try:
            self.wait()
        finally:
            self.stop()

    def start(self, *, catch_up: bool) -> None:
        """Receive in a thread. `catch_up`: `wait` waits for what the source has committed until now."""
        until = self._publisher.position() if catch_up else None
        self._thread = threading.Thread(target=self._run, args=(until,), name="walmere receiver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the log has what was committed at the start.

        Raises the error that ended the receiver. Also raises a transient error that lasts longer than SOURCE_WAIT: the
        receiver would retry, but the user would not see why the query does not start.
        """
        deadline = time.monotonic() + SOURCE_WAIT
        while not self._caught_up.wait(_POLL):
            self.check()
            error = self._receiver.retried_error if self._receiver is not None else None
            if error is None:
                deadline = time.monotonic() + SOURCE_WAIT
            elif time.monotonic() > deadline:
                self.stop()
                raise error

    def check(self) -> None:
        """Raise the error that ended the receiver, if there is one."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the receiver. What has arrived is durable afterwards."""
        self._stopping.set()
        if self._receiver is not None:
            self._receiver.stop()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT)

    def _require_same_publications(self) -> None:
        """Refuse a log that was received from other publications: it would lack changes for one of the queries."""
        source, directory = self._publisher.source, self._config.subscription.directory
        marker, wanted = directory / paths.FEED, {"publications": sorted(source.publications)}
        doing = f"receiving through slot {source.slot} into {directory}"
        if marker.exists():
            hint = f"write {json.dumps(wanted)} into it, if these were received there; or give another directory"
            found = read_json(marker, lambda content: {"publications": sorted(content["publications"])}, hint)
            if found != wanted:
                raise ConfigError(
                    doing,
                    f"the change log there was received from publications {', '.join(found['publications'])},"
                    f" not from {', '.join(wanted['publications'])}",
                    "give the same publications, or another slot and directory",
                )
        elif (self._config.changelog / NAME).exists():
            raise ConfigError(
                doing,
                "the change log there belongs to a subscription, which receives by itself",
                'remove option slot: option("directory", …) alone reads the log; or give another slot and directory',
            )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_durably(marker, json.dumps(wanted))

    def _run(self, until: Lsn | None) -> None:
        try:
            if until is not None:
                self._receive_until(until)
            self._caught_up.set()
            while not self._stopping.is_set():
                try:
                    self._receive(None)
                except ChangeLogInUse:
                    self._stopping.wait(_POLL)
        except BaseException as error:
            self._error = error

    def _receive_until(self, until: Lsn) -> None:
        while not self._stopping.is_set():
            try:
                self._receive(until)
                return
            except ChangeLogInUse:  # another process receives
                if self._log_end() >= until:
                    return
                self._stopping.wait(_POLL)

    def _receive(self, until: Lsn | None) -> None:
        self._receiver = receiver.Receiver(self._config)
        if not self._stopping.is_set():
            self._receiver.run(until)

    def _log_end(self) -> Lsn:
        try:
            with Manifest(self._config.changelog) as manifest:
                return summarise(manifest).end_lsn
        except WalmereError:
            return INVALID_LSN
