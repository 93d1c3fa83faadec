"""The change log in an object store: its names, its head, and how a block is read.

    head                             epoch, generation, and the newest manifest; changed by compare-and-set only
    <generation>/log/<number>        the log, in objects with consecutive numbers
    <generation>/manifest/<number>…  the manifest of everything before that number, without what was removed
    <generation>/state, ledger/…     see `walmere.subscription.shared.state`

A *generation* (`walmere-` and 16 digits) is the life of a log, from its creation to `walmere drop`. Objects of an
earlier one are never mistaken for those of the current one.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walmere.changelog.store import block_cache
from walmere.errors import ChangeLogDamaged, ChangeLogVersion
from walmere.object_store import ObjectStore, open_store
from walmere.storage import read_json, write_durably

if TYPE_CHECKING:
    from walmere.changelog.segment_entry import Stored

HEAD: Final = "head"
GENERATION: Final = "walmere-"
"""The names of generations begin with it."""
VERSION: Final = 1
MARKER: Final = "store.json"
"""In the directory of the cache: which store it belongs to."""
_FORMAT: Final = "walmere log head"
_DAMAGED_HINT: Final = (
    "restore the object, if the store keeps older versions; or run `walmere drop`, then start the subscription again"
)


@dataclass(frozen=True, slots=True)
class Head:
    """The content of `head`."""

    generation: str
    subscription: str  # its name
    epoch: int
    writer: str  # the start of a receiver that has this epoch, for people
    manifest: str  # name of the newest manifest
    manifest_epoch: int  # of its writer: objects from `number` on with a lower one are void
    number: int  # of the first object after that manifest
    oldest: int  # number of the oldest object that is needed

    def render(self) -> bytes:
        """The object's content."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, indent=1).encode() + b"\n"


def read_head(store: ObjectStore) -> tuple[Head, str] | None:
    """The head of the log and its e-tag; None if there is no log."""
    found = store.get(HEAD)
    if found is None:
        return None
    where = f"{store.url}/{HEAD}"
    try:
        content: dict[str, Any] = json.loads(found[0])
        if content.pop("format") != _FORMAT:
            raise ValueError("format")
        require_version(where, content.pop("version"), VERSION)
        return Head(**content), found[1]
    except (ValueError, KeyError, TypeError, AttributeError):
        wrong, hint = "it is not the head of a change log", "restore it; or set subscription.store to another URL"
        raise ChangeLogDamaged(f"reading {where}", wrong, hint) from None


def require_version(where: str, version: object, known: int) -> None:
    """Refuse a format version that this version of Walmere does not read."""
    if version != known:
        raise ChangeLogVersion(
            f"reading {where}",
            f"it has format version {version}, this version of Walmere reads format version {known}",
            "use the version of Walmere that wrote it, or a newer one",
        )


def damaged(where: str, wrong: str) -> ChangeLogDamaged:
    """The error for a damaged object."""
    return ChangeLogDamaged(f"reading {where}", wrong, _DAMAGED_HINT)


@dataclass(frozen=True, slots=True)
class LogStore:
    """The objects of one generation of the log. It pickles, without credentials."""

    store: ObjectStore
    generation: str
    caches: bool = False  # whether blocks are kept on the disk of an executor: see `block_cache`

    def name(self, number: int) -> str:
        """The name of an object."""
        return f"{self.generation}/log/{number:020d}"

    def url(self, number: int) -> str:
        """The same for messages."""
        return f"{self.store.url}/{self.name(number)}"

    def read_block(self, stored: Stored, offset: int, length: int, checksum: int) -> bytes:
        """The bytes of a block of a segment. Raises ChangeLogDamaged."""
        begin = stored.offset + offset

        def fetch() -> bytes:
            return self._fetch(stored.number, begin, length, checksum)

        name = f"{self.generation}-{stored.number}-{begin}"
        return block_cache.read(name, checksum, fetch) if self.caches else fetch()

    def _fetch(self, number: int, begin: int, length: int, checksum: int) -> bytes:
        where = self.url(number)
        try:
            data = self.store.get_range(self.name(number), begin, length)
        except FileNotFoundError:
            raise damaged(where, "the object is missing") from None
        if len(data) != length:
            raise damaged(where, f"it ends before byte {begin + length}")
        if zlib.crc32(data) != checksum:
            raise damaged(where, f"the block at byte {begin} fails its checksum")
        return data


def write_marker(directory: Path, log: LogStore) -> None:
    """Record in a directory that it is a cache of this log."""
    content = {"url": log.store.url, "options": dict(log.store.options), "generation": log.generation}
    write_durably(directory / MARKER, json.dumps(content))


def store_of(directory: Path) -> LogStore | None:
    """The log of which a directory is a cache; None: it is none."""
    try:
        return read_json(directory / MARKER, _from_marker, "delete the directory: it is a cache")
    except FileNotFoundError:
        return None


def _from_marker(content: dict[str, Any]) -> LogStore:
    return LogStore(open_store(content["url"], content["options"]), content["generation"])
