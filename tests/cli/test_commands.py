"""What all commands have: help, JSON, one line for an error, completion, and a fast start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from processes import Here, walmere
from walmere.cli.app import COMMANDS, app
from walmere.cli.topics import topics

SOURCES = sorted((Path(__file__).parents[2] / "src" / "walmere").rglob("*.py"))
TOPIC = re.compile(r"walmere help ([a-z][a-z-]+)")


def options(name: str) -> set[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {option for each in group.commands[name].params for option in each.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_json_and_verbose(name: str, here: Here) -> None:
    assert options(name) >= {"--json", "--verbose", "-v"}
    code, out, _ = here(name, "-h")
    assert code == 0
    assert out.startswith(f"Usage: walmere {name} ")
    assert out == here(name, "--help")[1]


def test_without_a_command_there_is_help(here: Here) -> None:
    code, out, _ = here()
    assert code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w.*[.]$", out, re.MULTILINE), "in one line, and not cut off"


def test_an_error_is_one_line_and_a_hint_and_its_traceback_is_shown_with_v(tmp_path: Path, here: Here) -> None:
    code, out, err = here("status", "-c", tmp_path / "nowhere.toml")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("walmere: reading ")
    assert err.splitlines()[1].startswith("  hint: ")
    assert len(err.splitlines()) == 2
    code, out, err = here("status", "-c", tmp_path / "nowhere.toml", "-v")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert "Traceback" not in here("status", "-c", tmp_path / "nowhere.toml")[2]


@pytest.mark.parametrize("option", ["-v", "--verbose"])
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo", "help", "init", "warm"}))
def test_v_may_be_before_the_command(name: str, option: str, tmp_path: Path, here: Here) -> None:
    arguments = {"resync": ["t"], "skip": ["0/1"]}.get(name, [])
    code, _, err = here(option, name, *arguments, "-c", tmp_path / "nowhere.toml")
    assert code == 2
    assert "Traceback" in err
    assert "there is no such file" in err.splitlines()[-2]
    assert "Traceback" not in here(name, *arguments, "-c", tmp_path / "nowhere.toml")[2], "only for one command"


def test_a_wrong_argument_is_one_line_and_a_hint(here: Here) -> None:
    code, out, err = here("receive", "--twice")
    assert (code, out) == (2, "")
    wrong, hint = err.splitlines()
    assert wrong.startswith("walmere: no such option: --twice")
    assert hint == "  hint: walmere receive -h shows the arguments"


def test_an_unknown_command_names_the_list_of_commands(here: Here) -> None:
    code, out, err = here("stat")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "walmere: no such command 'stat'. Did you mean 'status'?",
        "  hint: walmere -h lists the commands",
    ]


def test_an_unexpected_error_is_a_line_too(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Path]:
        raise KeyError("what nobody thought of")

    monkeypatch.setattr("walmere.cli.topics.topics", broken)
    code, _, err = here("help")
    assert code == 1
    assert "an unexpected error: KeyError: 'what nobody thought of'" in err
    assert "Traceback" not in err
    assert "Traceback" in here("help", "-v")[2]


# help


def test_help_lists_the_topics_and_shows_them(here: Here) -> None:
    code, out, _ = here("help")
    assert code == 0
    for name, page in topics().items():
        assert re.search(rf"^{name} +\S", out, re.MULTILINE)
        code, text, _ = here("help", name)
        assert (code, text.splitlines()[0]) == (0, page.read_text().splitlines()[0])
        assert "<!--" not in text
    listed = json.loads(here("help", "--json")[1])
    assert {each["topic"] for each in listed} == set(topics())
    assert json.loads(here("help", "commands", "--json")[1])["title"] == "Commands"
    code, _, err = here("help", "config")
    assert code == 2
    assert "hint: `walmere help configuration`?" in err


def test_hints_name_topics_that_exist_and_no_files_outside_the_package() -> None:
    named = {topic for path in SOURCES for topic in TOPIC.findall(path.read_text())}
    assert {"configuration", "cluster"} <= named <= set(topics())
    hints = [path for path in SOURCES if re.search(r'"[^"\n]*docs/[a-z]+/[a-z-]+\.md[^"\n]*"', path.read_text())]
    assert not hints


# completion


@pytest.mark.parametrize(
    ("words", "found"),
    [("walmere st", {"status"}), ("walmere re", {"receive", "resume", "resync"}), ("walmere help comm", {"commands"})],
)
def test_the_shell_completes_commands_and_topics(words: str, found: set[str]) -> None:
    env = {**os.environ, "_WALMERE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    assert set(walmere(env=env).stdout.split()) == found


def test_completion_can_be_installed(here: Here) -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = walmere("--show-completion", "bash", env=env)
    assert "_WALMERE_COMPLETE" in script.stdout


# start


def test_help_imports_nothing_heavy_and_starts_fast() -> None:
    program = (
        "import sys, time; sys.argv = ['walmere', '--help']\n"
        "from walmere.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(time.process_time(), *sys.modules, file=sys.stderr)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr.split()
        for _ in range(3)
    ]
    heavy = {"pydantic", "psycopg", "pyarrow", "numpy", "rich", "pyspark", "deltalake"}
    assert not heavy & set(runs[0])
    assert min(float(seconds) for seconds, *_ in runs) < 0.4
