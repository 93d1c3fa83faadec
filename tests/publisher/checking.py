"""What tests of the preflight have in common: one check alone, and its fix pasted."""

from __future__ import annotations

import os
import subprocess

import pytest

from conftest import Database
from walmere.config import Source
from walmere.publisher import check as preflight
from walmere.publisher.check import check
from walmere.publisher.finding import Finding, Level
from walmere.testing.server import Server


def found(source: Source, name: str) -> list[Finding]:
    """What this one check says, without the time that the others take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_CHECKS", tuple(one for one in preflight._CHECKS if one.__name__ == name))
        return [finding for finding in check(source) if finding.name == name]


def trouble(source: Source, name: str) -> list[tuple[str, str, str]]:
    return [(f.level.value, f.what, f.fix) for f in found(source, name) if f.level is not Level.OK]


def paste(server: Server, database: str, fix: str) -> subprocess.CompletedProcess[str]:
    """As a person would: SQL into psql as the superuser, a command into the shell."""
    command = (
        fix if fix.startswith(("psql", "pg_isready")) else f"psql -X -v ON_ERROR_STOP=1 -d '{server.dsn(database)}'"
    )
    environment = {"PATH": f"{server.bindir}:{os.environ['PATH']}"}
    return subprocess.run(command, shell=True, text=True, input=fix, capture_output=True, env=environment, check=False)


def assert_fixed(database: Database, source: Source, name: str) -> None:
    """Every fix that is offered can be pasted, and then there is nothing left to say."""
    for _, _, fix in trouble(source, name):
        done = paste(database.server, database.name, fix)
        assert done.returncode == 0, done.stderr
    assert trouble(source, name) == []
    assert [finding.fix for finding in found(source, name)] == [""]
