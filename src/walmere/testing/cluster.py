"""A Spark cluster on this machine: a standalone master and workers, as processes of another Unix user.

Each worker has a directory of its own, and cannot read what only the user of the tests can read. So a test sees what a
task needs from the driver's machine. The master listens on 127.0.0.1, each worker on another loopback address: to Spark
they are different hosts. Only root can start processes of another user; for other users, the cluster runs as the user
of the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from walmere.errors import SparkUnavailable
from walmere.testing.environment import Environment, make, run_as
from walmere.testing.server import free_port

USER: Final = "nobody"
_START_SECONDS: Final = 60.0
_POLL: Final = 0.05


class Worker:
    """One machine of the cluster."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.directory = cluster.private(f"worker{number}")
        self.host = f"127.0.0.{number + 2}"
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the worker, which registers with the master. Also after it was killed."""
        arguments = ["--host", self.host, "--webui-port", "0", "--work-dir", str(self.directory)]
        arguments += ["--cores", str(self._cluster.cores), "--memory", self._cluster.memory, self._cluster.url]
        main = "org.apache.spark.deploy.worker.Worker"
        self._process = self._cluster.java(self.directory, main, *arguments, host=self.host)

    @property
    def pids(self) -> list[int]:
        """The worker, its executors and their Python processes: all that run in its session."""
        return [] if self._process is None else session_of(self._process.pid)

    def kill(self) -> None:
        """End the machine: kill -9 of all its processes."""
        if self._process is not None:
            while pids := self.pids:  # a process may have been started since they were listed
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.poll()
                time.sleep(_POLL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """The end of the worker's log, and of its executors'."""
        logs = [self.directory / "log", *sorted(self.directory.glob("app-*/*/stderr"))]
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in logs if path.exists())


class Cluster:
    """A master and its workers."""

    def __init__(
        self, *, workers: int = 2, cores: int = 1, memory: str = "1g", variables: Mapping[str, str] | None = None
    ) -> None:
        """`cores` and `memory` are those of each worker; `variables` are in the environment of its processes."""
        self.account = pwd.getpwnam(USER) if os.getuid() == 0 else None
        self.directory = Path(tempfile.mkdtemp(prefix="walmere-cluster-"))
        self.directory.chmod(0o755)
        self.environment: Environment = make(self.directory, self.account)
        self.cores, self.memory = cores, memory
        self._variables = dict(variables or {})
        self._port, self._page = free_port(), free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self.workers = [Worker(self, number) for number in range(workers)]

    @property
    def url(self) -> str:
        """The address of the master, as `[spark] master` has it."""
        return f"spark://127.0.0.1:{self._port}"

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a driver on this machine."""
        return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

    def start(self) -> None:
        """Start master and workers, and wait until the workers are registered."""
        arguments = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", str(self._page)]
        self._master = self.java(self.private("master"), "org.apache.spark.deploy.master.Master", *arguments)
        for worker in self.workers:
            worker.start()
        self.wait_for_workers()

    def wait_for_workers(self) -> None:
        """Wait until all workers are registered."""
        self.wait(lambda: self.state().get("aliveworkers") == len(self.workers), "its workers to register")

    def state(self) -> dict[str, Any]:
        """What the master says about workers and applications."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/") as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = _START_SECONDS) -> None:
        """Wait for something that happens in the cluster."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SparkUnavailable("running a cluster", f"waited {seconds:.0f} s for {what}: {self.log()}")
            time.sleep(_POLL)

    def remove(self) -> None:
        """End all processes and delete the directories."""
        for worker in self.workers:
            worker.kill()
        if self._master is not None:
            self._master.kill()
            self._master.wait()
            self._master = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self) -> str:
        """The end of all logs."""
        master = (self.directory / "master" / "log").read_text(errors="replace")[-4000:]
        return "\n".join([master, *(worker.log() for worker in self.workers)])

    def private(self, name: str) -> Path:
        """A directory of the user of the cluster, which no other user can read."""
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        if self.account is not None:
            os.chown(directory, self.account.pw_uid, self.account.pw_gid)
        return directory

    def java(
        self, directory: Path, main: str, *arguments: str, host: str = "127.0.0.1", classpath: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a Java program, in a session of its own. Its output is in the file `log` of the directory.

        Its classes are Spark's, or those of `classpath`, which is searched first.
        """
        home = self.environment.spark_home
        java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else Path("java")
        variables = {
            "PATH": f"{self.environment.python.parent}:{os.environ['PATH']}",
            "HOME": str(directory),
            "SPARK_HOME": str(home),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_DIRS": str(directory),
            **{name: os.environ[name] for name in ("JAVA_HOME", "LANG", "LC_ALL") if name in os.environ},
            **self.environment.variables,
            **self._variables,
        }
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={directory}"]
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(
                [java, *options, "-cp", f"{classpath}:{home}/conf:{home}/jars/*".lstrip(":"), main, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=variables,
                start_new_session=True,
                **run_as(self.account),
            )


def session_of(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(rest[2]) == leader and state != "Z":
                    found.append(int(entry.name))
    return found
