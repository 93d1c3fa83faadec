"""The archive of Spark's classes: who makes it, who uses it, and what happens without a usable one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from walmere.spark import class_data
from walmere.spark.jvm import require_java


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "walmere"


def test_without_an_archive_there_are_no_options(cache: Path) -> None:
    assert class_data.options(require_java()) == ""
    assert not cache.exists()


def test_the_archive_of_another_java_is_not_used(cache: Path) -> None:
    java = require_java()
    cache.mkdir()
    class_data.archive(java).write_bytes(b"")
    assert str(class_data.archive(java)) in class_data.options(java)
    assert class_data.options(java.replace("1", "2")) == ""


def test_java_starts_in_spite_of_a_damaged_archive(cache: Path) -> None:
    java = require_java()
    cache.mkdir()
    class_data.archive(java).write_bytes(os.urandom(100_000))
    command = ["java", *class_data.options(java).split(), "-version"]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "version" in started.stderr
    assert not started.stdout


@pytest.mark.long
def test_warm_makes_an_archive_once_and_sessions_load_their_classes_from_it(cache: Path) -> None:
    warm = [sys.executable, "-m", "walmere", "warm"]
    made = [Path(subprocess.run(warm, capture_output=True, text=True, check=True).stdout.strip()) for _ in range(2)]
    assert made == [class_data.archive(require_java())] * 2
    assert sorted(each.name for each in cache.iterdir()) == sorted(["lock", made[0].name])
    code = (
        "from walmere.spark.jvm import JVM_OPTIONS, require_java\n"
        "from walmere.spark.session import session\n"
        "from walmere.spark import class_data\n"
        "log = '-Xlog:class+load:stdout'\n"
        "options = f'{JVM_OPTIONS} {class_data.options(require_java())} {log}'\n"
        "spark = session('x', 'local[1]', {'spark.driver.extraJavaOptions': options})\n"
        "spark.range(10).groupBy('id').count().collect()"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    sources = re.findall(r" org\.apache\.spark\.\S+ source: (shared objects file|file:)", loaded)
    assert sources.count("shared objects file") > 1000
    assert sources.count("shared objects file") > 0.98 * len(sources), "also what a program needs to aggregate"
