"""Google Cloud Storage for the tests: fake-gcs-server, if `scripts/fake-gcs-server` has got it, and its XML API."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from object_stores import Bucket
from processes import eventually
from walmere.testing.server import free_port


def fake_gcs_server() -> str | None:
    """The program."""
    own = Path(__file__).parents[1] / ".servers" / "gcs" / "fake-gcs-server"
    return str(own) if own.exists() else shutil.which("fake-gcs-server")


class GcsServer:
    """fake-gcs-server, and before it the part of the XML API that it does not have: see `gcs_xml_api`."""

    def __init__(self) -> None:
        program = fake_gcs_server()
        if program is None:
            pytest.skip("no fake-gcs-server here: scripts/fake-gcs-server gets it, if Go is there")
        self._port = free_port()
        self._api = subprocess.Popen(
            [sys.executable, "-m", "gcs_xml_api", str(self._port)],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._api.stdout is not None
        host = f"127.0.0.1:{int(self._api.stdout.readline())}"
        # requests of the XML API are known by their host
        arguments = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._port), "-public-host", host]
        self._process = subprocess.Popen(
            [program, *arguments, "-backend", "memory"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://{host}"
        eventually(self._answers, 60)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "fake-gcs-server does not start"
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def bucket(self) -> Bucket:
        """A new bucket."""
        name = f"t{secrets.token_hex(6)}"
        url = f"http://127.0.0.1:{self._port}/storage/v1/b"
        request = urllib.request.Request(url, f'{{"name": "{name}"}}'.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
        return Bucket(name, self.endpoint, "gs")

    def stop(self) -> None:
        for process in (self._process, self._api):
            process.kill()
            process.communicate()
