"""A reader of the change log that receives by itself, and what it can ask the source.

A subscription has a receiver of its own, and who reads its log only reads. But a query may be all there is: then it
brings the receiver along, in a thread of its own process. If another process already receives into the same log, that
is as good; ours waits, and takes over when the other has ended.

Such a log is kept for its query alone: a segment is removed as soon as the query has committed it (`SinkPositions`),
and not before.
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
from walmere.changelog.manifest import NAME, Manifest, summarise
from walmere.config import PREFIX, Config, Source, SubscriptionSettings
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
_ENDING: Final = 10.0
"""Seconds that a receiver has to end."""
SOURCE_WAIT: Final = 60.0
"""A query waits this many seconds, at its start, for the source to answer or the slot to be free."""


@dataclass(frozen=True, slots=True)
class SourceServer:
    """What can be asked of the source. Its connection string is never shown."""

    source: Source

    @classmethod
    def of(cls, dsn: str, publications: tuple[str, ...], slot: str) -> SourceServer:
        """Check what was given. Raises ConfigError, which shows none of it."""
        password = os.environ.get(f"{PREFIX}SOURCE__PASSWORD")
        try:
            return cls(
                Source(
                    dsn=SecretStr(dsn),
                    password=None if password is None else SecretStr(password),
                    # who only asks for types names neither, and nothing is done with them
                    publications=publications or ("none",),
                    slot=slot or "none",
                )
            )
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False, include_input=False)
            wrong = str(first["msg"]).removeprefix("Value error, ")
            raise ConfigError(_DOING, f"option {first['loc'][0]}: {wrong}", "correct the option") from None

    def columns(self, schema: str, name: str) -> tuple[Lsn, tuple[PublishedColumn, ...]] | None:
        """The columns of a published table as they are now, and when now is; None if it is not published."""
        with (
            closing(connect(self.source, "walmere pgoutput")) as connection,
            translate_errors(self.source, f"looking at table {schema}.{name}"),
        ):
            now = catalog.insert_position(connection)
            catalog.require_publications(connection, self.source.publications)
            for table in catalog.published_tables(connection, self.source.publications):
                if (table.schema, table.name) == (schema, name):
                    return now, columns_of(connection, table.oid, table.columns)
        return None

    def types(self, oids: Iterable[int]) -> dict[int, PgType]:
        """Types that are not built in."""
        with (
            closing(connect(self.source, "walmere pgoutput")) as connection,
            translate_errors(self.source, "looking at types"),
        ):
            return catalog.types_of(connection, oids)

    def position(self) -> Lsn:
        """Where the source is now."""
        with (
            closing(connect(self.source, "walmere pgoutput")) as connection,
            translate_errors(self.source, "asking where the source is"),
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
        self._require_same()
        SinkPositions(directory).join(reader)  # before anything is received, or retention would take it

    def prepare(self) -> None:
        """Make slot and log, if they are new."""
        while not (self._config.changelog / NAME).exists():
            try:
                receiver.prepare(self._config)
            except ChangeLogInUse:
                if self._stopping.wait(_POLL):
                    return

    def receive_now(self) -> None:
        """Receive everything that the source has committed by now, and end."""
        self.start(catch_up=True)
        try:
            self.wait()
        finally:
            self.stop()

    def start(self, *, catch_up: bool) -> None:
        """Go on receiving in a thread. `catch_up`: `wait` then waits for what the source has committed by now."""
        until = self._publisher.position() if catch_up else None
        self._thread = threading.Thread(target=self._run, args=(until,), name="walmere receiver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was committed when it started is in the log.

        Raises what ended the receiver, or keeps it from receiving for long: later it goes on trying, but who waits here
        has nothing yet, and would not know why.
        """
        deadline = time.monotonic() + SOURCE_WAIT
        while not self._caught_up.wait(_POLL):
            self.check()
            trouble = self._receiver.trouble if self._receiver is not None else None
            if trouble is None:
                deadline = time.monotonic() + SOURCE_WAIT
            elif time.monotonic() > deadline:
                self.stop()
                raise trouble

    def check(self) -> None:
        """Raise what ended the receiver, if something did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End receiving; what has arrived is durable then."""
        self._stopping.set()
        if self._receiver is not None:
            self._receiver.stop()
        if self._thread is not None:
            self._thread.join(_ENDING)

    def _require_same(self) -> None:
        """Refuse the log of others: whoever receives decides what is in it, and what is not is lost to them all."""
        source, directory = self._publisher.source, self._config.subscription.directory
        noted, ours = directory / paths.FEED, {"publications": sorted(source.publications)}
        doing = f"receiving through slot {source.slot} into {directory}"
        if noted.exists():
            way_out = f"write {json.dumps(ours)} into it, if that is what was received there; or give another directory"
            theirs = read_json(noted, lambda content: {"publications": sorted(content["publications"])}, way_out)
            if theirs != ours:
                raise ConfigError(
                    doing,
                    f"what is there was received of publications {', '.join(theirs['publications'])},"
                    f" not of {', '.join(ours['publications'])}",
                    "give the same publications; or another slot and directory",
                )
        elif (self._config.changelog / NAME).exists():
            raise ConfigError(
                doing,
                "a subscription has its change log there, and receives by itself",
                'leave option slot away: option("directory", …) alone reads it; or give another slot and directory',
            )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_durably(noted, json.dumps(ours))

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
            except ChangeLogInUse:  # then somebody else does it
                if self._end() >= until:
                    return
                self._stopping.wait(_POLL)

    def _receive(self, until: Lsn | None) -> None:
        self._receiver = receiver.Receiver(self._config)
        if not self._stopping.is_set():
            self._receiver.run(until)

    def _end(self) -> Lsn:
        try:
            with Manifest(self._config.changelog) as manifest:
                return summarise(manifest).end_lsn
        except WalmereError:
            return INVALID_LSN
