"""A cluster whose workers share nothing with the driver: which Python runs there, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

from walmere.testing.cluster import Cluster
from walmere.version import __version__

DRIVER = """
import json, sys, threading, time
from pathlib import Path
from walmere.errors import WalmereError
from walmere.spark.executors import require_suitable
from walmere.spark.session import session
from walmere.spark.tasks import SparkTasks

given = json.loads(sys.argv[1])
spark = session("test", given["master"], given["settings"], Path(given["log"]))
context = spark.sparkContext

def where(item):
    import os, sys
    time.sleep(0.5)  # so that one executor does not run all of them
    import pyarrow, walmere
    readable = os.access(given["private"], os.R_OK | os.X_OK)
    here = {"python": sys.executable, "directory": os.getcwd(), "packages": [pyarrow.__file__, walmere.__file__]}
    return {**here, "uid": os.getuid(), "readable": readable, "item": item}

def answer(ask):
    try:
        return ask()
    except WalmereError as error:
        return {"error": type(error).__name__, "text": str(error)}

def dies_once(item):
    import os, signal
    from pyspark import TaskContext
    if item == 2 and TaskContext.get().attemptNumber() == 0:
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)  # the executor
        time.sleep(60)
    return item * item

def fails(item):
    if item == 1:
        raise WalmereError("testing", "it fails")
    time.sleep(600)

found = {}
for name, python in given["pythons"].items():
    context.pythonExec = python
    found[name] = {
        "checked": answer(lambda: require_suitable(context)),
        "tasks": answer(lambda: SparkTasks(spark, "test").map(where, [1, 2, 3, 4])),
    }
if given["theirs"]:
    context.pythonExec = given["pythons"]["own"]
    theirs = {"jobs": 0}
    ended = threading.Event()
    def compute():
        context.addJobTag("theirs")
        while not ended.is_set():
            assert context.parallelize([1], 1).map(lambda item: time.sleep(0.5) or item).collect() == [1]
            theirs["jobs"] += 1
    computing = threading.Thread(target=compute)
    computing.start()
    found["failed"] = answer(lambda: SparkTasks(spark, "test").map(fails, [1, 2]))
    before = theirs["jobs"]
    ended.set()
    computing.join()
    found["theirs"] = theirs["jobs"] - before  # what was running when ours was cancelled
    found["lost"] = answer(lambda: SparkTasks(spark, "test").map(dies_once, [1, 2, 3, 4]))
print(json.dumps(found))
"""


PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def _without_our_package(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "/walmere" in member.name and ".dist-info" not in member.name else member


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the driver."""
    directory = tmp_path_factory.mktemp("private")
    directory.chmod(0o700)
    return directory


@pytest.fixture(scope="module")
def answers(cluster: Cluster, private: Path) -> dict[str, Any]:
    """What a driver found with the executors' own Python."""
    given = {"settings": cluster.settings, "pythons": {"own": "python3"}, "theirs": True}
    return drive(cluster, given, private)


@pytest.fixture(scope="module")
def answers_of_others(cluster: Cluster, private: Path) -> dict[str, Any]:
    """What a driver found with other interpreters on the executors."""
    other = cluster.environment.without(cluster.directory / "other", "walmere")
    copy = other.packages / "walmere"
    copy.mkdir()
    for entry in (cluster.environment.packages / "walmere").iterdir():
        if entry.name != "version.py":
            (copy / entry.name).symlink_to(entry)
    (copy / "version.py").write_text('__version__ = "0.0.9"\n')
    archive = private / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as file:  # as venv-pack makes it, but the packages are links
        for name in ("bin", "lib", "pyvenv.cfg"):
            file.add(cluster.environment.directory / name, name, filter=_without_our_package)
        file.add(cluster.environment.packages / "walmere", f"lib/{PYTHON}/site-packages/walmere")
    pythons = {
        "archive": "./environment/bin/python3",
        "missing": "/nonexistent/python",
        "without Walmere": cluster.environment.without(cluster.directory / "without", "walmere").python,
        "other version": other.python,
    }
    settings = {**cluster.settings, "spark.archives": f"{archive}#environment"}
    return drive(cluster, {"settings": settings, "pythons": pythons, "theirs": False}, private)


