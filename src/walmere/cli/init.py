"""`walmere init`: asks the database what can be mirrored, and writes walmere.toml.

    1. Connect, and list publications and tables with their sizes.
    2. Choose the publications, or create one.
    3. Write the file.
    4. Check it as `walmere check` does. What is missing is shown with the SQL that mends it.

It changes nothing at the source, unless it is told to create a publication or to grant privileges.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import walmere
from walmere.cli import failures, output
from walmere.cli.asking import Asker
from walmere.cli.init_file import Answers, render
from walmere.cli.options import DEFAULT, AsJson, ConfigFile
from walmere.cli.publications import Publications
from walmere.errors import AccessRefused, ConfigError

if TYPE_CHECKING:
    from walmere.config import Source
    from walmere.publisher.finding import Finding
    from walmere.publisher.survey import Survey

_LOCAL: Final = "postgresql://localhost:5432/postgres"
_PASSWORD: Final = "WALMERE_SOURCE__PASSWORD"  # noqa: S105  its name
_TARGET_PASSWORD: Final = "WALMERE_TARGET__PASSWORD"  # noqa: S105
_GRANT: Final = re.compile(r"(GRANT [^;]+|ALTER ROLE \S+ (REPLICATION|BYPASSRLS));\Z")
"""Of the fixes of `check`: those that only give the role a privilege."""

Dsn = Annotated[str | None, typer.Argument(metavar="DSN", help="The source: postgresql://repl@host:5432/database")]
Names = Annotated[list[str] | None, typer.Option("--publication", help="A publication. Repeatable.")]
Create = Annotated[bool, typer.Option("--create-publication", help="Create it: for --table, or for all tables.")]
Tables = Annotated[list[str] | None, typer.Option("--table", help="A table of the new publication. Repeatable.")]
Grant = Annotated[bool, typer.Option("--grant", help="Give the role of DSN the privileges that it lacks.")]
Admin = Annotated[str | None, typer.Option(metavar="DSN", help="Create and grant over this connection, not DSN.")]


def init(
    dsn: Dsn = None,
    config: ConfigFile = DEFAULT,
    publication: Names = None,
    create_publication: Create = False,
    table: Tables = None,
    grant: Grant = False,
    admin: Admin = None,
    name: Annotated[str | None, typer.Option(help="Of the subscription. Default: that of the publication.")] = None,
    slot: Annotated[str | None, typer.Option(help="The replication slot. Default: walmere_NAME.")] = None,
    directory: Annotated[str | None, typer.Option(help="For change log and state. Default: state/NAME.")] = None,
    lake: Annotated[str | None, typer.Option(help="For the tables: a directory, or a URL. Default: lake.")] = None,
    target_dsn: Annotated[str | None, typer.Option(metavar="DSN", help="Mirror to this database instead.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Write walmere.toml by asking the database, and you.

    Shows what the role lacks, with the SQL to mend it. Exits with 1 if there are problems; the file is there then, too.
    """
    asker = Asker(interactive=sys.stdin.isatty() and not no_input and not json)
    if config.exists() and not force and not asker.yes(f"Replace {config}?", default=False):
        hint = "--force replaces it, -c names another file"
        raise ConfigError(f"writing {config}", "the file exists already", hint)
    default = dsn or (_LOCAL if asker.interactive else None)
    text = dsn or asker.text(
        "Connection string of the source", default, "it as an argument: walmere init postgresql://user@host/database"
    )
    source, survey = _survey(asker, text)
    with_privileges = source if admin is None else _source(admin)
    publications = Publications(asker, survey, with_privileges)
    names = publications.choose(publication or [], table or [], create=create_publication)
    label = name or asker.text("Name of the subscription", names[0].replace("/", "_"), "--name")
    if target_dsn is None and lake is None:
        lake = asker.text("Where the Delta tables go: a directory, or the URL of an object store", "lake", "--lake")
    answers = Answers(
        dsn=_without_password(source, text, _PASSWORD),
        publications=tuple(names),
        slot=slot or f"walmere_{re.sub('[^a-z0-9_]+', '_', label.lower())}"[:63],
        name=label,
        directory=directory or f"state/{label}",
        lake=lake or "",
        target_dsn=None if target_dsn is None else _without_password(_source(target_dsn), target_dsn, _TARGET_PASSWORD),
    )
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(render(answers), encoding="utf-8")
    asker.say(f"\nwrote {config}\n")
    findings = walmere.Subscription(config).check()
    if grants := _grants(findings):
        asker.say("The role lacks privileges:\n" + "\n".join(f"  {each}" for each in grants))
        if grant or asker.yes("Grant them now?", default=False):
            publications.execute(grants)
            findings = walmere.Subscription(config).check()
    _report(config, survey, findings, publications.done, as_json=json)
    if any(each.level == "problem" for each in findings):
        raise typer.Exit(failures.FAILED)


def _source(dsn: str) -> Source:
    """A source, to connect with: which publications and slot is not known yet."""
    from walmere.config import Source
    from walmere.libpq import check_dsn

    source = Source.model_validate({"dsn": dsn, "publications": ["-"], "slot": "walmere"})
    check_dsn(source)
    return source


def _survey(asker: Asker, dsn: str) -> tuple[Source, Survey]:
    """Ask the database. A person is asked for a password, if one is needed."""
    from walmere.publisher.survey import survey

    source = _source(dsn)
    if password := os.environ.get(_PASSWORD):
        source = source.model_copy(update={"password": _secret(password)})
    try:
        return source, survey(source)
    except AccessRefused as error:
        if not asker.interactive or "password" not in error.wrong:
            raise
        password = asker.secret("Password")
        source = source.model_copy(update={"password": _secret(password)})
        return source, survey(source)


def _secret(text: str) -> object:
    from pydantic import SecretStr

    return SecretStr(text)


def _without_password(source: Source, dsn: str, variable: str) -> str:
    """The connection string for the file. Its password goes to the environment of this process, for the checks."""
    from walmere.libpq import dsn_without_secrets, parameters_of

    password = parameters_of(source).get("password")
    if not password:
        return dsn
    os.environ.setdefault(variable, password)
    return dsn if source.password is not None else dsn_without_secrets(source)


def _grants(findings: list[Finding]) -> list[str]:
    """The statements that give the role the privileges that it lacks."""
    return [each.fix for each in findings if each.level == "problem" and _GRANT.match(each.fix)]


def _report(config: Path, survey: Survey, findings: list[Finding], done: list[str], *, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {
                "config": str(config),
                "publications": [asdict(each) for each in survey.publications],
                "tables": [{**asdict(each), "table": str(each.table)} for each in survey.tables],
                "done": done,
                "ok": all(each.level != "problem" for each in findings),
                "findings": [asdict(each) for each in findings],
            }
        )
        return
    for statement in done:
        print(f"done: {statement}")
    worth = [each for each in findings if each.level != "ok"]
    output.findings(f"{survey.database}, PostgreSQL {survey.version}, role {survey.role}", worth, as_json=False)
    for variable in (_PASSWORD, _TARGET_PASSWORD):
        if variable in os.environ:
            print(f"the password is not in the file: export {variable}='…', or use ~/.pgpass")
    print(f"next: walmere check -c {config}, then walmere run -c {config}")
