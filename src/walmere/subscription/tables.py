"""The states of all tables of a subscription, durable: PostgreSQL's `pg_subscription_rel`, in one small file.

The file is JSON with one line per table, and each line begins with the table's position. A batch moves the positions of
all tables, and changes little else, so everything after the position is rendered, and parsed, only when it changes: a
subscription of a thousand tables writes and reads its states in some milliseconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

from walmere import paths
from walmere.errors import ChangeLogVersion
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.storage import read_json, write_durably
from walmere.subscription.state import TableState, from_json, to_json
from walmere.types import PgType

VERSION: Final = 2
_DAMAGED_HINT: Final = (
    "move the file to another directory: the next run copies all tables again; slot, change log and tables are kept"
)


_TABLES_BEGIN: Final = ',\n"tables": [\n'
_TABLES_END: Final = "\n]}\n"
_POSITION: Final = '{"applied_lsn": '
_BESIDE_POSITION: Final = attrgetter(*(each.name for each in fields(TableState) if each.name != "applied_lsn"))
"""Everything of a state but its position."""


class Shared(Protocol):
    """Where the states are besides the directory: see `walmere.subscription.shared.state`."""

    def put(self) -> None:
        """Write the state of the directory there. Raises TakenOver."""

    def check(self, older_than: float = ...) -> None:
        """Raise TakenOver if another driver has taken over. Looks only if the last look was so many seconds ago."""

    def together(self) -> AbstractContextManager[None]:
        """Do all writes inside at once, at the end."""


class NotShared:
    """The states are in the directory only."""

    def put(self) -> None:
        """Nothing to do."""

    def check(self, older_than: float = 0.0) -> None:
        """Nothing to check: the directory's lock allows one driver."""

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Tables:
    """The states of all tables. Every change is on disk, and in the store if there is one, before it is used.

    A table is identified by its name, which is also its place in the target. While it is published, it is also
    identified by its OID, which the stream has. A relation can be renamed, and another can get its name.
    """

    def __init__(self, directory: Path, shared: Shared | None = None) -> None:
        self._path = directory / paths.TABLES
        self.shared: Shared = shared or NotShared()
        self._lock = threading.Lock()  # copies and batches run in several threads
        self._states: dict[TableName, TableState] = {}
        self._by_oid: dict[int, TableState] = {}
        self.types: dict[int, PgType] = {}
        """The types of their columns that are not built in."""
        self._sorted: tuple[TableState, ...] = ()
        self._rendered: dict[TableName, tuple[TableState, str]] = {}
        self.changes = 0
        """How often the states have changed in this object."""
        self._read()

    def reload(self) -> None:
        """Read the states again: another process has written them, and nobody uses them yet."""
        with self._lock:
            self._states, self._rendered, self.types = {}, {}, {}
            self._replace(())
            self._read()

    def _read(self) -> None:
        if self._path.exists() and not self._parse_lines(self._path.read_bytes()):
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

    def _parse_lines(self, content: bytes) -> bool:
        """Read a file as `_store` writes it. Returns False for any other file."""
        try:
            head, separator, lines = content.decode().partition(_TABLES_BEGIN)
            header = json.loads(head + "\n}") if separator and lines.endswith(_TABLES_END) else {}
            if header.get("version") != VERSION:
                return False
            states = [_parse_line(line) for line in lines.removesuffix(_TABLES_END).split(",\n") if line]
            self.types = {each["oid"]: PgType(**each) for each in header["types"]}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
        self._replace(states)
        return True

    @staticmethod
    def changed(directory: Path) -> object:
        """A value that differs after each change of the states. Raises FileNotFoundError if there are none."""
        found = (directory / paths.TABLES).stat()
        return found.st_mtime_ns, found.st_ino

    def __iter__(self) -> Iterator[TableState]:
        return iter(self._sorted)

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
        self.shared.put()  # not under the lock: a batch has the other lock first

    def change(self, changes: Mapping[int, Callable[[TableState], TableState]]) -> list[TableState]:
        """Change the states of these relations, all or none, atomically. Returns the new states.

        Relations that are not published any more are ignored.
        """
        with self._lock:
            changed = [change(self._by_oid[oid]) for oid, change in changes.items() if oid in self._by_oid]
            self._replace(changed)
            self._store()
        self.shared.put()
        return changed

    def _replace(self, states: Iterable[TableState]) -> None:
        # a new dict, because other threads may iterate over the old one
        self._states = self._states | {state.table: state for state in states}
        self._by_oid = {state.oid: state for state in self._states.values() if state.published}
        self._sorted = tuple(sorted(self._states.values(), key=lambda state: state.name))
        self.changes += 1

    def add_types(self, types: Mapping[int, PgType]) -> None:
        """Store types of the source."""
        with self._lock:
            self.types |= types
            self._store()
        self.shared.put()

    def _store(self) -> None:
        types = json.dumps([asdict(each) for each in self.types.values()])
        lines = ",\n".join(map(self._line, self))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = f'{{"version": {VERSION},\n"types": {types}{_TABLES_BEGIN}{lines}{_TABLES_END}'
        write_durably(self._path, text)

    def _line(self, state: TableState) -> str:
        """The line of a table."""
        known, rest = self._rendered.get(state.table, (None, ""))
        if known is None or _BESIDE_POSITION(known) != _BESIDE_POSITION(state):
            content = to_json(state)
            del content["applied_lsn"]
            rest = json.dumps(content)[1:]
            self._rendered[state.table] = (state, rest)
        return f"{_POSITION}{json.dumps(str(state.applied_lsn) if state.applied_lsn else None)}, {rest}"


def _parse_line(line: str) -> TableState:
    """The state in a line."""
    position, _, rest = line.removeprefix(_POSITION).partition(", ")
    lsn = json.loads(position)
    return replace(_parse_rest("{" + rest), applied_lsn=Lsn.parse(lsn) if lsn else INVALID_LSN)


@lru_cache(maxsize=10_000)
def _parse_rest(text: str) -> TableState:
    return from_json(json.loads(text))
