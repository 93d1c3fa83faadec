"""The output of `walmere log`: each transaction as text, or as a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from walmere.changelog.reader import Change, LoggedTransaction
from walmere.pgoutput import messages as m


def transaction(logged: LoggedTransaction, *, as_json: bool) -> None:
    """Print one transaction, change by change: it may be larger than memory."""
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
            print(", " * (index > 0) + json.dumps(_change(change), ensure_ascii=escaped), end="")
        print("]}", flush=True)
        return
    origin = f"  origin {logged.origin}" if logged.origin else ""
    what = f"transaction {logged.xid}" if logged.xid else "message outside transactions"
    print(f"{logged.commit_lsn}  {logged.commit_time:%Y-%m-%d %H:%M:%S.%f%z}  {what}{origin}")
    for change in logged.changes:
        print(f"  {_line(change)}")
    sys.stdout.flush()


def _change(change: Change) -> dict[str, Any]:
    """A change as JSON. Values are PostgreSQL's text."""
    shown: dict[str, Any] = {"kind": type(change.message).__name__.lower(), "lsn": str(change.lsn)}
    match message := change.message:
        case m.LogicalMessage():
            shown |= {"kind": "message", "transactional": message.transactional, "prefix": message.prefix}
            shown["content"] = message.content.decode(errors="backslashreplace")
        case m.Truncate():
            shown["tables"] = [_name(relation) for relation in change.relations]
            shown |= {"cascade": message.cascade, "restart_identity": message.restart_identity}
        case _:
            relation = change.relations[0]
            shown["table"] = _name(relation)
            for part in ("key", "old", "new"):
                if (values := getattr(message, part, None)) is not None:
                    shown[part] = {c: _text(v) for c, v in _pairs(relation, values, part) if v is not m.UNCHANGED}
            if unchanged := [c for c, v in _pairs(relation, getattr(message, "new", ()), "new") if v is m.UNCHANGED]:
                shown["unchanged"] = unchanged
    return shown


def _line(change: Change) -> str:
    """A change as a line of text."""
    match message := change.message:
        case m.LogicalMessage():
            return f"MESSAGE {message.prefix}: {message.content.decode(errors='backslashreplace')!r}"
        case m.Truncate():
            options = " RESTART IDENTITY" * message.restart_identity + " CASCADE" * message.cascade
            return f"TRUNCATE {', '.join(_name(relation) for relation in change.relations)}{options}"
        case m.Update(key=key, old=old, new=new):
            relation = change.relations[0]
            before = _values(relation, key or old, "key" if key else "old") if key or old else ""
            return f"UPDATE {_name(relation)}  {before + ' → ' if before else ''}{_values(relation, new, 'new')}"
        case m.Insert(new=new):
            return f"INSERT {_name(change.relations[0])}  {_values(change.relations[0], new, 'new')}"
        case m.Delete(key=key, old=old):
            shown = _values(change.relations[0], key or old or (), "key" if key else "old")
            return f"DELETE {_name(change.relations[0])}  {shown}"


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
