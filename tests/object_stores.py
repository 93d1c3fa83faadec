"""The S3 server of the tests, and buckets in it."""

from __future__ import annotations

import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "AKIAOFTHETESTS", "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests"}
"""Credentials, as users give them. Nothing may ever show the second one."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server, or of a proxy before it."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def options(self) -> Mapping[str, str]:
        """As [storage] has them."""
        return {"endpoint": self.endpoint, "region": "us-east-1"}


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
