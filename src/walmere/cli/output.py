"""What commands print: text for people, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from walmere.units import counted

if TYPE_CHECKING:
    from walmere.publisher.finding import Finding

_MARKS = {"ok": "[green]✓[/green]", "warning": "[yellow]![/yellow]", "problem": "[red]✗[/red]"}


def print_json(content: Any) -> None:
    """Print JSON for scripts, which a person can read, too."""
    print(json.dumps(content, indent=2))


def done(text: str, *, as_json: bool, **content: Any) -> None:
    """Print what a command has done: a line of text, or the content as JSON."""
    if as_json:
        print_json(content)
    else:
        print(text)


def findings(source: str, report: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings of `check`."""
    if as_json:
        fine = all(finding.level != "problem" for finding in report)
        print_json({"source": source, "ok": fine, "findings": [asdict(finding) for finding in report]})
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(source)}[/bold]")
    for finding in report:
        console.print(f" {_MARKS[finding.level]} {finding.name}: {escape(finding.what)}")
        for line in finding.fix.splitlines():
            console.print(f"     [cyan]{escape(line)}[/cyan]")
    problems = sum(finding.level == "problem" for finding in report)
    warnings = sum(finding.level == "warning" for finding in report)
    console.print(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}")


def progress(now: Mapping[str, Any]) -> None:
    """Print the progress of a run as a line of JSON. `time` is Unix time in seconds."""
    print(json.dumps({"time": round(time.time(), 3), **now}), flush=True)
