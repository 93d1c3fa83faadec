"""A page of real subscriptions, on a free port."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from walmere.api import Subscription
from walmere.dashboard.pages import Broken, Dashboard
from walmere.serving.access import Access, Address, access_for
from walmere.serving.server import PageServer


@dataclass(frozen=True)
class Served:
    """A page that is served."""

    server: PageServer
    access: Access

    @property
    def port(self) -> int:
        return self.server.address.port

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.origin + path, timeout=30) as answer:
            content: bytes = answer.read()
            return content

    def post(self, path: str, body: Any = None) -> int:
        """Press a button, as the page does."""
        headers = {"Origin": self.origin, "X-Walmere-Page": self.access.page}
        request = urllib.request.Request(self.origin + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)

    def events(self) -> Iterator[tuple[str, Any]]:
        """The events of the stream: names and contents."""
        with urllib.request.urlopen(self.origin + "/events", timeout=30) as answer:
            name = ""
            for line in answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])


@contextlib.contextmanager
def served(*subscriptions: Subscription | Broken, token: str | None = None) -> Iterator[Served]:
    """Serve a page of these."""
    dashboard = Dashboard(subscriptions)
    address = Address("127.0.0.1", 0)
    access = access_for(address, (), token, "box")
    with PageServer(address, access, dashboard.routes(access)) as server, dashboard:
        yield Served(server, access)
