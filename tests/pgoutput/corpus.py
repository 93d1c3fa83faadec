"""Reads corpus.hex: what real servers sent (see capture.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from walmere.pgoutput import Decoder, Keepalive, Message, Relation, RowMessage, decode_frame


@dataclass(frozen=True)
class Captured:
    section: str
    frame: bytes
    data: bytes  # the message inside
    streamed: bool
    stream: int | None  # top-level xid
    message: Message


@cache
def lines() -> tuple[tuple[str, bytes], ...]:
    """Every frame, with its section."""
    found, section = [], ""
    for line in Path(__file__).with_name("corpus.hex").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            found.append((section, bytes.fromhex(line)))
    return tuple(found)


@cache
def captured() -> tuple[Captured, ...]:
    """Every message, in order."""
    decoders: dict[str, Decoder] = {}
    found = []
    for section, raw in lines():
        decoder = decoders.setdefault(section, Decoder())
        frame = decode_frame(raw)
        if not isinstance(frame, Keepalive):
            stream = decoder.stream
            message = decoder.decode(frame.data)
            found.append(Captured(section, raw, frame.data, stream is not None, stream, message))
    return tuple(found)


@dataclass(frozen=True)
class Block:
    section: str
    relation: Relation
    streamed: bool
    messages: tuple[bytes, ...]


@cache
def blocks() -> tuple[Block, ...]:
    """The row messages, grouped by the definition they were sent under."""
    relations: dict[tuple[str, int | None, int], Relation] = {}
    groups: dict[tuple[str, bool, Relation], list[bytes]] = {}
    for each in captured():
        message = each.message
        if isinstance(message, Relation):
            relations[each.section, each.stream, message.oid] = message
            relations.setdefault((each.section, None, message.oid), message)
        elif isinstance(message, RowMessage):
            relation = relations[each.section, each.stream, message.relation]
            groups.setdefault((each.section, each.streamed, relation), []).append(each.data)
    return tuple(Block(s, relation, streamed, tuple(m)) for (s, streamed, relation), m in groups.items())
