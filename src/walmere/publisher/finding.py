"""What a check of the source says: a finding, and the small questions and answers that all checks are made of."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from walmere.config import PREFIX
from walmere.publisher.connect import Connection


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `name` is stable, for scripts; `fix` is empty when there is nothing to do."""

    name: str
    level: Level
    what: str
    fix: str = ""


Said: TypeAlias = tuple[Level, str, str]

Check: TypeAlias = Generator[Said, None, str]


def warning(what: str, fix: str) -> Said:
    return Level.WARNING, what, fix


def problem(what: str, fix: str) -> Said:
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
