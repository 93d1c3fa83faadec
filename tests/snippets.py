"""Runs the fenced blocks of a page of the documentation, in order, as a reader would.

| block | what is done |
|---|---|
| ```sh | run by bash; variables, the directory and background processes stay for the next blocks |
| ```sql | run by psql as a superuser, in the database of the page |
| ```python | run in one Python process of the page |
| ```toml | with a [source], it becomes walmere.toml; otherwise it is added to that for a check. Both must load |
| ```json | must be JSON |
| no language | shown output: every line must be in the output of the block before, numbers and LSNs aside |
| ```text | a picture or the form of something: nothing is done |

A comment before a block changes this: `<!-- test: … -->` with one of

    background          the command goes on while the next blocks run; from then on, each block waits until the
                        subscription has caught up
    stop, stop run      background processes are ended first, as by Ctrl-C; `stop run`: only `walmere run`
    exit 1              the exit code that is expected
    on new              SQL: in the database of this host, new.example
    repeat until TEXT   again, until its output has the text
    lose db             the server of this host, db.example, crashes first
    applied             TOML: the keys stay in walmere.toml
    not run: REASON     listed in docs/reference/snippets.md

What a page names and a test cannot have (hosts, directories, a bucket, an LSN) is replaced: see `Reader.replaced`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from object_stores import Bucket
from processes import eventually
from walmere import config as configuration
from walmere.lsn import Lsn
from walmere.testing.server import Server, binaries, free_port

ROOT: Final = Path(__file__).parents[1]
LANGUAGES: Final = ("sh", "sql", "python", "toml", "json", "text", "")
_BLOCK: Final = re.compile(r"(?:^<!-- test: ([^\n]*?) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN: Final = "not run: "
_SECONDS: Final = 180.0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    directives: tuple[str, ...] = ()

    @property
    def not_run(self) -> str | None:
        """Why it is not run; None: it is run."""
        return next((each.removeprefix(_NOT_RUN) for each in self.directives if each.startswith(_NOT_RUN)), None)

    @property
    def wanted(self) -> str:
        """What its output must have, or it is repeated."""
        return (self.argument("repeat") or "").removeprefix("until ")

    def argument(self, name: str) -> str | None:
        """The argument of a directive, such as `1` of `exit 1`; None: there is no such directive."""
        return next((each.partition(" ")[2] for each in self.directives if each.partition(" ")[0] == name), None)


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    return [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        comment, language, content = found.groups()
        directives = () if comment is None else (comment,) if comment.startswith(_NOT_RUN) else comment.split(", ")
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(page.relative_to(ROOT).as_posix(), line, language, content, tuple(directives))


class Reader:
    """Somebody who reads a page from top to bottom, and does what it says."""

    def __init__(self, directory: Path, servers: Mapping[str, Server], bucket: Bucket | None = None) -> None:
        """`servers` by the host that a page names; the first one is that of SQL without a directive."""
        self._directory = directory
        self._servers = servers
        self._bucket = bucket  # for s3://bucket
        self._background: list[tuple[subprocess.Popen[str], Path, str]] = []
        self._follows = False
        self._output = ""
        self._port = free_port()  # of a server that the page starts itself
        self._python: subprocess.Popen[str] | None = None
        found = binaries()
        programs = found[max(found)]  # psql, pg_dump: a reader has them
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("WALMERE_", "PG"))},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(programs), os.environ["PATH"]]),
            "WALMERE_WARM": "0",
            "COLUMNS": "200",
        }
        self._current = directory

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end_background()
        if self._python is not None:
            self._python.kill()
            self._python.wait()

    def read(self, block: Block) -> None:
        """Do what a block says. Raises AssertionError if that does not work."""
        if block.not_run is not None or block.language == "text":
            return
        if (which := block.argument("stop")) is not None:
            self._end_background(f"walmere {which}".rstrip())
        elif self._follows and block.language:
            self._wait_until_applied()
        if (host := block.argument("lose")) is not None:
            self._servers[f"{host}.example"].stop(signal.SIGQUIT)
        match block.language:
            case "sh":
                self._shell(block)
            case "sql":
                self._sql(block)
            case "python":
                self._run_python(block)
            case "toml":
                self._configure(block)
            case "json":
                json.loads(block.text)
            case _:
                self._compare(block)

    def replaced(self, text: str) -> str:
        """The text with what this machine has: servers, directories, a port, an LSN and a time that can be read."""
        for host, server in self._servers.items():
            text = re.sub(rf"{re.escape(host)}(:5432)?\b", f"127.0.0.1:{server.port}", text)
        text = text.replace("?sslmode=verify-full&sslrootcert=/etc/ssl/ca.pem", "")
        text = text.replace("54320", str(self._port))
        text = text.replace("/var/lib/", f"{self._directory}/var/").replace("/srv/lake", f"{self._directory}/lake")
        if self._bucket is not None:
            text = text.replace("s3://bucket/", f"{self._bucket.url}/")
            text = text.replace('region = "eu-central-1"', f'endpoint = "{self._bucket.endpoint}"')
            text = text.replace('{"region": "eu-central-1"}', repr(dict(self._bucket.options)))
        for shown, key in (("16/B374D848", "lsn"), ("2026-11-15T12:00:00Z", "commit_time")):
            if shown in text:
                text = text.replace(shown, self._point()[key])
        return text

    def _point(self) -> dict[str, Any]:
        """The newest point of the lake."""
        if self._bucket is not None:
            return {"lsn": self._status()["applied_lsn"]}
        [newest] = self._directory.glob("lake/_walmere/*/latest.json")
        found: dict[str, Any] = json.loads(newest.read_text())
        return found

    def _status(self) -> dict[str, Any]:
        """What `walmere status` says; empty if it fails."""
        ended = subprocess.run(
            [sys.executable, "-m", "walmere", "status", "-c", "walmere.toml", "--json"],
            capture_output=True,
            text=True,
            cwd=self._current,
            env=self._environment,
            check=False,
        )
        found: dict[str, Any] = json.loads(ended.stdout) if ended.returncode == 0 else {}
        return found

    def _shell(self, block: Block) -> None:
        script = self.replaced(block.text)
        place = f"{block.page}:{block.line}"
        if block.argument("background") is not None:
            following = re.search("walmere (run|receive)", script) is not None
            log = self._directory / f"background-{block.line}.log"
            with log.open("w") as file:
                process = subprocess.Popen(
                    ["bash", "-ec", f"exec {script}"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    text=True,
                    cwd=self._current,
                    env=self._environment,
                    start_new_session=True,
                )
            self._background.append((process, log, script))
            eventually(lambda: log.read_text() or process.poll() is not None or following, _SECONDS)
            assert process.poll() is None, f"{place} ended: {log.read_text()}"
            self._output = log.read_text()
            self._follows = self._follows or following
            return
        left = self._directory / "environment"

        def done() -> bool:
            ended = subprocess.run(
                ["bash", "-ec", f"trap 'env -0 > {left}; pwd > {left}.pwd' EXIT\n{script}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self._current,
                env=self._environment,
                timeout=_SECONDS,
                check=False,
            )
            self._output = ended.stdout
            assert ended.returncode == int(block.argument("exit") or 0), f"{place}: {ended.returncode}\n{ended.stdout}"
            return block.wanted in _masked(ended.stdout)

        eventually(done, _SECONDS, lambda: f"{place}: {self._output}", every=0.5)
        self._environment = dict(each.split("=", 1) for each in left.read_text().split("\0") if each)
        self._current = Path((left.with_suffix(".pwd")).read_text().rstrip("\n"))

    def _sql(self, block: Block) -> None:
        server = self._servers.get(f"{block.argument('on')}.example") or next(iter(self._servers.values()), None)
        address = f"postgresql://postgres@127.0.0.1:{self._port}/shop" if server is None else server.dsn("shop")

        def done() -> bool:
            ended = subprocess.run(
                ["psql", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-f", "-", address],
                input=self.replaced(block.text),
                capture_output=True,
                text=True,
                env=self._environment,
                timeout=_SECONDS,
                check=False,
            )
            self._output = ended.stdout
            assert ended.returncode == 0, f"{block.page}:{block.line}: {ended.stderr}"
            return block.wanted in _masked(ended.stdout)

        eventually(done, _SECONDS, lambda: f"{block.page}:{block.line}: {self._output}", every=0.5)

    def _run_python(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self._current,
                env={**self._environment, "PYSPARK_PYTHON": sys.executable},
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps(self.replaced(block.text)) + "\n")
        self._python.stdin.flush()
        said: list[str] = []
        for line in self._python.stdout:
            if line.startswith(_END):
                self._output = "".join(said)
                assert line.strip() == _END, f"{block.page}:{block.line}: {line}{self._output}"
                return
            said.append(line)
        raise AssertionError(f"{block.page}:{block.line}: Python has ended\n{''.join(said)}")

    def _configure(self, block: Block) -> None:
        file = self._current / "walmere.toml"
        text = self.replaced(block.text)
        if "[source]" in text:
            file.write_text(text)
            configuration.load(file, {})
            return
        known = tomllib.loads(file.read_text() if file.exists() else _SMALLEST)
        for section, keys in tomllib.loads(text).items():
            known[section] = {**known.get(section, {}), **keys} if isinstance(keys, dict) else keys
        checked = file if block.argument("applied") is not None else self._directory / "checked.toml"
        checked.write_text(_toml(known))
        configuration.load(checked, {})

    def _compare(self, block: Block) -> None:
        had = {_masked(line) for line in self.replaced(self._output).splitlines()}
        for line in self.replaced(block.text).splitlines():
            if line.strip() and "…" not in line:
                assert _masked(line) in had, f"{block.page}:{block.line} shows {line!r}, and it was\n{self._output}"

    def _wait_until_applied(self) -> None:
        """A reader takes some seconds from one block to the next."""

        def caught_up() -> bool:
            for process, log, _ in self._background:
                assert process.poll() is None, log.read_text()
            now = self._status()
            if not any("walmere run" in script for _, _, script in self._background):
                return bool(now.get("durable_lsn")) and Lsn.parse(now["source_lsn"]) <= Lsn.parse(now["durable_lsn"])
            ready = {table["phase"] for table in now.get("tables", ()) if table["published"]}
            started = now.get("receiver", {}).get("running")  # an earlier run may have caught up
            return bool(started and now.get("caught_up")) and ready == {"r"}

        eventually(caught_up, _SECONDS, lambda: "\n".join(log.read_text() for _, log, _ in self._background), every=0.5)

    def _end_background(self, which: str = "") -> None:
        """End what runs in the background; only those with `which` in their command."""
        ending = [each for each in reversed(self._background) if which in each[2]]
        for process, _, _ in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._background = [each for each in self._background if each not in ending]
        self._follows = False


def _masked(line: str) -> str:
    """Without what differs from run to run: LSNs, numbers, times and spaces."""
    line = re.sub(r"\b[0-9A-F]+/[0-9A-F]+\b", "LSN", line)
    line = re.sub(r"\d[\d,.:]*(e[+-]\d+)?", "N", line)
    line = re.sub(r"\bN (B|kB|MB|GB|TB)\b", "SIZE", line)
    return re.sub(r"\s+", " ", line).strip()


def _toml(content: Mapping[str, Any]) -> str:
    """Sections of keys as TOML; keys outside of sections first."""
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    arrays = {name: value for name, value in content.items() if isinstance(value, list)}
    lines = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {_value(value)}" for key, value in keys.items())]
    for name, sections in arrays.items():
        for keys in sections:
            lines += [f"[[{name}]]", *(f"{json.dumps(key)} = {_value(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


_SMALLEST: Final = """
[source]
dsn = "postgresql://repl@db.example/shop"
publications = ["shop"]
slot = "walmere_shop"
[subscription]
name = "shop"
directory = "state"
[target]
path = "lake"
"""

_END: Final = "--- end of the block"

_INTERPRETER: Final = f"""
import json, sys, traceback
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    failed = ""
    try:
        exec(compile(json.loads(line), "block", "exec"), names)
    except BaseException:
        failed = ": failed"
        traceback.print_exc()
    sys.stderr.flush()
    print("{_END}" + failed, flush=True)
"""
