"""A Python environment that another Unix user can run, with Walmere in it: what the machines of a cluster have.

The environment of the tests may be below a home directory that nobody else can read. Then the interpreter and the
packages are linked, or copied, to a directory that everybody can read. Walmere itself is always a copy: the machines of
a cluster do not share files with the driver.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"
_NOT_NEEDED: Final = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3")
_OURS: Final = ("walmere", "pyspark_pgoutput.py", "__pycache__")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment."""

    directory: Path
    variables: dict[str, str]  # that its processes need

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.directory / "bin" / "python3"

    @property
    def packages(self) -> Path:
        """Where its packages are installed."""
        return self.directory / "lib" / _PYTHON / "site-packages"

    @property
    def spark_home(self) -> Path:
        """Spark, as the package `pyspark` has it."""
        return self.packages / "pyspark"

    def without(self, directory: Path, *names: str) -> Environment:
        """Another environment, which lacks these packages."""
        made = _venv(directory, Path(self.python.readlink()), self.variables)
        for entry in self.packages.iterdir():
            if entry.name not in names:
                (made.packages / entry.name).symlink_to(entry)
        return made


def run_as(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments of `subprocess` for a process of this user; None: of this one."""
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def make(directory: Path, account: pwd.struct_passwd | None) -> Environment:
    """An environment with the packages of this process, below a directory that the user can read."""
    version = Path(sys.base_prefix, "bin", _PYTHON)
    python, variables = version, dict[str, str]()
    if not _can(account, "-x", version) or not _can(account, "-r", Path(os.__file__)):
        python, variables = _interpreter(directory / "base")
    made = _venv(directory / "environment", python, variables)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name in _OURS or entry.name.endswith("walmere.pth"):  # that of an editable installation
            continue
        if _can(account, "-r", entry):
            (made.packages / entry.name).symlink_to(entry)
        else:
            _link(entry, made.packages / entry.name)
    installed = Path(__file__).parents[1]
    shutil.copytree(installed, made.packages / "walmere", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(installed.with_name("pyspark_pgoutput.py"), made.packages)
    return made


def _venv(directory: Path, python: Path, variables: dict[str, str]) -> Environment:
    made = Environment(directory, variables)
    made.packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    for name in ("python", "python3", _PYTHON):
        (directory / "bin" / name).symlink_to(python)
    (directory / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    return made


def _interpreter(directory: Path) -> tuple[Path, dict[str, str]]:
    """Copy the interpreter and its library. Returns its path, and the variables with which it finds its library."""
    prefix = Path(sys.base_prefix)
    python = directory / "bin" / _PYTHON
    python.parent.mkdir(parents=True)
    shutil.copy(prefix / "bin" / _PYTHON, python)
    library = directory / "lib" / _PYTHON
    library.mkdir(parents=True)
    for entry in Path(os.__file__).parent.iterdir():
        if entry.name not in _NOT_NEEDED and not entry.name.startswith("config-"):
            _link(entry, library / entry.name)
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    if ".so" not in shared.name or not shared.is_file():
        return python, {}
    _link(shared, directory / "lib" / shared.name)
    return python, {"LD_LIBRARY_PATH": str(directory / "lib")}


def _link(source: Path, target: Path) -> None:
    """Link a file, or the files of a directory; copy what cannot be linked, or what others cannot read."""
    if source.is_dir():
        target.mkdir()
        for entry in source.iterdir():
            _link(entry, target / entry.name)
        return
    try:
        if not source.stat().st_mode & stat.S_IROTH:
            raise PermissionError
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
        target.chmod(target.stat().st_mode | stat.S_IROTH)


def _can(account: pwd.struct_passwd | None, test: str, path: Path) -> bool:
    command: Iterable[str | Path] = ("test", test, path)
    return subprocess.run([*command], check=False, cwd="/", **run_as(account)).returncode == 0
