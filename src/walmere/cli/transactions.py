"""The output of `walmere log`: each transaction as text, or as a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from walmere.changelog.changes import Change
from walmere.changelog.reader import LoggedTransaction
from walmere.pgoutput import messages as m


def transaction(logged: LoggedTransaction, *, values: bool, as_json: bool) -> None:
    """Print one transaction, change by change: it may be larger than memory. `values`: with those of the rows."""
    if as_json:
        escaped = sys.stdout.encoding.lower() != "utf-8"  # then write JSON in ASCII
        head = {
            "xid": logged.xid,
            "commit_lsn": str(logged.commit_lsn),
            "commit_time": logged.commit_time.isoformat(),
            "origin": logged.origin,
        }
        print(json.dumps(head, ensure_ascii=escaped)[:-1], end=', "changes": [')
        for index, change in enumerate(logged.changes):
            shown = _change(change) | (_content(change) if values else {})
            print(", " * (index > 0) + json.dumps(shown, ensure_ascii=escaped), end="")
        print("]}", flush=True)
        return
    origin = f"  origin {logged.origin}" if logged.origin else ""
    what = f"transaction {logged.xid}" if logged.xid else "message outside transactions"
    print(f"{logged.commit_lsn}  {logged.commit_time:%Y-%m-%d %H:%M:%S.%f%z}  {what}{origin}")
    for change in logged.changes:
        print(f"  {_line(change)}{_text_of(change) if values else ''}")
    sys.stdout.flush()


def _change(change: Change) -> dict[str, Any]:
    """A change as JSON, without values."""
    shown: dict[str, Any] = {"kind": change.kind, "lsn": str(change.lsn)}
    match change.kind:
        case "message":
            message = change.message
            assert isinstance(message, m.LogicalMessage)
            shown |= {"transactional": message.transactional, "prefix": message.prefix, "bytes": len(message.content)}
        case "truncate":
            message = change.message
            assert isinstance(message, m.Truncate)
            shown["tables"] = [_name(relation) for relation in change.relations]
            shown |= {"cascade": message.cascade, "restart_identity": message.restart_identity}
        case _:
            shown["table"] = _name(change.relations[0])
    return shown


def _content(change: Change) -> dict[str, Any]:
    """The values of a change as JSON: PostgreSQL's text."""
    match message := change.message:
        case m.LogicalMessage():
            return {"content": message.content.decode(errors="backslashreplace")}
        case m.Truncate():
            return {}
    relation = change.relations[0]
    shown: dict[str, Any] = {}
    for part in ("key", "old", "new"):
        if (values := getattr(message, part, None)) is not None:
            shown[part] = {c: _text(v) for c, v in _pairs(relation, values, part) if v is not m.UNCHANGED}
    if unchanged := [c for c, v in _pairs(relation, getattr(message, "new", ()), "new") if v is m.UNCHANGED]:
        shown["unchanged"] = unchanged
    return shown


def _line(change: Change) -> str:
    """A change as a line of text, without values."""
    if change.kind == "message":
        message = change.message
        assert isinstance(message, m.LogicalMessage)
        return f"MESSAGE {message.prefix}  {len(message.content)} bytes"
    tables = ", ".join(_name(relation) for relation in change.relations)
    if change.kind != "truncate":
        return f"{change.kind.upper()} {tables}"
    message = change.message
    assert isinstance(message, m.Truncate)
    return f"TRUNCATE {tables}{' RESTART IDENTITY' * message.restart_identity}{' CASCADE' * message.cascade}"


def _text_of(change: Change) -> str:
    """What follows in the line with values."""
    match message := change.message:
        case m.LogicalMessage():
            return f"  {message.content.decode(errors='backslashreplace')!r}"
        case m.Truncate():
            return ""
        case m.Insert(new=new):
            return f"  {_values(change.relations[0], new, 'new')}"
        case m.Update(key=key, old=old, new=new):
            relation = change.relations[0]
            before = _values(relation, key or old, "key" if key else "old") if key or old else ""
            return f"  {before + ' → ' if before else ''}{_values(relation, new, 'new')}"
        case m.Delete(key=key, old=old):
            return f"  {_values(change.relations[0], key or old or (), 'key' if key else 'old')}"


def _pairs(relation: m.Relation, values: m.Tuple, part: str) -> Iterable[tuple[str, m.Value]]:
    """Columns and values; of a key tuple only the key columns, because the others are not sent."""
    for column, value in zip(relation.columns, values, strict=False):
        if part != "key" or column.is_key:
            yield column.name, value


def _values(relation: m.Relation, values: m.Tuple | None, part: str) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in _pairs(relation, values or (), part))


def _shown(value: m.Value) -> str:
    if value is m.UNCHANGED:
        return "(unchanged)"
    return "NULL" if value is None else repr(_text(value))


def _text(value: m.Value) -> str | None:
    data = value.data if isinstance(value, m.Binary) else value
    return data.decode(errors="backslashreplace") if isinstance(data, bytes) else None


def _name(relation: m.Relation) -> str:
    return f"{relation.namespace or 'pg_catalog'}.{relation.name}"
