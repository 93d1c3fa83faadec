"""Questions of `walmere init`. Without a terminal, the flags have to say it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from walmere.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks a person, or takes the default if nobody is there."""

    interactive: bool

    def text(self, question: str, default: str | None, flag: str) -> str:
        """A text. Raises ConfigError if nobody is there and there is no default."""
        if self.interactive:
            return str(typer.prompt(question, default=default, err=True))
        if default is None:
            raise ConfigError("writing the configuration", f"there is no {question.lower()}", f"give {flag}")
        return default

    def secret(self, question: str) -> str:
        """A password, which is not shown."""
        return str(typer.prompt(question, hide_input=True, err=True))

    def yes(self, question: str, *, default: bool) -> bool:
        """Yes or no; without a person, the default."""
        return typer.confirm(question, default=default, err=True) if self.interactive else default

    def choice(self, question: str, choices: Sequence[str], default: int = 0) -> int:
        """One of several: its number, from 0. Only for a person."""
        for number, each in enumerate(choices, 1):
            typer.echo(f"  {number}  {each}", err=True)
        while True:
            answer = str(typer.prompt(question, default=str(default + 1), err=True)).strip()
            if answer.isdecimal() and 1 <= int(answer) <= len(choices):
                return int(answer) - 1
            typer.echo(f"Enter a number from 1 to {len(choices)}.", err=True)

    def say(self, text: str = "") -> None:
        """Tell a person something."""
        if self.interactive:
            typer.echo(text, err=True)
