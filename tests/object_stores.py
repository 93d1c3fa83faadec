"""The S3 servers of the tests, and buckets in the servers of all stores."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

_GCS_KEY = Path(__file__).parent / "gcs_key.json"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAOFTHETESTS",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"the-key-of-the-tests").decode(),
    "GOOGLE_SERVICE_ACCOUNT": str(_GCS_KEY),
}
"""Credentials, as users give them."""
SECRETS = (
    ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    ENVIRONMENT["AZURE_STORAGE_ACCOUNT_KEY"],
    json.loads(_GCS_KEY.read_text())["private_key"],
)
"""Nothing may ever show them."""

EVERY_STORE = ["s3", *(pytest.param(scheme, marks=pytest.mark.long) for scheme in ("gs", "az"))]
"""Parameters of the fixture `bucket`."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server, or of a proxy before it."""

    name: str
    endpoint: str
    scheme: str = "s3"  # or gs, or az

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    @property
    def options(self) -> Mapping[str, str]:
        """As [storage] has them."""
        return {"endpoint": self.endpoint} | ({"region": "us-east-1"} if self.scheme == "s3" else {})

    @property
    def section(self) -> str:
        """The section [storage]."""
        return "[storage]\n" + "".join(f'{key} = "{value}"\n' for key, value in self.options.items())


class S3Server:
    """moto, in a process of its own: see `s3_server`."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "s3_server"], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def bucket(self) -> Bucket:
        """A new bucket."""
        name = f"t{secrets.token_hex(6)}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
        return Bucket(name, self.endpoint)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def versitygw() -> str | None:
    """The program, if `scripts/versitygw` has got it or it is on the PATH."""
    own = Path(__file__).parents[1] / ".servers" / "s3" / "versitygw"
    return str(own) if own.exists() else shutil.which("versitygw")


class VersityServer:
    """versitygw: an S3 server over a directory, which serves several requests at the same time."""

    def __init__(self, program: str) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="walmere-s3-"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        keys = {
            "ROOT_ACCESS_KEY": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_KEY": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        }
        self._process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(self._root)],
            env={**os.environ, **keys},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "versitygw does not start"
                time.sleep(0.05)

    def bucket(self) -> Bucket:
        """A new bucket."""
        name = f"t{secrets.token_hex(6)}"
        (self._root / name).mkdir()
        return Bucket(name, self.endpoint)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._root)