def drive(cluster: Cluster, given: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run a driver. Returns what it found with each Python."""
    given = {"master": cluster.url, "log": directory / "spark.log", "private": directory, **given}
    command = [sys.executable, "-c", DRIVER, json.dumps(given, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=directory)
    assert done.returncode == 0, f"{done.stderr}\n{cluster.log()}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_tasks_run_on_all_workers_with_the_executors_own_python(cluster: Cluster, answers: dict[str, Any]) -> None:
    assert answers["own"]["checked"] is None
    tasks = answers["own"]["tasks"]
    assert [task["item"] for task in tasks] == [1, 2, 3, 4]
    assert {Path(task["directory"]).parents[1] for task in tasks} == {worker.directory for worker in cluster.workers}
    assert {task["python"] for task in tasks} == {str(cluster.environment.python)}
    assert cluster.account is not None
    assert {(task["uid"], task["readable"]) for task in tasks} == {(cluster.account.pw_uid, False)}


@pytest.mark.long
def test_an_archive_has_the_python_of_the_tasks(cluster: Cluster, answers_of_others: dict[str, Any]) -> None:
    assert answers_of_others["archive"]["checked"] is None
    pythons = {Path(task["python"]) for task in answers_of_others["archive"]["tasks"]}
    assert {python.parents[4] for python in pythons} == {worker.directory for worker in cluster.workers}
    assert {python.parent.parent.name for python in pythons} == {"environment"}


def test_a_lost_executor_changes_nothing_in_the_result(answers: dict[str, Any]) -> None:
    assert answers["lost"] == [1, 4, 9, 16]


def test_a_job_that_fails_is_cancelled_and_a_job_of_somebody_else_is_not(answers: dict[str, Any]) -> None:
    assert "it fails" in answers["failed"]["text"], "its other task would take ten minutes"
    assert answers["theirs"] == 1


@pytest.mark.long
@pytest.mark.parametrize("when", ["checked", "tasks"])
@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("missing", "an executor cannot run /nonexistent/python"),
        ("without Walmere", "does not have Walmere"),
        ("other version", f"has Walmere 0.0.9; the driver has Walmere {__version__}"),
    ],
)
def test_an_executor_that_cannot_run_our_tasks_is_refused(
    answers_of_others: dict[str, Any], which: str, when: str, text: str
) -> None:
    answer = answers_of_others[which][when]
    assert answer["error"] == "ExecutorUnsuitable"
    assert text in answer["text"]
    assert "hint: " in answer["text"]
    assert "Traceback" not in answer["text"]


def run(*command: str | Path, **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_environment_that_venv_pack_has_packed_runs_our_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """As the guide says, with real files, but without PySpark: the executors have it from Spark."""
    tmp_path.chmod(0o700)
    venv, archive = tmp_path / "venv", tmp_path / "environment.tar.gz"
    root = Path(__file__).parents[2]
    base = cluster.environment.python.readlink()  # an interpreter that the other user can run, too
    run(base, "-m", "venv", "--without-pip", venv, **cluster.environment.variables)
    needed = [each for each in requires("walmere") or () if "extra ==" not in each and not each.startswith("pyspark")]
    install = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet")
    variables = {"PIP_CONSTRAINT": str(root / "constraints.txt"), **cluster.environment.variables}
    run(*install, "venv-pack", *needed, **variables)
    run(*install, "--no-deps", root, **variables)
    pack = (venv / "bin" / "python", "-m", "venv_pack", "--compress-level", "1")
    run(*pack, "--prefix", venv, "--output", archive, **cluster.environment.variables)
    shutil.rmtree(venv)
    settings = {**cluster.settings, "spark.archives": f"{archive}#environment"}
    given = {"settings": settings, "pythons": {"packed": "./environment/bin/python"}, "theirs": False}
    packed = drive(cluster, given, tmp_path)["packed"]
    assert packed["checked"] is None
    for task in packed["tasks"]:
        assert not task["readable"]
        for path in (task["python"], *task["packages"]):
            assert Path(path).is_relative_to(Path(task["directory"]) / "environment"), path
