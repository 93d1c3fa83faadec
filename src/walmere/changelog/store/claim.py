"""The right to write a log in a store: an epoch, raised by compare-and-set, and a fence against writers before.

Numbers are used once, because objects are put with *create*. A writer has at most `WINDOW` puts under way, and begins
the next one when the oldest of them is acknowledged. So a writer that was only believed to be dead can still put the
next `WINDOW` numbers, and no others. A new writer

    1. raises the epoch in `head`, and reads the log again if `head` has another manifest than it has read: the writer
       before may delete the objects before that manifest, and then their numbers are free;
    2. puts an empty object at the next number. If the number is taken by a lower epoch, that object belongs to the log,
       and the next number is tried. If it is taken by a higher epoch, this writer has lost;
    3. puts empty objects at the `WINDOW - 1` numbers after that. If one of them is taken by a lower epoch, that object
       is void: its writer could not put the one before it, so it has never acknowledged it.

After that, no put of a lower epoch succeeds, and every number that this writer finds taken means a higher epoch.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from walmere.changelog.store.log_store import GENERATION, HEAD, Head, LogStore, read_head
from walmere.changelog.store.objects import LogObject, ObjectHeader, build, numbers_before, pack_manifest, read_object
from walmere.errors import ChangeLogError, TakenOver
from walmere.object_store import ObjectStore

WINDOW: Final = 3
"""Puts that a writer has under way, at most. Part of the format: a new writer fences so many numbers."""


def writer_name() -> str:
    """A name for one start of a process, that no other start has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def create_log(store: ObjectStore, subscription: str, lines: bytes) -> bool:
    """Create a log with this manifest, and no objects. Returns False if there is one already."""
    return create_head(LogStore(store, f"{GENERATION}{secrets.token_hex(8)}"), subscription, lines, 1)


def create_head(log: LogStore, subscription: str, lines: bytes, number: int) -> bool:
    """Create the head of a log with this manifest, of all objects before a number. Returns False if there is a head."""
    manifest = _manifest_name(log.generation, number, 0)
    log.store.create(manifest, pack_manifest(lines))
    head = Head(log.generation, subscription, 0, "", manifest, manifest_epoch=0, number=number, oldest=1)
    if log.store.create(HEAD, head.render()):
        return True
    found = read_head(log.store)  # ours, if the answer was lost and another writer has raised the epoch meanwhile
    return found is not None and found[0].generation == log.generation


class Claim:
    """The right to write the log, until another writer raises the epoch."""

    def __init__(self, store: ObjectStore, generation: str) -> None:
        """Raise the epoch. Raises TakenOver if there is no log of this generation any more."""
        self.writer = writer_name()
        while True:
            found = read_head(store)
            if found is None or found[0].generation != generation:
                raise self._replaced(store.url)
            self.head = replace(found[0], epoch=found[0].epoch + 1, writer=self.writer)
            etag = store.replace_if(HEAD, self.head.render(), found[1])
            if etag is not None:
                self._etag = etag
                break
        self.log = LogStore(store, generation)

    @property
    def epoch(self) -> int:
        return self.head.epoch

    def header(self, number: int) -> ObjectHeader:
        """The header of an object of this writer."""
        return ObjectHeader(number, self.epoch, self.writer)

    def fence(self, number: int) -> LogObject | None:
        """Put the first empty object. Returns the object that has this number, if a writer before has put it."""
        return self._put_fence(number)

    def fence_rest(self, number: int) -> int:
        """Put the other empty objects, after the first one has this number. Returns the number of the first upload."""
        for each in range(number + 1, number + WINDOW):
            self._put_fence(each)
        return number + WINDOW

    def _put_fence(self, number: int) -> LogObject | None:
        if self.log.store.create(self.log.name(number), build(self.header(number), (), {}, {}).content):
            return None
        return self._found(number)

    def put(self, number: int, content: bytes) -> None:
        """Put an object after the fence. Raises TakenOver if another writer has this number."""
        if not self.log.store.create(self.log.name(number), content):
            found = self._found(number)
            raise ChangeLogError(
                f"writing {self.log.url(number)}",
                f"the object exists, and its epoch {found.header.epoch} is not higher than {self.epoch}",
                "please report this",
            )

    def _found(self, number: int) -> LogObject:
        """The object that another writer has put. Raises TakenOver if its epoch is higher."""
        found = read_object(self.log, number)
        if found is None:  # a later writer has put it, and retention has deleted it
            self.check()
            raise self._taken_over("another receiver")
        if found.header.epoch > self.epoch:
            raise self._taken_over(found.header.writer)
        return found

    def check(self) -> None:
        """Raise TakenOver if another writer has raised the epoch."""
        self._read_own_head()

    def _read_own_head(self) -> str:
        """The e-tag of the head. Raises TakenOver if another writer has raised the epoch."""
        found = read_head(self.log.store)
        if found is None or found[0].generation != self.log.generation:
            raise self._replaced(self.log.store.url)
        if found[0].epoch != self.epoch:
            raise self._taken_over(found[0].writer)
        return found[1]

    def publish(self, number: int, lines: bytes, oldest: int | None = None) -> None:
        """Put the manifest of everything before a number, and have `head` name it. `oldest`: see Head."""
        name = _manifest_name(self.log.generation, number, self.epoch)
        self.log.store.create(name, pack_manifest(lines))
        head = replace(
            self.head,
            manifest=name,
            manifest_epoch=self.epoch,
            number=number,
            oldest=self.head.oldest if oldest is None else oldest,
        )
        while (etag := self.log.store.replace_if(HEAD, head.render(), self._etag)) is None:
            self._etag = self._read_own_head()  # an earlier answer was lost
        self.head, self._etag = head, etag
        self._delete_manifests()

    def _delete_manifests(self) -> None:
        """Delete manifests that are not used any more. One of a later writer may not be in `head` yet."""
        place = f"{self.log.generation}/manifest"
        names = [each.name for each in self.log.store.list(place) if each.name != self.head.manifest]
        self.log.store.delete([name for name in names if int(name.split("-")[-2]) <= self.epoch])

    def delete_objects(self, keep: Iterable[int]) -> None:
        """Delete the objects before the newest manifest that nobody needs."""
        needed = set(keep)
        names = [self.log.name(each) for each in numbers_before(self.log, self.head.number) if each not in needed]
        self.log.store.delete(names)

    def _taken_over(self, writer: str) -> TakenOver:
        return TakenOver(
            f"writing the change log in {self.log.store.url}",
            f"another receiver has taken over: {writer or 'its name is not known'}",
            "no action needed, if that one should receive; this one has confirmed nothing that is not in the store",
        )

    @staticmethod
    def _replaced(url: str) -> TakenOver:
        return TakenOver(
            f"writing the change log in {url}",
            "it was dropped, or replaced by a new one",
            "start the subscription again to create a new one, or to use the one that is there",
        )


def _manifest_name(generation: str, number: int, epoch: int) -> str:
    return f"{generation}/manifest/{number:020d}-{epoch}-{secrets.token_hex(4)}"
