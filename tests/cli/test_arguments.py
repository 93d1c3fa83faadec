"""Bad configuration and arguments: one clear message, exit code 2, and nothing was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from processes import Here, walmere

GOOD = """
[source]
dsn = "postgresql://repl@127.0.0.1:1/shop"
publications = ["shop"]
slot = "walmere_shop"
[subscription]
name = "shop"
directory = "DIRECTORY"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "walmere.toml"
    path.write_text(GOOD.replace("DIRECTORY", str(tmp_path / "s")))
    return path


BAD = {
    "not TOML": (("slot = ", "slot "), "not TOML"),
    "unknown key": (("slot = ", "colour = 'red'\nslot = "), "source.colour is not a key"),
    "unknown section": (("[subscription]", "[sauce]\na = 1\n[subscription]"), "sauce is not a key"),
    "wrong type": (('["shop"]', '"shop"'), "source.publications must be an array"),
    "missing": (('slot = "walmere_shop"\n', ""), "source.slot is missing"),
    "a slot's name": (('"walmere_shop"', '"Walmere-Shop"'), "lower-case"),
    "bad DSN": (("postgresql://repl@127.0.0.1:1/shop", "postgresql://repl:Hush@host:port:port/x"), "source.dsn"),
    "bad DSN, key and value": (("postgresql://repl@127.0.0.1:1/shop", "password=Hush nonsense=1"), "source.dsn"),
    "bad port": (("postgresql://repl@127.0.0.1:1/shop", "postgresql://repl:Hush@127.0.0.1:99999/x"), "port"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_configuration_is_one_message_and_exit_code_2(path: Path, here: Here, what: str) -> None:
    (old, new), said = BAD[what]
    path.write_text(path.read_text().replace(old, new))
    code, out, err = here("receive", "-c", path)
    assert code == 2
    assert said in err
    assert out == ""
    assert "Hush" not in err
    assert len(err.strip().splitlines()) <= 2, "one line and a hint"
    assert not (path.parent / "s").exists(), "nothing was started"


@pytest.mark.parametrize("command", ["check", "receive", "log", "status", "drop"])
def test_every_command_says_that_its_configuration_is_not_there(tmp_path: Path, here: Here, command: str) -> None:
    code, _, err = here(command, "-c", tmp_path / "nowhere.toml")
    assert code == 2
    assert "there is no such file" in err
    assert "hint" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["receive", "--until", "yesterday"],
        ["receive", "--until", "0/123456789"],
        ["receive", "--once", "--until", "0/1"],
        ["receive", "--twice"],
        ["log", "--from", "16-B374D848"],
        ["status", "extra"],
        ["recieve"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_exit_code_2(path: Path, here: Here, arguments: list[str]) -> None:
    code, out, err = here(*arguments[:1], "-c", path, *arguments[1:])
    assert code == 2
    assert out == ""
    assert err
    assert not (path.parent / "s").exists()


def test_an_environment_variable_is_named_when_it_is_the_one_that_is_wrong(path: Path) -> None:
    result = walmere("status", "-c", path, env={**os.environ, "WALMERE_SOURCE__STREAMING": "perhaps"})
    assert result.returncode == 2
    assert "WALMERE_SOURCE__STREAMING" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["log", "status"])
def test_what_the_operating_system_refuses_is_a_message_too(path: Path, here: Here, command: str) -> None:
    (path.parent / "s" / "changelog" / "manifest.jsonl").mkdir(parents=True)
    code, _, err = here(command, "-c", path)
    assert code == 1
    assert "Is a directory" in err


@pytest.mark.parametrize("command", ["receive", "log"])
def test_a_directory_that_is_a_file_is_a_message_too(path: Path, here: Here, command: str) -> None:
    (path.parent / "s").write_text("")
    code, _, err = here(command, "-c", path)
    assert code == 1
    assert "directory" in err


def test_version_and_help_are_fine(here: Here) -> None:
    assert here("--version")[0] == 0
    code, out, _ = here("receive", "--help")
    assert code == 0
    assert "--until" in out
