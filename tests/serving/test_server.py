"""The server on a real socket: routes, refusals, the cookie, event streams."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import pytest

from walmere.errors import WalmereError
from walmere.serving.access import Access, Address, access_for
from walmere.serving.server import PageServer, Request, Response, Route, json_response

TOKEN = "0123456789abcdef"
Ask = Callable[..., tuple[int, Mapping[str, str], bytes]]


def fail(_: Request) -> Response:
    raise WalmereError("doing it", "it went wrong", "do something else")


def break_(_: Request) -> Response:
    raise ZeroDivisionError("a secret")


ROUTES: Mapping[tuple[str, str], Route] = {
    ("GET", "/"): lambda _: Response(b"the page", "text/html"),
    ("GET", "/files/"): lambda request: Response(request.path.encode()),
    ("GET", "/events"): lambda _: Response(events=iter([b"data: 1\n\n", b"data: 2\n\n"])),
    ("GET", "/fail"): fail,
    ("GET", "/break"): break_,
    ("POST", "/do"): lambda request: json_response({"body": request.body.decode()}),
}


def asker(server: PageServer) -> Ask:
    def ask(
        path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=10)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    return ask


@pytest.fixture
def access() -> Access:
    return access_for(Address("127.0.0.1", 0), (), None, "box")


@pytest.fixture
def server(access: Access) -> Iterator[PageServer]:
    with PageServer(Address("127.0.0.1", 0), access, ROUTES) as server:
        yield server


@pytest.fixture
def ask(server: PageServer) -> Ask:
    return asker(server)


def test_the_page_comes_with_headers_that_keep_other_hosts_out(ask: Ask) -> None:
    code, headers, body = ask("/")
    assert (code, body) == (200, b"the page")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_a_path_has_what_is_below_it_and_others_are_not_found(ask: Ask) -> None:
    assert ask("/files/a.css?x=1")[2] == b"/files/a.css"
    assert ask("/other")[0] == 404
    assert ask("/do")[0] == 404
    assert ask("/", "HEAD")[::2] == (200, b"")


def test_a_foreign_host_and_a_foreign_origin_are_refused(ask: Ask) -> None:
    assert ask("/", Host="evil.example")[0] == 421
    assert ask("/events", Origin="http://evil.example")[0] == 403


def test_a_host_that_is_there_twice_is_refused(server: PageServer) -> None:
    with closing(socket.create_connection(("127.0.0.1", server.address.port), timeout=10)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_post_needs_what_is_in_the_page(server: PageServer, ask: Ask, access: Access) -> None:
    host = f"127.0.0.1:{server.address.port}"
    assert ask("/do", "POST", "{}")[0] == 403
    assert ask("/do", "POST", "{}", Origin=f"http://{host}")[0] == 403
    code, _, body = ask("/do", "POST", "{}", Origin=f"http://{host}", X_Walmere_Page=access.page)
    assert (code, body) == (200, b'{"body": "{}"}')


def test_a_body_that_is_too_large_is_refused(ask: Ask) -> None:
    assert ask("/do", "POST", "x" * 70_000)[0] == 413


def test_events_are_streamed(ask: Ask) -> None:
    code, headers, body = ask("/events")
    assert (code, headers["Content-Type"], body) == (200, "text/event-stream", b"data: 1\n\ndata: 2\n\n")


def test_an_error_says_what_to_do_and_an_unexpected_one_says_nothing(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask("/fail")[::2] == (409, b'{"doing": "doing it", "wrong": "it went wrong", "hint": "do something else"}')
    assert ask("/break")[::2] == (500, b"internal error\n")


def test_the_token_in_the_address_becomes_a_cookie() -> None:
    beyond = access_for(Address("127.0.0.1", 0), (), TOKEN, "box")
    with PageServer(Address("127.0.0.1", 0), beyond, ROUTES) as server:
        ask = asker(server)
        assert ask("/")[0] == 401
        assert ask("/?token=wrong")[0] == 401
        assert ask("/events?token=" + TOKEN)[0] == 401, "only the page takes it from its address"
        assert TOKEN not in server.url, "who gave it knows it; it would be in a log"
        code, headers, _ = ask(f"/?token={TOKEN}")
        assert (code, headers["Location"]) == (303, "/")
        assert "HttpOnly" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert ask("/", Cookie=cookie)[0] == 200
        assert ask("/events", Cookie=cookie)[0] == 200
        assert ask("/", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_token_that_was_made_is_in_the_address_to_print() -> None:
    made = access_for(Address("0.0.0.0", 0), (), None, "box")
    with PageServer(Address("127.0.0.1", 0), made, ROUTES) as server:
        assert server.url == f"http://127.0.0.1:{server.address.port}/?token={made.token}"


def test_an_address_in_use_is_an_error_that_says_what_to_do(server: PageServer, access: Access) -> None:
    with pytest.raises(WalmereError, match=r"listening on 127\.0\.0\.1:\d+: Address already in use\n.*--listen"):
        PageServer(server.address, access, {})


def test_it_ends_also_while_a_client_is_connected(access: Access) -> None:
    with PageServer(Address("127.0.0.1", 0), access, ROUTES) as server:
        idle = socket.create_connection(("127.0.0.1", server.address.port), timeout=10)
    with closing(idle), pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.address.port), timeout=10)
