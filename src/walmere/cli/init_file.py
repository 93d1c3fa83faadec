"""The walmere.toml that `walmere init` writes, with comments on what most people change."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answers:
    """What the file has to say."""

    dsn: str  # without a password
    publications: tuple[str, ...]
    slot: str
    name: str
    directory: str
    lake: str
    target_dsn: str | None = None  # of a database as the target, without a password


def render(answers: Answers) -> str:
    """The text of the file."""
    return f"""\
# The subscription {json.dumps(answers.name)} of Walmere. `walmere help configuration` lists all keys.
#
#   walmere check    what is missing, and how to mend it
#   walmere run      copies the tables, then follows the changes
#   walmere status   how far it is

[source]
# Any connection string of libpq. Not the password: set WALMERE_SOURCE__PASSWORD or PGPASSWORD, or use ~/.pgpass.
dsn = {_text(answers.dsn)}
publications = {_texts(answers.publications)}
# The replication slot, which `walmere run` creates and `walmere drop` drops.
slot = {_text(answers.slot)}

[subscription]
name = {_text(answers.name)}
# The change log and all state. A relative path begins at this file. Not inside the target's path.
directory = {_text(answers.directory)}
# A segment of the change log is kept for so long, and until it is applied. Default: a day.
# keep_seconds = 86400

{_target(answers)}
[spark]
master = "local[*]"
# Any setting of Spark, under its own name.
# "spark.driver.memory" = "2g"
# Spark's own page; `walmere run` prints its address.
# "spark.ui.enabled" = true
"""


def _target(answers: Answers) -> str:
    if answers.target_dsn is not None:
        return f"""\
[target]
kind = "postgres"
# The password: WALMERE_TARGET__PASSWORD.
dsn = {_text(answers.target_dsn)}
# Create missing tables from the source's catalogs.
create_tables = true
"""
    return f"""\
[target]
# Delta tables at <path>/<schema>/<table>: a directory, or the URL of an object store (s3://…, gs://…, az://…).
path = {_text(answers.lake)}
# How far back tables can be read. Default: an hour.
# keep_seconds = 3600
"""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a basic string of TOML is the same


def _texts(values: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_text, values))}]"
