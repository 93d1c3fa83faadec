"""What executors on other machines cannot reach is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import walmere
from walmere.config import Config, load
from walmere.errors import ConfigError
from walmere.publisher.finding import Level
from walmere.subscription.checks.cluster import check_cluster, require_shared

FILE = """
[source]
dsn = "host=db.example"
publications = ["p"]
slot = "s"
[subscription]
name = "s"
directory = "state"
[target]
path = "lake"
[spark]
master = "spark://master.example:7077"
"""


def config(directory: Path, text: str = FILE) -> Config:
    file = directory / "walmere.toml"
    file.write_text(text)
    return load(file)


def test_local_paths_are_refused_on_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        require_shared(config(tmp_path))
    assert caught.value.doing == "running on spark://master.example:7077"
    assert f"target.path {tmp_path / 'lake'} is a directory of this machine" in caught.value.wrong
    assert f"subscription.directory {tmp_path / 'state'}" in caught.value.wrong
    assert "shared_directory = true" in caught.value.hint


def test_a_store_in_a_local_directory_is_refused_on_a_cluster(tmp_path: Path) -> None:
    text = FILE.replace('directory = "state"', f'directory = "state"\nstore = "file://{tmp_path}/store"')
    with pytest.raises(ConfigError, match=r"subscription\.store file://"):
        require_shared(config(tmp_path, text))


def test_paths_of_a_shared_file_system_are_accepted(tmp_path: Path) -> None:
    require_shared(config(tmp_path, f"{FILE}shared_directory = true\n"))


def test_a_database_needs_only_the_change_log(tmp_path: Path) -> None:
    text = FILE.replace('path = "lake"', 'kind = "postgres"\ndsn = "host=target.example"')
    with pytest.raises(ConfigError) as caught:
        require_shared(config(tmp_path, text))
    assert "target.path" not in caught.value.wrong


def test_check_names_what_the_executors_do_not_have(tmp_path: Path) -> None:
    """In a process of its own: a session that is active here would be the one that runs."""
    config(tmp_path, FILE.replace("host=db.example", "host=127.0.0.1 port=1"))
    done = walmere("check", "-c", tmp_path / "walmere.toml", "--json")
    assert done.returncode == 1
    first, second = (each for each in json.loads(done.stdout)["findings"] if each["name"] == "cluster")
    assert (first["level"], second["level"]) == ("problem", "problem")
    assert f"target.path {tmp_path / 'lake'} is a directory of this machine" in first["what"]
    assert f"subscription.directory {tmp_path / 'state'}" in second["what"]
    assert "shared_directory = true" in first["fix"]


def test_check_accepts_a_shared_file_system(tmp_path: Path) -> None:
    [found] = check_cluster(config(tmp_path, f"{FILE}shared_directory = true\n"))
    assert found.level is Level.OK
