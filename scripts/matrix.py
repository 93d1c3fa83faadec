"""Run the stories on every PostgreSQL from 14 to 18, and print what came of it.

Servers are those of the tests: the wheel's, the system's, and what is in `.servers`. Versions still missing are brought
there with Maven, as the archives that zonky builds for embedding; without Maven, or offline, the matrix is smaller, and
says so.

    python scripts/matrix.py [--postgres N]… [options of pytest]
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from walmere.testing.server import binaries

ROOT = Path(__file__).resolve().parents[1]
SERVERS = ROOT / ".servers"
STORIES = ROOT / "tests" / "stories"

PINNED = {14: "14.24.0", 15: "15.19.0", 16: "16.15.0", 17: "17.11.0", 18: "18.6.0"}
ARTIFACT = "io.zonky.test.postgres:embedded-postgres-binaries-{system}-{machine}:{version}"
MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"

OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class Run:
    """The stories on one version."""

    server: str  # as it names itself
    counts: dict[str, Counter[str]] = field(default_factory=dict)  # of a story, by outcome
    remarks: list[tuple[str, str, str]] = field(default_factory=list)  # outcome, test, reason


def installed() -> dict[int, Path]:
    """Every server that the tests would find."""
    return binaries(sorted(SERVERS.glob("*/bin")))


def bring(version: int) -> str | None:
    """Put a server of this version into SERVERS; or say why not."""
    if shutil.which("mvn") is None:
        return "Maven is not on the PATH"
    machine = MACHINES.get(platform.machine().lower())
    if machine is None:
        return f"there are no archives for {platform.machine()}"
    artifact = ARTIFACT.format(system=platform.system().lower(), machine=machine, version=PINNED[version])
    SERVERS.mkdir(exist_ok=True)
    # under its name only when it is whole: a run that is interrupted leaves nothing that looks like a server
    with tempfile.TemporaryDirectory(dir=SERVERS) as directory:
        work = Path(directory)
        print(f"bringing {artifact}", file=sys.stderr)
        maven = subprocess.run(
            ["mvn", "-q", "-B", COPY, f"-Dartifact={artifact}", f"-DoutputDirectory={work}"],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        jars = list(work.glob("*.jar"))
        if maven.returncode or not jars:
            return _maven_said(maven.stdout)
        unpacked = work / str(version)
        unpacked.mkdir()
        with zipfile.ZipFile(jars[0]) as jar:
            [inner] = [name for name in jar.namelist() if name.endswith(".txz")]
            with jar.open(inner) as archive, tarfile.open(fileobj=archive, mode="r|xz") as tar:
                tar.extractall(unpacked, filter="data")
        try:
            named(unpacked / "bin")
        except (OSError, subprocess.CalledProcessError) as error:
            return f"its server does not run here: {error}"
        unpacked.rename(SERVERS / str(version))
    return None


def _maven_said(output: str) -> str:
    """Its first error, without the addresses that it tried."""
    error = re.search(r"^\[ERROR\] (.+?)(?: -> .*)?$", output, re.MULTILINE)
    said = error[1].rsplit("on project standalone-pom: ", 1)[-1] if error else "no reason"
    return "Maven says: " + re.sub(r" \(https?://[^)]*\)", "", said)


def named(bindir: Path) -> str:
    """The server's own words: `14.24`."""
    return subprocess.check_output([bindir / "postgres", "--version"], text=True).split(")", 1)[1].split()[0]


def run(version: int, server: str, options: list[str]) -> Run:
    """The stories on one version; pytest's own output goes to stderr."""
    result = Run(server)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        print(f"\nPostgreSQL {server}", file=sys.stderr, flush=True)
        ours = ["-q", "-r", "", "--postgres", str(version), "--junitxml", str(report)]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", str(STORIES), *ours, *options], cwd=ROOT, stdout=sys.stderr, check=False
        )
        # 1: some failed; 5: none was selected
        if ended.returncode not in (0, 1, 5) or not report.exists():
            result.remarks.append(("failed", "pytest", f"ended with {ended.returncode}"))
            return result
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # our own pytest wrote it
            story = case.get("classname", "").rsplit(".", 1)[-1]
            outcome, reason = _outcome(case)
            result.counts.setdefault(story, Counter())[outcome] += 1
            if outcome != "passed":
                result.remarks.append((outcome, f"{story}::{case.get('name')}", reason))
    return result


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return outcome, found.get("message", "").split("\n")[0]
    return "passed", ""


def table(runs: dict[int, Run], missing: dict[int, str]) -> str:
    """Stories by versions; below, what was not run and why, and what failed."""
    versions = sorted({*runs, *missing})
    stories = sorted({story for result in runs.values() for story in result.counts})
    rows = [["", *(runs[v].server if v in runs else str(v) for v in versions)]]
    for story in stories:
        counts = [runs[v].counts.get(story, Counter()) if v in runs else None for v in versions]
        rows.append([story, *("/".join(str(c[o]) for o in OUTCOMES) if c is not None else "-" for c in counts)])
    totals = [sum(runs[v].counts.values(), Counter()) if v in runs else None for v in versions]
    rows.append(["all", *("/".join(str(t[o]) for o in OUTCOMES) if t is not None else "-" for t in totals)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"stories on each PostgreSQL: {'/'.join(OUTCOMES)}", ""]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    if missing:
        lines += ["", *(f"no PostgreSQL {version}: {why}" for version, why in sorted(missing.items()))]
    for outcome in ("skipped", "failed"):
        remarks = [(v, *rest) for v, r in sorted(runs.items()) for what, *rest in r.remarks if what == outcome]
        if remarks:
            lines.append(f"\n{outcome}:")
            lines += [f"  {version}  {test}: {reason}" for version, test, reason in sorted(remarks)]
    return "\n".join(lines)


def main() -> int:
    """The whole matrix; 1 if anything failed, or there was nothing to run on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", type=int, action="append", choices=sorted(PINNED), help="only this version")
    arguments, options = parser.parse_known_args()
    wanted = sorted(arguments.postgres or PINNED)
    missing = {version: why for version in wanted if version not in installed() and (why := bring(version))}
    servers = {version: bindir for version, bindir in sorted(installed().items()) if version in wanted}
    runs = {version: run(version, named(bindir), options) for version, bindir in servers.items()}
    print("\n" + table(runs, missing))
    return int(not runs or any(outcome == "failed" for result in runs.values() for outcome, *_ in result.remarks))


if __name__ == "__main__":
    sys.exit(main())
