"""An emulator of Azure's blob storage for the tests: azurite, if `scripts/azurite` has got it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest

from object_stores import ENVIRONMENT, Bucket
from processes import eventually
from walmere.testing.server import free_port

ACCOUNT, KEY = (ENVIRONMENT[f"AZURE_STORAGE_ACCOUNT_{part}"] for part in ("NAME", "KEY"))
_VERSION = "2025-11-05"


def azurite() -> str | None:
    """The program."""
    own = Path(__file__).parents[1] / ".servers" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(own) if own.exists() else shutil.which("azurite-blob")


class AzureServer:
    """azurite, in a process of its own."""

    def __init__(self) -> None:
        program = azurite()
        if program is None:
            pytest.skip("no azurite here: scripts/azurite gets it")
        self._root = Path(tempfile.mkdtemp(prefix="walmere-azure-"))
        self._port = free_port()
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", str(self._root)]
        self._process = subprocess.Popen(
            [program, *arguments, "--silent", "--skipApiVersionCheck", "--disableTelemetry"],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://127.0.0.1:{self._port}/{ACCOUNT}"
        eventually(self._answers, 60)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "azurite does not start"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/", timeout=1).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def bucket(self) -> Bucket:
        """A new container."""
        name = f"t{secrets.token_hex(6)}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        signed = "\n".join(f"{key}:{value}" for key, value in headers.items())
        # the request, by the rules of Azure's shared key: method, eleven headers that it does not have, then these
        text = "PUT" + "\n" * 12 + f"{signed}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        url = f"{self.endpoint}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 201
        return Bucket(name, self.endpoint, "az")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._root)
