"""A YARN cluster for the tests: a ResourceManager, a NodeManager, and HDFS, where Spark puts files for containers.

These are Hadoop's own programs, from the jars that `scripts/yarn` gets and those of PySpark. Each is a process of
another Unix user, who cannot read the driver's files, and so are the containers. They listen on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from walmere.testing.cluster import Cluster
from walmere.testing.server import free_port

_JARS = Path(__file__).parents[1] / ".servers" / "yarn"
_HDFS = "org.apache.hadoop.hdfs.server"
_YARN = "org.apache.hadoop.yarn.server"
_LOCAL = "127.0.0.1"
_JAVA_17 = "--add-opens=java.base/java.lang=ALL-UNNAMED"  # Hadoop's pages need it there


class YarnCluster(Cluster):
    """One node, with room for Spark's application master and two executors."""

    def __init__(self) -> None:
        if not list(_JARS.glob("hadoop-*.jar")):
            pytest.skip("no YARN here: scripts/yarn gets it, if Maven is there")
        super().__init__(workers=0, variables={"JDK_JAVA_OPTIONS": _JAVA_17})
        self._jars = shutil.copytree(_JARS, self.directory / "jars")  # its user may be unable to read ours
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._pages = {name: free_port() for name in ("ResourceManager", "NameNode")}
        self.configuration = self.directory / "configuration"

    @property
    def url(self) -> str:
        """As `[spark] master` has it. The address of the ResourceManager is in the files of HADOOP_CONF_DIR."""
        return "yarn"

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a driver on this machine."""
        return {
            **super().settings,
            "spark.yarn.jars": f"local:{self.environment.spark_home}/jars/*",  # the node has them
            "spark.pyspark.python": str(self.environment.python),  # containers do not have the PATH of the NodeManager
            "spark.yarn.am.memory": "256m",
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
        }

    def start(self) -> None:
        """Start all parts, and wait until the node has registered and HDFS takes files."""
        self._configure()
        self._start("format", f"{_HDFS}.namenode.NameNode", "-format", "-nonInteractive").wait()
        self._start("NameNode", f"{_HDFS}.namenode.NameNode")
        self._start("DataNode", f"{_HDFS}.datanode.DataNode")
        self._start("ResourceManager", f"{_YARN}.resourcemanager.ResourceManager")
        self._start("NodeManager", f"{_YARN}.nodemanager.NodeManager")
        self.wait(self._is_ready, "the nodes of YARN and HDFS to register")

    def write_private(self, name: str, text: str) -> Path:
        """Write a file that only the user of the cluster can read."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text)
        if self.account is not None:
            os.chown(path, self.account.pw_uid, self.account.pw_gid)
        return path

    def containers(self) -> dict[str, list[int]]:
        """The processes of the containers that run."""
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    lines = (entry / "environ").read_bytes().split(b"\0")
                    variables = dict(line.decode(errors="replace").partition("=")[::2] for line in lines)
                    if variables.get("LOCAL_DIRS", "").startswith(str(self.directory)):
                        found.setdefault(variables["CONTAINER_ID"], []).append(int(entry.name))
        return found

    def kill_container(self, name: str) -> None:
        """kill -9 of all processes of a container."""
        while pids := self.containers().get(name):  # one may have been started since they were listed
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """End all processes and delete the directories."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for name in self.containers():
            self.kill_container(name)
        super().remove()

    def log(self) -> str:
        """The end of all logs."""
        logs = [self.directory / name / "log" for name in self._daemons]
        logs += sorted((self.directory / "NodeManager").glob("logs/*/*/stderr"))
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs)

    def _configure(self) -> None:
        """Write the configuration of these programs and of drivers. Hadoop's defaults listen on all addresses."""
        any_port = f"{_LOCAL}:0"
        properties = {
            "fs.defaultFS": f"hdfs://{_LOCAL}:{free_port()}",
            "hadoop.tmp.dir": self.private("hadoop"),
            "dfs.permissions.enabled": "false",
            "dfs.replication": 1,
            "dfs.namenode.http-address": f"{_LOCAL}:{self._pages['NameNode']}",
            **{f"dfs.datanode.{name}": any_port for name in ("address", "http.address", "ipc.address")},
            "yarn.resourcemanager.webapp.address": f"{_LOCAL}:{self._pages['ResourceManager']}",
            **{
                f"yarn.resourcemanager.{name}address": f"{_LOCAL}:{free_port()}"
                for name in ("", "admin.", "scheduler.", "resource-tracker.")
            },
            **{f"yarn.nodemanager.{name}address": any_port for name in ("", "localizer.", "webapp.")},
            "yarn.nodemanager.log-dirs": self.directory / "NodeManager" / "logs",
            "yarn.nodemanager.env-whitelist": ",".join(["JAVA_HOME", "LANG", *self.environment.variables]),
            "yarn.nodemanager.resource.memory-mb": 4096,
            "yarn.nodemanager.resource.cpu-vcores": 4,
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.disk-health-checker.enable": "false",
            "yarn.scheduler.minimum-allocation-mb": 128,
            "yarn.scheduler.capacity.root.queues": "default",
            "yarn.scheduler.capacity.root.default.capacity": 100,
            "yarn.scheduler.capacity.maximum-am-resource-percent": 1,
        }
        text = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>\n" for name, value in properties.items()
        )
        self.configuration.mkdir()
        for name in ("core", "hdfs", "yarn"):
            (self.configuration / f"{name}-site.xml").write_text(f"<configuration>\n{text}</configuration>\n")

    def _start(self, name: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = self.java(self.private(name), main, *arguments, classpath=f"{self.configuration}:{self._jars}/*")
        self._daemons[name] = process
        return process

    def _is_ready(self) -> bool:
        for name, process in self._daemons.items():
            assert name == "format" or process.poll() is None, self.log()
        return self._bean("ResourceManager", "ClusterMetrics").get("NumActiveNMs") == 1 and (
            self._bean("NameNode", "FSNamesystemState").get("NumLiveDataNodes") == 1
        )

    def _bean(self, daemon: str, name: str) -> dict[str, Any]:
        """Metrics of a program; empty if it does not answer yet."""
        url = f"http://{_LOCAL}:{self._pages[daemon]}/jmx?qry=Hadoop:service={daemon},name={name}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            beans: list[dict[str, Any]] = json.load(answer)["beans"]
            return beans[0] if beans else {}
        return {}
