"""Structured logs (`--log-format json`): one JSON object on one line for each event, on stderr. Never row values.

Every line has `time` (UTC), `level`, `event` and `message`. Events of a run have more fields, such as `table`, `phase`,
`lsn`, `changes`. A traceback is never in it: it could have values of rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from walmere.cli import failures
from walmere.errors import WalmereError

_log = logging.getLogger(__name__)

_FIELDS: Final = "walmere_fields"
"""The attribute of a log record that has the fields of an event."""


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="Log lines as text, or as JSON.")]


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def __init__(self, **always: Any) -> None:
        """`always`: fields of every line."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "log",
            "message": " ".join(record.getMessage().split()),
            "logger": record.name,
            **self._always,
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line, ensure_ascii=False)


@contextlib.contextmanager
def as_json(subscription: str) -> Iterator[None]:
    """Log as JSON, from level INFO. An error that ends the context is logged, and not printed again."""
    logging.getLogger().setLevel(logging.INFO)
    for name in ("py4j", "pyspark"):  # their lines are in spark.log
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines(subscription=subscription))
    try:
        yield
    except (WalmereError, OSError) as error:
        log_failure(error)
        failures.already_shown()
        raise


def log_event(event: str, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with fields."""
    _log.log(level, "%s", message, extra={_FIELDS: {"event": event, **fields}})


def log_failure(error: WalmereError | OSError) -> None:
    """Log the error that ended the command."""
    if isinstance(error, WalmereError):
        fields = {"error": type(error).__name__, "doing": error.doing, "wrong": error.wrong, "hint": error.hint}
        log_event("failed", f"{error.doing}: {error.wrong}", logging.ERROR, **fields)
    else:
        log_event("failed", str(error), logging.ERROR, error=type(error).__name__)


class ProgressLog:
    """Logs what has changed between two reports of a run: phases, errors, and what batches have applied."""

    def __init__(self) -> None:
        self._tables: dict[str, Mapping[str, Any]] = {}
        self._applied: str | None = None

    def __call__(self, now: Mapping[str, Any]) -> None:
        """Take a report: see `running.RunProgress`."""
        if not self._tables:
            log_event("started", "the run has started", tables=len(now["tables"]))
        changes: dict[str, int] = {}
        for table in now["tables"]:
            name, before = table["name"], self._tables.get(table["name"], {})
            if table["phase"] != before.get("phase"):
                fields = {"table": name, "phase": table["phase"], "rows_copied": table["rows_copied"]}
                log_event("table_phase", f"{name} is in phase {table['phase']}", **fields)
            if table["error"] is not None and table["error"] != before.get("error"):
                what = table["error"].split("\n")[0]
                log_event("table_error", f"{name}: {what}", logging.WARNING, table=name, wrong=what)
            if table["rejects"] > before.get("rejects", 0) and before:
                log_event("rejects", f"{name} has {table['rejects']} rejects", table=name, rejects=table["rejects"])
            if (count := table["changes"] - before.get("changes", 0)) > 0:
                changes[name] = count
            self._tables[name] = table
        if now["applied_lsn"] is not None and now["applied_lsn"] != self._applied:
            self._applied = now["applied_lsn"]
            total = sum(changes.values())
            fields = {"lsn": self._applied, "changes": total, "tables": changes}
            log_event("applied", f"applied {total} changes, up to {self._applied}", **fields)
