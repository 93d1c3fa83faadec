"""The states of all tables of a subscription, durable: PostgreSQL's `pg_subscription_rel`, in one small file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from walmere.changelog.manifest import sync_directory
from walmere.errors import ChangeLogVersion
from walmere.subscription.state import TableState, from_json, to_json
from walmere.types import PgType

VERSION: Final = 1


class Tables:
    """The states by relation. Every change is on disk before it is used."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "tables.json"
        self._lock = threading.Lock()  # tables are copied side by side
        self._states: dict[int, TableState] = {}
        self.types: dict[int, PgType] = {}
        """The types of their columns that are not built in."""
        if self._path.exists():
            content = json.loads(self._path.read_text())
            if content["version"] != VERSION:
                raise ChangeLogVersion(
                    f"reading {self._path}",
                    f"it has version {content['version']}, not {VERSION}",
                    "use a newer Walmere",
                )
            self._states = {state.oid: state for state in map(from_json, content["tables"])}
            self.types = {each["oid"]: PgType(**each) for each in content["types"]}

    def __iter__(self) -> Iterator[TableState]:
        return iter(sorted(self._states.values(), key=lambda state: state.name))

    def __contains__(self, oid: int) -> bool:
        return oid in self._states

    def __getitem__(self, oid: int) -> TableState:
        return self._states[oid]

    def put(self, *states: TableState) -> None:
        """Store these states, all or none."""
        with self._lock:
            self._states |= {state.oid: state for state in states}
            self._store()

    def learn(self, types: Mapping[int, PgType]) -> None:
        """Store what types of the source are."""
        with self._lock:
            self.types |= types
            self._store()

    def _store(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            types = [asdict(each) for each in self.types.values()]
            json.dump({"version": VERSION, "tables": [to_json(each) for each in self], "types": types}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        sync_directory(self._path.parent)
