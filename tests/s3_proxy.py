"""A proxy before the server of a store that counts requests, and can delay them, refuse them, or lose their answers."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from object_stores import Bucket


@dataclass(frozen=True)
class Asked:
    """A request, as a rule sees it."""

    method: str
    path: str  # without the bucket
    number: int  # how many of this method came before
    range: str = ""  # of bytes, as HTTP has it

    @property
    def changes(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")


class Refuse(Exception):
    """A rule raises it: the proxy answers 503, and the server never sees the request."""


class LoseAnswer(Exception):
    """A rule raises it: the server does what was asked, and nobody hears of it."""


class AnswerLate(Exception):
    """A rule raises it with a number of seconds: the server does what was asked, and the answer comes that late."""


class S3Proxy:
    """Forwards requests to the server of a bucket. `rule` is called with each, and may wait or raise."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._target = urlsplit(bucket.endpoint)
        self.rule: Callable[[Asked], None] = lambda _: None
        self.forget: tuple[str, ...] = ()
        """Headers that the server does not get."""
        self.counts: Counter[str] = Counter()
        self.signers: set[str] = set()
        """The IDs of the keys that requests were signed with."""
        self._counting = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _serve(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that has given up is no error."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def bucket(self) -> Bucket:
        """The same bucket, through the proxy."""
        return replace(self._bucket, endpoint=f"http://127.0.0.1:{self._server.server_port}{self._target.path}")

    @property
    def origin(self) -> str:
        """The endpoint of the server itself."""
        return self._bucket.endpoint

    @property
    def changing(self) -> int:
        """How many requests could have changed something."""
        return sum(self.counts[method] for method in ("PUT", "POST", "DELETE"))

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length)
        with self._counting:
            before = self.counts[handler.command]
            self.counts[handler.command] += 1
        path = unquote(handler.path.partition("?")[0])  # GCS has %2F between the parts of a name
        path = path.removeprefix(f"{self._target.path}/{self._bucket.name}").lstrip("/")
        lost, late = False, 0.0
        self.signers |= set(re.findall(r"Credential=([^/]+)/", handler.headers.get("Authorization", "")))
        try:
            self.rule(Asked(handler.command, path, before, handler.headers.get("Range", "")))
        except Refuse:
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        except LoseAnswer:
            lost = True
        except AnswerLate as found:
            late = float(found.args[0])
        forgotten = {name.lower() for name in self.forget}
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in forgotten}
        connection = http.client.HTTPConnection(self._target.hostname or "", self._target.port, timeout=60)
        try:
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if lost:
            handler.close_connection = True
            return
        time.sleep(late)
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        handler.send_header(
            "Content-Length",
            answer.getheader("Content-Length", str(len(content))) if handler.command == "HEAD" else str(len(content)),
        )
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


def slow(seconds: float) -> Callable[[Asked], None]:
    """Every request that changes something takes longer."""

    def rule(asked: Asked) -> None:
        if asked.changes:
            time.sleep(seconds)

    return rule


def refuse_every(count: int) -> Callable[[Asked], None]:
    """One in so many puts is refused with 503."""

    def rule(asked: Asked) -> None:
        if asked.method == "PUT" and asked.number % count == count - 1:
            raise Refuse

    return rule


def lose_every(count: int) -> Callable[[Asked], None]:
    """The answer of one in so many puts is lost."""

    def rule(asked: Asked) -> None:
        if asked.method == "PUT" and asked.number % count == count - 1:
            raise LoseAnswer

    return rule
