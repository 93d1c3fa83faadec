"""The manifest: the list of what the change log has, in commit order.

It is a file of lines, appended and fsynced. Each line is a CRC-32 and a JSON object, so that people can read it and a
torn end is detected. A segment is part of the log only if the manifest names it: other files are left from a crash.

    header        the format's version, and which system, database and slot this log belongs to
    relation      a definition (Relation message, with the Type messages of its columns) under its version number
    transactions  a segment of whole transactions
    transaction   one large transaction, in its own segments
    prepare       the same, before its COMMIT PREPARED
    rollback      ROLLBACK PREPARED: its segments are deleted
    position      nothing to store, but everything before this LSN has been received

Every record but `relation` ends at an LSN: everything that committed before it is in the log. These LSNs only grow. The
last one is the durable position, which may be confirmed to PostgreSQL.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from walmere.changelog.manifest_file import NAME, ManifestFile
from walmere.changelog.records import (
    Header,
    Prepared,
    Record,
    RolledBack,
    Transaction,
    Transactions,
    parse_record,
    render_header,
    render_record,
    to_line,
)
from walmere.lsn import INVALID_LSN, Lsn
from walmere.pgoutput.decode import decode
from walmere.pgoutput.messages import Relation, Type
from walmere.pgoutput.relation import RelationVersion
from walmere.storage import write_lines_durably

Entry = Record | RelationVersion


@dataclass(slots=True)
class Summary:
    """What a writer needs to know of an existing log."""

    header: Header
    end_lsn: Lsn
    commit_lsn: Lsn = INVALID_LSN
    commit_time: int | None = None
    last_sequence: int = 0
    prepared: dict[str, Prepared] = field(default_factory=dict)
    relations: list[RelationVersion] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        if isinstance(entry, RelationVersion):
            self.relations.append(entry)
            return
        self.end_lsn = max(self.end_lsn, entry.end_lsn)
        # retention keeps a prepared transaction, which may be older than the log's beginning
        self.last_sequence = max(self.last_sequence, entry.last_sequence)
        match entry:
            case Prepared():
                self.prepared[entry.gid] = entry
            case RolledBack():
                self.prepared.pop(entry.gid, None)
            case Transaction() | Transactions():
                self.commit_lsn, self.commit_time = entry.commit_lsn, entry.commit_time
                if isinstance(entry, Transaction) and entry.gid is not None:
                    self.prepared.pop(entry.gid, None)


class Manifest(ManifestFile):
    """Reads the manifest from its beginning, and goes on as it grows."""

    def entries(self) -> Iterator[Entry]:
        """The entries that have not been read yet, up to the end or an incomplete line."""
        while (line := self._line()) is not None:
            yield parse_entry(line)


def summarise(manifest: Manifest) -> Summary:
    """Read the whole manifest and keep what a writer needs."""
    header = manifest.header
    summary = Summary(header, header.start_lsn, last_sequence=header.first_sequence - 1)
    for entry in manifest.entries():
        summary.add(entry)
    return summary


def create(directory: Path, header: Header, entries: Iterable[Entry] = ()) -> None:
    """Write a new manifest, atomically. It replaces an existing one."""
    write_lines_durably(directory / NAME, itertools.chain([render_header(header)], map(render, entries)))


def render(entry: Entry) -> bytes:
    """One line of the manifest."""
    if not isinstance(entry, RelationVersion):
        return render_record(entry)
    body: dict[str, Any] = {
        "oid": entry.oid,
        "version": entry.version,
        "lsn": str(entry.lsn),
        "name": f"{entry.relation.namespace}.{entry.relation.name}",
        "message": base64.b64encode(entry.raw).decode(),
        "types": [[t.oid, t.namespace, t.name] for t in entry.types],
    }
    return to_line({"relation": body})


def parse_entry(content: dict[str, Any]) -> Entry:
    """The entry of a line."""
    return parse_relation(content["relation"]) if "relation" in content else parse_record(content)


def parse_relation(body: dict[str, Any]) -> RelationVersion:
    """The definition in a line."""
    raw = base64.b64decode(body["message"])
    relation = decode(raw, streamed=False)
    assert isinstance(relation, Relation)
    types = tuple(Type(oid, namespace, name) for oid, namespace, name in body["types"])
    return RelationVersion(body["oid"], body["version"], Lsn.parse(body["lsn"]), relation, raw, types)
