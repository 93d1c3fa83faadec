"""The states of all tables of a subscription, durable: PostgreSQL's `pg_subscription_rel`, in one small file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from walmere import paths
from walmere.errors import ChangeLogVersion
from walmere.names import TableName
from walmere.storage import read_json, write_durably
from walmere.subscription.state import TableState, from_json, to_json
from walmere.types import PgType

VERSION: Final = 2
_WAY_OUT: Final = (
    "move the file away: the next run copies all tables again; the slot, the change log and the lake's tables stay"
)


class Tables:
    """The states of all tables. Every change is on disk before it is used.

    A table is known by its name, because that is where its target is; while it is published also by its OID, because
    that is what the stream says. A name may pass to another relation, and a relation to another name.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / paths.TABLES
        self._lock = threading.Lock()  # tables are copied side by side, and batches applied
        self._states: dict[TableName, TableState] = {}
        self._by_oid: dict[int, TableState] = {}
        self.types: dict[int, PgType] = {}
        """The types of their columns that are not built in."""
        if self._path.exists():
            read_json(self._path, self._parse, _WAY_OUT)

    def _parse(self, content: dict[str, Any]) -> None:
        if content["version"] != VERSION:
            raise ChangeLogVersion(
                f"reading {self._path}",
                f"it has version {content['version']}, not {VERSION}",
                "use the Walmere that has written it; or `walmere drop`, and begin anew",
            )
        self._take(list(map(from_json, content["tables"])))
        self.types = {each["oid"]: PgType(**each) for each in content["types"]}

    @staticmethod
    def changed(directory: Path) -> object:
        """Something that is another whenever the states are. Raises FileNotFoundError if there are none."""
        found = (directory / paths.TABLES).stat()
        return found.st_mtime_ns, found.st_ino

    def __iter__(self) -> Iterator[TableState]:
        return iter(sorted(self._states.values(), key=lambda state: state.name))

    def __contains__(self, oid: int) -> bool:
        return oid in self._by_oid

    def __getitem__(self, oid: int) -> TableState:
        return self._by_oid[oid]

    def get(self, oid: int) -> TableState | None:
        """The state of a relation; None if it is not published."""
        return self._by_oid.get(oid)

    def put(self, *states: TableState) -> None:
        """Store these states, all or none."""
        with self._lock:
            self._take(states)
            self._store()

    def change(self, changes: Mapping[int, Callable[[TableState], TableState]]) -> list[TableState]:
        """Move the states of these relations on, all or none, and with nobody in between. Returns what they are now.

        One that has left the publication meanwhile is left alone.
        """
        with self._lock:
            changed = [change(self._by_oid[oid]) for oid, change in changes.items() if oid in self._by_oid]
            self._take(changed)
            self._store()
        return changed

    def _take(self, states: Iterable[TableState]) -> None:
        self._states = self._states | {state.table: state for state in states}  # others may be looking at the old one
        self._by_oid = {state.oid: state for state in self._states.values() if state.published}

    def learn(self, types: Mapping[int, PgType]) -> None:
        """Store what types of the source are."""
        with self._lock:
            self.types |= types
            self._store()

    def _store(self) -> None:
        types = [asdict(each) for each in self.types.values()]
        content = {"version": VERSION, "tables": [to_json(each) for each in self], "types": types}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, json.dumps(content, indent=1))
