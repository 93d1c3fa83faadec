"""The files of deploy/ are what they say: their parts exist, and their configuration is accepted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from walmere.cli.app import app
from walmere.config import load
from walmere.subscription.checks.cluster import require_shared
from walmere.version import __version__

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def test_the_configuration_of_the_manifests_is_accepted(tmp_path: Path) -> None:
    [text] = [
        each["data"]["walmere.toml"]
        for path in MANIFESTS
        for each in yaml.safe_load_all(path.read_text())
        if each["kind"] == "ConfigMap"
    ]
    file = tmp_path / "walmere.toml"
    file.write_text(text)
    config = load(file, {"WALMERE_SPARK__spark.driver.host": "10.0.0.7"})
    assert config.spark.settings["spark.driver.host"] == "10.0.0.7"
    require_shared(config)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifests_run_commands_that_exist_with_this_version(path: Path) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for each in yaml.safe_load_all(path.read_text()):
        if each["kind"] == "Deployment":
            [container] = each["spec"]["template"]["spec"]["containers"]
            assert container["args"][0] == "walmere"
            assert container["args"][1] in commands
            assert container["image"] == f"walmere:{__version__}"


def test_what_the_dockerfile_copies_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for copied in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", text, re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists(), name
    assert f"walmere:{__version__}" in text


def test_the_entrypoint_is_a_script_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "entrypoint.sh"], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "walmere.service").read_text()
    assert "ExecStart=/opt/walmere/bin/walmere " in unit
    file = tmp_path / "walmere.service"
    file.write_text(unit.replace("/opt/walmere/bin/walmere", sys.executable).replace("User=walmere", "User=root"))
    found = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
