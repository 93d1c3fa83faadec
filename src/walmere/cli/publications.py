"""The publications of `walmere init`: which there are, which to use, and how to create one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from walmere.cli.asking import Asker
from walmere.errors import ConfigError
from walmere.units import rows, size

if TYPE_CHECKING:
    from walmere.config import Source
    from walmere.names import TableName
    from walmere.publisher.survey import Survey, SurveyedTable

_DOING = "choosing the publications"


class Publications:
    """Chooses publications, and creates one if it is asked to."""

    def __init__(self, asker: Asker, survey: Survey, admin: Source) -> None:
        """`admin`: over which connection statements are executed."""
        self._asker = asker
        self._survey = survey
        self._admin = admin
        self.done: list[str] = []

    def choose(self, wanted: Sequence[str], tables: Sequence[str], *, create: bool) -> list[str]:
        """The publications to use. `tables`: of the one that is created; empty: all."""
        known = [each.name for each in self._survey.publications]
        self._show()
        if not wanted and (create or tables):
            wanted = [self._survey.database]
        if not wanted:
            wanted = self._ask(known) if self._asker.interactive else known
            if len(wanted) != 1:
                found = f"there are several: {', '.join(known)}" if known else "there is none"
                hint = "--publication NAME names it" + ("" if known else ", --create-publication creates it")
                raise ConfigError(_DOING, found, hint)
        for name in (each for each in wanted if each not in known):
            if create or self._asker.yes(f"Publication {name} does not exist. Create it?", default=False):
                self._create(name, tables)
        return list(wanted)

    def execute(self, statements: Sequence[str]) -> None:
        """Execute statements at the source, all or none."""
        from walmere.publisher.survey import execute

        execute(self._admin, statements)
        self.done += statements

    def _create(self, name: str, tables: Sequence[str]) -> None:
        from walmere.publisher.survey import create_publication

        if not tables and self._asker.interactive:
            answer = self._asker.text("Its tables, separated by commas; * for all", "*", "--table")
            tables = [] if answer.strip() == "*" else [each.strip() for each in answer.split(",")]
        self.execute([create_publication(name, [self._table(each) for each in tables] if tables else None)])

    def _table(self, name: str) -> TableName:
        found = [each.table for each in self._survey.tables if name in (str(each.table), each.table.name)]
        if len(found) != 1:
            wrong = f"{len(found)} tables are called {name}" if found else f"there is no table {name}"
            known = ", ".join(str(each.table) for each in self._survey.tables) or "none"
            raise ConfigError("creating a publication", wrong, f"the tables are {known}")
        return found[0]

    def _ask(self, known: Sequence[str]) -> list[str]:
        descriptions = {each.name: f"{each.tables} tables, {size(each.bytes)}" for each in self._survey.publications}
        choices = [*(f"{name} ({descriptions[name]})" for name in known), "a new one"]
        self._asker.say("\nPublications:")
        number = self._asker.choice("Which one", choices)
        if number < len(known):
            return [known[number]]
        return [self._asker.text("Name of the new publication", self._survey.database, "--publication")]

    def _show(self) -> None:
        survey = self._survey
        self._asker.say(f"\nDatabase {survey.database}, PostgreSQL {survey.version}, role {survey.role}")
        for each in survey.tables:
            self._asker.say(f"  {_line(each)}")


def _line(table: SurveyedTable) -> str:
    count = "" if table.rows is None else f", about {rows(table.rows)} rows"
    published = f", in {', '.join(table.publications)}" if table.publications else ""
    identity = (
        "" if table.identified else "; without a replica identity, so UPDATE and DELETE fail once it is published"
    )
    return f"{table.table}: {size(table.bytes)}{count}{published}{identity}"
