"""Requests to the driver in the store: to copy tables again, to skip a transaction, or to pause.

A command may run on another machine than the driver, and a request must survive the loss of either. So all requests are
in one object, `<generation>/requests`, changed by compare-and-set. The driver reads it from time to time. It removes a
request when the state in the store has its effect. `paused` stays until `walmere resume`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from walmere.changelog.store.log_store import damaged, read_head
from walmere.errors import NotMirrored
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.object_store import ObjectStore

POLL_INTERVAL: Final = 2.0
"""The driver looks for requests this often, in seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    resync: tuple[TableName, ...] = ()  # copy these tables again
    skip: Lsn | None = None  # leave out the transaction with this commit LSN
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class SharedRequests:
    """The requests of a subscription."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._generation: str | None = None
        self.paused = False  # when they were read last

    def add(self, request: Request) -> None:
        """Add a request. Raises NotMirrored if there is no log."""
        self._require_log()
        self._change(lambda known: [*known, request])

    def set_paused(self, paused: bool) -> None:
        """Pause, or resume. Raises NotMirrored if there is no log."""
        self._require_log()
        self._change(list, paused=paused)

    def _require_log(self) -> None:
        if self._name() is None:
            wrong = f"there is no subscription in {self._store.url}: it was dropped, or has never run"
            raise NotMirrored("writing a request", wrong, "`walmere run` starts it")

    def read(self) -> list[Request]:
        """All requests, oldest first. Sets `paused`, too."""
        return self._read()[0]

    def remove(self, done: Collection[str]) -> None:
        """Remove requests by their IDs."""
        self._change(lambda known: [each for each in known if each.id not in done])

    def _name(self) -> str | None:
        if self._generation is None:
            head = read_head(self._store)
            self._generation = None if head is None else head[0].generation
        return None if self._generation is None else f"{self._generation}/requests"

    def _read(self) -> tuple[list[Request], str | None]:
        name = self._name()
        found = None if name is None else self._store.get(name)
        if found is None:
            self.paused = False
            return [], None
        try:
            content = json.loads(found[0])
            self.paused = content.get("paused", False)  # missing if written by an earlier version
            return [_parse(each) for each in content["requests"]], found[1]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise damaged(f"{self._store.url}/{name}", "it does not have requests") from None

    def _change(self, change: Callable[[Sequence[Request]], list[Request]], paused: bool | None = None) -> None:
        """Change the requests, and `paused` unless it is None."""
        name = self._name()
        if name is None:
            return
        while True:
            known, etag = self._read()
            # with a number of its own, because two writers may want to write the same
            content = {
                "written": uuid.uuid4().hex,
                "requests": [asdict(each) for each in change(known)],
                "paused": self.paused if paused is None else paused,
            }
            data = json.dumps(content).encode()
            if etag is None:
                if self._store.create(name, data):
                    return
            elif self._store.replace_if(name, data, etag) is not None:
                return


def _parse(content: dict[str, Any]) -> Request:
    skip = content["skip"]
    resync = tuple(TableName(*each) for each in content["resync"])
    return Request(resync, None if skip is None else Lsn(skip), content["id"])
