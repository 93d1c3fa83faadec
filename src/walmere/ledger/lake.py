"""The points in the lake: which versions of its tables belong together. For readers with any engine.

In the lake, `_walmere/<subscription>/` has three files:

    latest.json    the newest point: its LSN, and for each table its path and the version to pin
    ledger.jsonl   all points that can be read, as `walmere.ledger.entry` writes them
    owner.json     the owner of the points, see `walmere.owner`

`ledger.jsonl` is written before `latest.json`, so it always has the point of `latest.json`. In an object store, both
are replaced by compare-and-set, so a process that was thought dead cannot put an old point there. See `lines`, which
also says how `ledger.jsonl` grows in a store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from walmere.directory import Directory
from walmere.errors import ChangeLogDamaged, SinkError
from walmere.ledger import entry as points
from walmere.ledger.entry import VERSION, Entry
from walmere.ledger.file import History
from walmere.ledger.lines import another_writer
from walmere.lsn import Lsn
from walmere.names import TableName
from walmere.owner import Owner

LATEST: Final = "latest.json"
_OWNER: Final = "owner.json"
_FORMAT: Final = "walmere point"
_ATTEMPTS: Final = 5


class LakeLedger:
    """Writes the points of a subscription to the lake."""

    def __init__(
        self, directory: Directory, subscription: str, path: Callable[[TableName], str], keep_seconds: float
    ) -> None:
        self._directory = directory
        self._subscription = subscription
        self._path = path  # of a table, relative to the lake
        self._keep_seconds = keep_seconds
        self._history = History(directory, keep_seconds)
        self._etag: str | None = None  # of `latest.json` in a store; None: it is not known

    def begin(self, entries: Iterable[Entry]) -> None:
        """Become the writer, and repair the files after a crash."""
        known = list(entries)
        try:
            self._directory.make()
            self._history.begin(known)
            if known:
                self._write_latest(known[-1])
        except OSError as error:
            raise self._failed(error) from error

    def write_owner(self, owner: Owner) -> None:
        """Write the owner of the points."""
        try:
            self._directory.make()
            if read_owner(self._directory) != owner:
                self._directory.replace(_OWNER, owner.to_json().encode() + b"\n")
        except OSError as error:
            raise self._failed(error) from error

    def append(self, point: Entry) -> None:
        """Make this point the newest. It is durable when this returns."""
        try:
            self._write_latest(self._history.append(point))
        except OSError as error:
            raise self._failed(error) from error

    def _write_latest(self, point: Entry) -> None:
        tables = [(TableName.parse(name), version) for name, version in point.versions.items()]
        content = {
            "format": _FORMAT,
            "version": VERSION,
            "subscription": self._subscription,
            "lsn": str(point.lsn),
            "commit_time": points.iso(point.commit_time),
            "keep_seconds": self._keep_seconds,
            "tables": [
                {"schema": table.namespace, "name": table.name, "path": self._path(table), "version": version}
                for table, version in tables
            ],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
        if self._directory.local:
            self._directory.replace(LATEST, text)
        else:
            self._replace_in_store(text)

    def _replace_in_store(self, content: bytes) -> None:
        """Replace `latest.json`. Another process may write it only until it finds that this one is the writer."""
        store = self._directory.store
        for _ in range(_ATTEMPTS):
            known, self._etag = self._etag, None
            if known is None and (found := store.get(LATEST)) is not None:
                known = found[1]
            if known is not None:
                self._etag = store.replace_if(LATEST, content, known)
            if self._etag is not None or (known is None and store.create(LATEST, content)):
                return
        raise another_writer(f"{self._directory.location}/{LATEST}")

    def _failed(self, error: OSError) -> SinkError:
        doing = f"writing the newest point to {self._directory.location}"
        return SinkError(doing, str(error), "make sure that the directory is writable")


def read_owner(directory: Directory) -> Owner | None:
    """The owner of the points; None if they have none."""
    text = directory.read(_OWNER)
    return None if text is None else Owner.from_json(text)


def read_latest(directory: Directory) -> Entry | None:
    """The newest point; None if there is none yet."""
    text = directory.read(LATEST)
    if text is None:
        return None
    doing = f"reading {directory.location}/{LATEST}"
    try:
        content: dict[str, Any] = json.loads(text)
        if content.get("format") == _FORMAT:
            points.check_version(doing, content)
        versions = {str(TableName(each["schema"], each["name"])): each["version"] for each in content["tables"]}
        return Entry(Lsn.parse(content["lsn"]), points.parse_time(content["commit_time"]), versions)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ChangeLogDamaged(doing, "this is not a point of a ledger", "`walmere run` writes it again") from None
