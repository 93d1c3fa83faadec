"""Requests to copy tables again, as files that the launcher reads. If no run is active, the next run does it.

With a store, requests are there: see `walmere.subscription.shared.requests`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.errors import ConfigError, NotMirrored, SourceUnavailable
from walmere.names import TableName
from walmere.storage import Lock, read_json, write_durably
from walmere.subscription import state
from walmere.subscription.requests import pausing, skipping
from walmere.subscription.shared.requests import SharedRequests
from walmere.subscription.tables import Tables

_POLL: Final = 0.1


def find(tables: Tables, names: Sequence[str], doing: str = "looking for the tables to copy again") -> list[TableName]:
    """The tables with these names, in the target or at the source. Raises ConfigError.

    The schema may be omitted if the name is unique in the target.
    """
    published = {each.name: each for each in tables if each.published and not each.of_messages}
    found: list[TableName] = []
    for name in names:
        matches = [each.table for each in published.values() if name in (each.name, each.table.name)]
        matches = matches or [each.table for each in published.values() if name == str(each.source_table)]
        if len(matches) != 1:
            known = ", ".join(published) or "not known yet: start `walmere run` first"
            wrong = f"{len(matches)} tables are called {name}" if matches else f"no published table is called {name}"
            raise ConfigError(doing, wrong, f"the tables are {known}")
        found += matches
    return found


def add(directory: Path, tables: Sequence[TableName]) -> None:
    """Request a new copy of these tables."""
    place = directory / paths.RESYNC
    place.mkdir(parents=True, exist_ok=True)
    write_durably(place / f"{uuid.uuid4().hex}.json", json.dumps(tables))


def take(directory: Path, tables: Tables) -> set[int]:
    """Take all requests: the tables wait for a copy from now on. Returns their OIDs."""
    taken: set[int] = set()
    for file in sorted((directory / paths.RESYNC).glob("*.json")):
        hint = "delete it, and run `walmere resync` again"
        wanted = read_json(file, lambda content: {TableName(*each) for each in content}, hint)
        taken |= _copy_again(tables, wanted)
        file.unlink()
    return taken


def take_shared(directory: Path, tables: Tables, shared: SharedRequests) -> set[int]:
    """The same for the requests in the store, and requests to skip a transaction, or to pause."""
    found = shared.read()
    taken: set[int] = set()
    for each in found:
        taken |= _copy_again(tables, set(each.resync))
        if each.skip is not None:
            skipping.request(directory, each.skip)
            tables.shared.put()
    pausing.set_paused(directory, shared.paused)
    if found:
        shared.remove({each.id for each in found})
    return taken


def _copy_again(tables: Tables, wanted: Collection[TableName]) -> set[int]:
    oids = {each.oid for each in tables if each.published and not each.of_messages and each.table in wanted}
    if oids:
        tables.change(dict.fromkeys(oids, state.copy_again))
    return oids


def wait(directory: Path, wanted: Sequence[TableName], shared: SharedRequests | None = None) -> None:
    """Wait until a run has taken the requests and copied these tables. Raises the error of a copy."""
    while any((directory / paths.RESYNC).glob("*.json")) or (shared is not None and shared.read()):
        _require_run(directory)
        time.sleep(_POLL)
    while True:
        states = [each for each in Tables(directory) if each.table in wanted and each.waits_for_copy]
        refused = [each for each in states if each.error is not None]
        if refused:
            wrong = refused[0].error or ""
            raise NotMirrored(f"copying {refused[0].name} again", wrong, "the run retries; see `walmere status`")
        if not states:
            return
        _require_run(directory)
        time.sleep(_POLL)


def _require_run(directory: Path) -> None:
    if Lock.holder(directory / paths.RUN) is None:
        raise SourceUnavailable("copying tables again", "the run has ended before the copy", "the next run copies them")
