"""The HTTP server: threads of the standard library, one for each connection.

A handful of people and a Prometheus use it, and each open page holds one connection, so threads are enough. It has no
TLS: use a proxy, or a tunnel (`ssh -L`), beyond a network that you trust.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from walmere.errors import WalmereError
from walmere.serving.access import Access, Address
from walmere.version import __version__

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 30.0
"""Seconds that a client may take to send a request, or to take an answer."""
MAX_STREAMS: Final = 64
"""Event streams at the same time: each holds a thread."""
_POLL: Final = 0.1
"""Seconds until the end of the server is noticed."""
_MAX_BODY: Final = 64 << 10
_SINGLE: Final = ("Host", "Origin", "Authorization", "Cookie", "Content-Length")
"""Headers that must not be there twice: another program might take the other one."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a route gets."""

    path: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """What a route answers. `events` is an event stream instead of a body."""

    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    events: Iterator[bytes] | None = None


def json_response(content: Any, code: int = 200) -> Response:
    """JSON."""
    return Response(json.dumps(content).encode(), "application/json", code)


Route = Callable[[Request], Response]


class PageServer:
    """Serves routes, by method and path: a path that ends with `/` also has everything below it."""

    def __init__(self, address: Address, access: Access, routes: Mapping[tuple[str, str], Route]) -> None:
        """Begin to listen. Raises WalmereError if the address is in use or not of this machine."""
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)
        server = self

        class Handler(_Handler):
            access_rules = access
            all_routes = routes
            streams = server._streams

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def server_bind(self) -> None:
                """Without looking up the name of the host, which may take long where there is no DNS."""
                TCPServer.server_bind(self)
                self.server_name, self.server_port = address.host, self.server_address[1]

            def handle_error(self, *_: object) -> None:
                """A client that is gone is no error of ours; anything else was answered with 500."""

        try:
            self._server = Server((address.host, address.port), Handler)
        except OSError as error:
            doing = f"listening on {address}"
            raise WalmereError(doing, error.strerror or str(error), "choose another address with --listen") from None
        self.address = Address(address.host, self._server.server_address[1])
        Handler.cookie = f"walmere_{self.address.port}"
        self._access = access
        self._thread = threading.Thread(target=self._serve, name="walmere-http", daemon=True)

    @property
    def url(self) -> str:
        """The address for a browser, with the token if it was made by this process."""
        everywhere = self.address.host in ("0.0.0.0", "::", "")  # noqa: S104
        host = socket.gethostname() if everywhere else self.address.in_url
        token = f"?token={self._access.token}" if self._access.made_token else ""
        return f"http://{host}:{self.address.port}/{token}"

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=_POLL)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    access_rules: Access
    all_routes: Mapping[tuple[str, str], Route]
    streams: threading.BoundedSemaphore
    cookie = "walmere"

    protocol_version = "HTTP/1.1"
    server_version = f"walmere/{__version__}"
    sys_version = ""
    timeout = REQUEST_TIMEOUT

    def log_message(self, *_: object) -> None:
        """Requests are not logged: a token may be in one."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                response = self._response(method)
            except WalmereError as error:
                response = json_response({"doing": error.doing, "wrong": error.wrong, "hint": error.hint}, 409)
            except Exception as error:
                _log.warning("answering a request of the dashboard has failed: %r", error)
                response = Response(b"internal error\n", code=500)
            self._send(response)

    def _response(self, method: str) -> Response:
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not length.isdecimal() or int(length) > _MAX_BODY:
            self.close_connection = True
            return Response(b"the body is too large\n", code=413)
        body = self.rfile.read(int(length))
        url = urlsplit(self.path)
        headers = {name.title(): value for name, value in self.headers.items()}
        if any(len(self.headers.get_all(name, ())) > 1 for name in _SINGLE):
            return Response(b"a header is there twice\n", code=400)
        refusal = self.access_rules.refusal(method, headers, self.cookie)
        if refusal is not None and refusal.code == 401 and url.path == "/" and method == "GET":
            [*_, token] = ["", *parse_qs(url.query).get("token", [])]
            if self.access_rules.accepts(token):  # then the page without the token in its address
                cookie = f"{self.cookie}={token}; HttpOnly; SameSite=Lax; Path=/"
                return Response(code=303, headers={"Location": "/", "Set-Cookie": cookie})
        if refusal is not None:
            more = {"WWW-Authenticate": "Bearer"} if refusal.code == 401 else {}
            return Response(f"{refusal.why}\n".encode(), code=refusal.code, headers=more)
        route = self._route(method, url.path)
        if route is None:
            return Response(b"not found\n", code=404)
        return route(Request(url.path, body))

    def _route(self, method: str, path: str) -> Route | None:
        if (exact := self.all_routes.get((method, path))) is not None:
            return exact
        below = [
            each
            for (known_method, each) in self.all_routes
            if known_method == method and each != "/" and each.endswith("/")
        ]
        prefix = max((each for each in below if path.startswith(each)), key=len, default=None)
        return None if prefix is None else self.all_routes[method, prefix]

    def _send(self, response: Response) -> None:
        if response.events is not None:
            self._send_events(response)
            return
        self.send_response(response.code)
        for name, value in {**_HEADERS, **response.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _send_events(self, response: Response) -> None:
        """Server-sent events, until the client is gone or the server ends."""
        self.close_connection = True
        if not self.streams.acquire(blocking=False):
            self._send(Response(b"too many pages are open\n", code=503))
            return
        try:
            self.send_response(200)
            for name, value in {**_HEADERS, "X-Accel-Buffering": "no"}.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in (response.events or ()) if self.command != "HEAD" else ():
                self.wfile.write(event)
                self.wfile.flush()
        finally:
            self.streams.release()
