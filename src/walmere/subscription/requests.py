"""What people ask of a subscription that may be running: to copy tables again. A file that the launcher looks for.

Asking is durable: if nobody runs, the next run finds it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from walmere import paths
from walmere.errors import ConfigError, NotMirrored, SourceUnavailable
from walmere.names import TableName
from walmere.storage import Lock, read_json, write_durably
from walmere.subscription import state
from walmere.subscription.tables import Tables

_POLL: Final = 0.1


def find(tables: Tables, names: Sequence[str], doing: str = "looking for the tables to copy again") -> list[TableName]:
    """The tables that these names mean, each with its schema, or without if that is enough. Raises ConfigError."""
    published = {each.name: each.table for each in tables if each.published and not each.of_messages}
    found: list[TableName] = []
    for name in names:
        matches = [table for text, table in published.items() if name in (text, table.name)]
        if len(matches) != 1:
            known = ", ".join(published) or "none yet: `walmere run` makes them known"
            wrong = f"{len(matches)} tables are called {name}" if matches else f"no published table is called {name}"
            raise ConfigError(doing, wrong, f"the tables are {known}")
        found += matches
    return found


def ask(directory: Path, tables: Sequence[TableName]) -> None:
    """Have these tables copied again."""
    place = directory / paths.RESYNC
    place.mkdir(parents=True, exist_ok=True)
    write_durably(place / f"{uuid.uuid4().hex}.json", json.dumps(tables))


def take(directory: Path, tables: Tables) -> set[int]:
    """Do what was asked: from now on these tables wait for a copy. Returns which."""
    taken: set[int] = set()
    for file in sorted((directory / paths.RESYNC).glob("*.json")):
        way_out = "delete it, and ask again with `walmere resync`"
        wanted = read_json(file, lambda content: {TableName(*each) for each in content}, way_out)
        oids = {each.oid for each in tables if each.published and not each.of_messages and each.table in wanted}
        tables.change(dict.fromkeys(oids, state.copy_again))
        taken |= oids
        file.unlink()
    return taken


def wait(directory: Path, wanted: Sequence[TableName]) -> None:
    """Until a run has taken what was asked, and has copied these tables. Raises what it met instead."""
    while any((directory / paths.RESYNC).glob("*.json")):
        _require_run(directory)
        time.sleep(_POLL)
    while True:
        states = [each for each in Tables(directory) if each.table in wanted and each.waits_for_copy]
        refused = [each for each in states if each.error is not None]
        if refused:
            wrong = refused[0].error or ""
            raise NotMirrored(f"copying {refused[0].name} again", wrong, "the run goes on trying; see `walmere status`")
        if not states:
            return
        _require_run(directory)
        time.sleep(_POLL)


def _require_run(directory: Path) -> None:
    if Lock.holder(directory / paths.RUN) is None:
        raise SourceUnavailable("copying tables again", "the run that did it has ended", "the next one goes on with it")
