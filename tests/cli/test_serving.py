"""`walmere dashboard` and `--metrics` as processes: what they print, who may ask, and how they end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from conftest import Database
from processes import Here, eventually, running, write_config
from walmere.testing.server import free_port


@pytest.fixture
def file(database18: Database, tmp_path: Path) -> Path:
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    return write_config(database18.config(tmp_path / "state"), tmp_path / "walmere.toml")


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        content: bytes = answer.read()
        return content.decode()


def printed(output: Path) -> str:
    """The address that was printed."""
    eventually(lambda: " is at http" in output.read_text(), why=output.read_text)
    [url] = re.findall(r"the dashboard is at (\S+)", output.read_text())
    return str(url)


def test_the_dashboard_prints_its_address_and_ends_at_sigterm(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running("dashboard", "-c", file, "--listen", "127.0.0.1:0", output=output) as process:
        url = printed(output)
        assert url.startswith("http://127.0.0.1:")
        assert "token" not in url
        assert "<title>walmere</title>" in get(url)
        assert 'walmere_source_up{subscription="test"} 1.0' in get(f"{url}metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert output.read_text().count("\n") == 1


def test_under_another_name_a_token_is_needed_and_printed(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    options = ("--listen", "127.0.0.1:0", "--allow-host", "walmere.example")
    with running("dashboard", "-c", file.parent, *options, output=output):
        url, _, token = printed(output).partition("?token=")
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            get(url)
        refused.value.close()
        assert "<title>walmere</title>" in get(url, Host="walmere.example", Authorization=f"Bearer {token}")


def test_a_token_of_a_file_is_not_printed(file: Path, tmp_path: Path) -> None:
    output, token = tmp_path / "output", tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with running("dashboard", "-c", file, "--listen", "127.0.0.1:0", "--token-file", token, output=output):
        url = printed(output)
        assert "0123456789abcdef" not in output.read_text()
        assert "walmere" in get(f"{url}metrics", Authorization="Bearer 0123456789abcdef")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--listen", "nowhere"), "is not HOST:PORT"),
        (("--token-file", "no-such-file"), "reading the token"),
        (("--token-file", "short"), "at least 16 characters"),
    ],
)
def test_options_that_cannot_be_used_end_with_exit_code_2(
    file: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("short")
    code, _, err = here("dashboard", "-c", file, *options)
    assert code == 2
    assert wrong in err


def test_a_receiver_serves_its_metrics(file: Path, tmp_path: Path, database18: Database) -> None:
    output = tmp_path / "output"
    port = free_port()
    with running("receive", "-c", file, "--metrics", f"127.0.0.1:{port}", output=output):
        eventually(database18.streaming)
        database18.execute("INSERT INTO t VALUES (1)")
        url = f"http://127.0.0.1:{port}/metrics"
        eventually(lambda: 'walmere_receiver_transactions_total{subscription="test"} 1.0' in get(url))
        assert 'walmere_receiver_connected{subscription="test"} 1.0' in get(url)
        assert "walmere_lag" not in get(url), "the source is not asked"
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            get(f"http://127.0.0.1:{port}/")
        refused.value.close()


def test_other_commands_load_neither_the_server_nor_the_library_of_metrics() -> None:
    code = "import sys, walmere.cli.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "walmere.cli.serving" in loaded
    assert not {"prometheus_client", "http.server", "walmere.dashboard", "walmere.metrics", "pyarrow"} & {*loaded}
