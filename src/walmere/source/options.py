"""The options of the `pgoutput` source, checked before anything is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walmere.errors import ConfigError
from walmere.lsn import Lsn

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_DOING: Final = "reading with format pgoutput"
_NAMES: Final = (
    *("directory", "path", "table", "columns", "dsn", "publications", "slot", "reader"),
    *("startingLsn", "endingLsn", "maxBytesPerTrigger", "availableNow"),
)
_SIZE: Final = re.compile(r"([0-9]+) ?([kmg]?)i?b?\Z", re.IGNORECASE)
_READER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}\Z")
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one query."""

    directory: Path | None
    table: tuple[str, str] | None = None  # schema and name; None: all tables
    columns: tuple[str, ...] = ()  # empty: all
    dsn: str = ""
    publications: tuple[str, ...] = ()
    slot: str = ""  # with a slot, the query receives by itself
    reader: str | None = None  # the name under which the log is kept for the query
    starting: Lsn | str = EARLIEST
    ending: Lsn | None = None
    max_bytes: int | None = None
    available_now: bool = True  # the trigger may be AvailableNow: see `query`


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Check the options. Raises ConfigError."""
    known = {name.lower(): name for name in _NAMES}
    values = {known.get(name.lower(), ""): value for name, value in given.items()}
    if "" in values:
        unknown = sorted(name for name in given if name.lower() not in known)
        raise _error(f"there is no option {', '.join(unknown)}", f"the options are {', '.join(_NAMES)}")
    dsn, slot = values.get("dsn", ""), values.get("slot", "")
    publications = _list(values.get("publications", ""))
    directory = values.get("directory") or values.get("path")
    if directory and values.get("path", directory) != directory:
        raise _error(f"option directory is {directory}, but load(…) has {values['path']}", "give only one of them")
    if slot and not (dsn and publications):
        raise _error(
            "option slot needs options dsn and publications",
            'give all three, and the query receives by itself; or only option("directory", …) of a subscription',
        )
    if publications and not dsn:
        raise _error("option publications needs option dsn", 'give option("dsn", "postgresql://…")')
    if not directory and not slot:
        raise _error(
            "option directory is missing",
            'give option("directory", "…") of a subscription; or dsn, publications and slot, to receive by itself',
        )
    options = SourceOptions(
        Path(directory).expanduser() if directory else None,
        _table(values["table"]) if "table" in values else None,
        _list(values.get("columns", "")),
        dsn,
        publications,
        slot,
        _reader(values.get("reader"), slot),
        _starting(values.get("startingLsn", EARLIEST)),
        _lsn("endingLsn", values["endingLsn"]) if "endingLsn" in values else None,
        _size(values["maxBytesPerTrigger"]) if "maxBytesPerTrigger" in values else None,
        _flag("availableNow", values.get("availableNow", "true")),
    )
    if options.ending is not None and isinstance(options.starting, Lsn) and options.starting > options.ending:
        raise _error(f"startingLsn {options.starting} is after endingLsn {options.ending}", "correct one of them")
    return options


def refuse(given: Mapping[str, str], names: tuple[str, ...], only_for: str) -> None:
    """Refuse options that would have no effect in this query. Raises ConfigError."""
    found = [name for name in names if name.lower() in {each.lower() for each in given}]
    if found:
        raise _error(f"option {', '.join(found)} is only for {only_for}", "remove it")


def default_directory(slot: str) -> Path:
    """Where a query keeps its log without option directory."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "walmere" / slot


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _table(text: str) -> tuple[str, str]:
    schema, dot, name = text.partition(".")
    if not dot:
        schema, name = "public", text
    if not (schema and name):
        raise _error(f"{text!r} is not the name of a table", 'give option("table", "schema.table")')
    return schema, name


def _reader(text: str | None, slot: str) -> str | None:
    if text is None:
        return "pgoutput" if slot else None
    if not _READER.match(text):
        raise _error(f"option reader: {text!r} is not a valid name", "use letters, digits, _ and -")
    return text


def _starting(text: str) -> Lsn | str:
    return text.lower() if text.lower() in (EARLIEST, LATEST) else _lsn("startingLsn", text)


def _lsn(name: str, text: str) -> Lsn:
    try:
        return Lsn.parse(text)
    except ValueError as error:
        more = f", {EARLIEST} or {LATEST}" if name == "startingLsn" else ""
        raise _error(f"option {name}: {error}", f"give an LSN{more}") from None


def _size(text: str) -> int:
    match = _SIZE.match(text.strip())
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not size:
        raise _error(f"option maxBytesPerTrigger: {text!r} is not a size", "give a size such as 67108864, 64m or 1g")
    return size


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _error(f"option {name}: {text!r} is neither true nor false", "give one of them")
    return text.lower() == "true"


def _error(wrong: str, hint: str) -> ConfigError:
    return ConfigError(_DOING, wrong, hint)
