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
_DAMAGED_HINT: Final = (
    "move the file to another directory: the next run copies all tables again; slot, change log and tables are kept"
)


class Tables:
    """The states of all tables. Every change is on disk before it is used.

    A table is identified by its name, which is also its place in the target. While it is published, it is also
    identified by its OID, which the stream has. A relation can be renamed, and another can get its name.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / paths.TABLES
        self._lock = threading.Lock()  # copies and batches run in several threads
        self._states: dict[TableName, TableState] = {}
        self._by_oid: dict[int, TableState] = {}
        self.types: dict[int, PgType] = {}
        """The types of their columns that are not built in."""
        if self._path.exists():
            read_json(self._path, self._parse, _DAMAGED_HINT)

    def _parse(self, content: dict[str, Any]) -> None:
        if content["version"] != VERSION:
            raise ChangeLogVersion(
                f"reading {self._path}",
                f"it has version {content['version']}, not {VERSION}",
                "use the Walmere version that wrote it; or run `walmere drop`, then start the subscription again",
            )
        self._replace(list(map(from_json, content["tables"])))
        self.types = {each["oid"]: PgType(**each) for each in content["types"]}

    @staticmethod
    def changed(directory: Path) -> object:
        """A value that differs after each change of the states. Raises FileNotFoundError if there are none."""
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
            self._replace(states)
            self._store()

    def change(self, changes: Mapping[int, Callable[[TableState], TableState]]) -> list[TableState]:
        """Change the states of these relations, all or none, atomically. Returns the new states.

        Relations that are not published any more are ignored.
        """
        with self._lock:
            changed = [change(self._by_oid[oid]) for oid, change in changes.items() if oid in self._by_oid]
            self._replace(changed)
            self._store()
        return changed

    def _replace(self, states: Iterable[TableState]) -> None:
        # a new dict, because other threads may iterate over the old one
        self._states = self._states | {state.table: state for state in states}
        self._by_oid = {state.oid: state for state in self._states.values() if state.published}

    def add_types(self, types: Mapping[int, PgType]) -> None:
        """Store types of the source."""
        with self._lock:
            self.types |= types
            self._store()

    def _store(self) -> None:
        types = [asdict(each) for each in self.types.values()]
        content = {"version": VERSION, "tables": [to_json(each) for each in self], "types": types}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, json.dumps(content, indent=1))
