"""A finding of `walmere check`, and what all checks share: queries, and texts of fixes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from walmere.config import PREFIX
from walmere.publisher.connect import Connection


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of one check. `name` is stable, for scripts; `fix` is empty if no action is needed."""

    name: str
    level: Level
    what: str
    fix: str = ""


Result: TypeAlias = tuple[Level, str, str]  # level, what was found, fix

Check: TypeAlias = Generator[Result, None, str]  # returns the text for the case that nothing was found


def warning(what: str, fix: str) -> Result:
    return Level.WARNING, what, fix


def problem(what: str, fix: str) -> Result:
    return Level.PROBLEM, what, fix


def query_row(connection: Connection, query: str, *parameters: Any) -> tuple[Any, ...]:
    return connection.execute(query, parameters or None).fetchone() or (None,)


def query_value(connection: Connection, query: str, *parameters: Any) -> Any:
    return query_row(connection, query, *parameters)[0]


def role_name(connection: Connection) -> str:
    return str(query_value(connection, "SELECT quote_ident(current_user)"))


def variable(key: str) -> str:
    return f"{PREFIX}SOURCE__{key.upper()}"


def restart(setting: str, value: str | int) -> str:
    return f"ALTER SYSTEM SET {setting} = '{value}';  -- then restart the server"


def reload(setting: str, value: str) -> str:
    return f"ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf();"
