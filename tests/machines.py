"""A subscription on a cluster: the machine of its driver, which can be lost, and what Spark has logged of its jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mirror import Mirror
from object_stores import ENVIRONMENT, Bucket
from processes import eventually
from walmere.errors import SinkMismatch
from walmere.lsn import Lsn
from walmere.storage import Lock
from walmere.testing.cluster import Cluster, session_of
from walmere.testing.server import free_port

EVENTS = "events"


class Machine(Mirror):
    """A driver's machine. Nobody else can read its directory; tables and log are in a bucket."""

    def __init__(
        self,
        mirror: Mirror,
        directory: Path,
        bucket: Bucket,
        cluster: Cluster,
        *,
        spark: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        target: str | None = None,
    ) -> None:
        """`mirror` has the source. `spark`: more settings. `target`: another section [target]."""
        self.database = mirror.database
        self._failures: list[BaseException] = []
        self.directory = directory
        self.file = directory / "walmere.toml"
        self.output = directory / "output"
        self.variables = {**os.environ, **ENVIRONMENT, "SPARK_LOCAL_IP": "127.0.0.1", **(variables or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._page = free_port()
        directory.mkdir(mode=0o700)
        (directory / EVENTS).mkdir()
        self.spark = {
            **cluster.settings,
            "spark.executor.memory": "512m",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{directory / EVENTS}",
            "spark.eventLog.compress": "false",
            "spark.local.dir": str(directory / "local"),
            "spark.ui.enabled": "true",
            "spark.ui.port": str(self._page),
            **(spark or {}),
        }
        settings = "\n".join(f'"{name}" = {json.dumps(value)}' for name, value in self.spark.items())
        text = mirror.file.read_text().partition("[subscription]")[0]
        self.file.write_text(
            f"""{text}
[subscription]
name = "{self.database.name}"
directory = "subscription"
store = "{bucket.url}/log"
upload_seconds = 0.2
{target or f'[target]{chr(10)}path = "{bucket.url}/lake"'}
{bucket.section}
[maintenance]
[spark]
master = "{cluster.url}"
{settings}
"""
        )

    def start(self, *arguments: str) -> None:
        """Start a command of walmere, with its children in a session of its own."""
        with self.output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "walmere", *arguments, "-c", str(self.file)],
                stdout=file,
                stderr=file,
                env=self.variables,
                start_new_session=True,
                cwd=self.directory,
            )

    def walmere(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "walmere", *arguments, "-c", str(self.file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            env=self.variables,
            cwd=self.directory,
        )

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the session: driver, receiver, Spark."""
        assert self._process is not None
        for pid in session_of(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the command to end by itself. Returns its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None

    def stop(self) -> None:
        """As `systemctl stop`: the command ends by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self.ended() == 0, self.said()

    def burn(self) -> None:
        """Lose the machine: all its processes, and its disk."""
        self.end()
        shutil.rmtree(self.directory)

    def end(self) -> None:
        """Kill what is still running."""
        if self._process is not None:
            while session_of(self._process.pid):
                self.signal(signal.SIGKILL)
                self._process.poll()
            self._process.wait()
            self._process = None

    def said(self) -> str:
        """What the command has printed."""
        return self.output.read_text(errors="replace")[-4000:]

    def runs(self) -> bool:
        """Whether the subscription runs here. Raises if the command has ended."""
        assert self._process is not None
        assert self._process.poll() is None, self.said()
        return Lock.holder(self.config.subscription.directory / "run") is not None

    def events(self) -> Iterator[dict[str, Any]]:
        """What Spark has logged so far."""
        for path in sorted((self.directory / EVENTS).rglob("events_*")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # it is just being written
                    yield json.loads(line)

    def tasks(self, job: str) -> Iterator[dict[str, Any]]:
        """What Spark has logged of the tasks of our jobs of this kind (copy, apply, upkeep, verify) that have ended."""
        stages: set[int] = set()
        for event in self.events():
            match event["Event"]:
                case "SparkListenerJobStart" if f"walmere-{job}-" in event["Properties"].get("spark.job.tags", ""):
                    stages.update(event["Stage IDs"])
                case "SparkListenerTaskEnd" if event["Stage ID"] in stages:
                    yield event

    def hosts(self, job: str) -> set[str]:
        """The hosts on which tasks of our jobs of this kind were successful."""
        done = (task for task in self.tasks(job) if task["Task End Reason"]["Reason"] == "Success")
        return {task["Task Info"]["Host"] for task in done}

    def lost_tasks(self, job: str) -> int:
        """How many tasks of our jobs of this kind were lost together with their executor."""
        return sum(task["Task End Reason"]["Reason"] == "ExecutorLostFailure" for task in self.tasks(job))

    def busy_hosts(self) -> set[str]:
        """The hosts on which a task runs now."""
        return {each["hostPort"].partition(":")[0] for each in self.busy_executors()}

    def busy_executors(self) -> list[dict[str, Any]]:
        """The executors on which a task runs now, as Spark's page says."""
        with contextlib.suppress(OSError):
            [application] = self._ask("applications")
            executors = self._ask(f"applications/{application['id']}/executors")
            return [each for each in executors if each["activeTasks"]]
        return []

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)

    def wait_applied(self, lsn: Lsn, seconds: float = 120) -> None:
        """Wait until all tables are copied, and applied up to an LSN. Fails if the command ends."""

        def applied() -> bool:
            self.runs()
            tables = list(self.tables())
            return bool(tables) and all(each.follows and each.applied_lsn >= lsn for each in tables)

        eventually(applied, seconds, self.said)

    def wait_for(self, what: str, *tables: str, seconds: float = 90) -> None:
        """Wait until these tables are equal to their source. Fails if the command ends."""

        def equal() -> bool:
            self.runs()
            with contextlib.suppress(AssertionError, SinkMismatch):
                self.assert_equal(*tables)
                return True
            return False

        eventually(equal, seconds, lambda: f"{what}: {self.said()}", every=0.25)
