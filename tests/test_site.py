"""The documentation builds as a site without a warning, its links lead somewhere, and it needs no other host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_links_to_files_of_the_repository_lead_to_them() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for path in re.findall(
            r"https://github\.com/walmere/walmere/(?:blob|tree)/main/([^)#\s\"]+)", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs`."""
    command: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    other = r"(?:https?:)?//"
    loading = (
        rf"<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=\"?{other}|<link\b(?![^>]*canonical)[^>]*href=\"?{other}"
    )
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(loading, text), page
        assert 'class="mermaid"' not in text, f"{page}: Material gets mermaid from another host"
        assert r"\|" not in text, f"{page}: a backslash that is for GitHub only"
        assert "md-source" not in text, f"{page}: Material asks GitHub for facts about the repository"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(rf"(url\(|@import\s+)[\"']?{other}", sheet.read_text()), sheet


def test_a_broken_link_and_a_page_that_is_not_in_the_navigation_are_errors(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for directory in ("docs", "scripts"):
        shutil.copytree(ROOT / directory, tmp_path / directory)
    (tmp_path / "docs" / "lost.md").write_text("[a page](nowhere.md), [an anchor](guides/read.md#nowhere)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    for warning in ("- lost.md", "link 'nowhere.md'", "anchor '#nowhere'"):
        assert warning in built.stderr
