"""Spark's JVM: which Java it needs, its options, and whether it is alive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from pyspark import SparkContext

from walmere.errors import NotConfigured, SparkEnded
from walmere.units import how_it_ended

_MIN_JAVA: Final = 17
JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Many runs take less than a minute: start fast, with little memory and few threads."""


def require_java() -> str:
    """Which Java it is: its version, and more that differs from build to build.

    Raises NotConfigured if it is not suitable: py4j would not say so.
    """
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    known = _describe(Path(java)) if java and Path(java).exists() else ""
    found = re.search(r'(?:JAVA_VERSION=|version )"(\d+)', known)
    version = int(found[1]) if found else 0
    if version < _MIN_JAVA:
        has = f"Java {version} was found" if version else "no Java was found"
        raise NotConfigured(
            "starting Spark", f"it needs Java {_MIN_JAVA} or later, {has}", "apt-get install openjdk-17-jre-headless"
        )
    return known


def _describe(java: Path) -> str:
    """The file that an installation has about itself, or else what Java prints: starting it takes longer."""
    with suppress(OSError, UnicodeDecodeError):
        release = java.resolve().parents[1].joinpath("release").read_text()
        if "JAVA_VERSION=" in release:
            return release
    return subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr


def require_alive(log: Path | None = None, seconds: float = 0.0) -> None:
    """Raise SparkEnded if the JVM that was started here has ended, or ends within these seconds."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    hint = "start again; nothing is lost" + (f". If it happens again, see {log}" if log is not None else "")
    raise SparkEnded("running Spark", f"Spark's JVM {how_it_ended(code)}", hint)
