"""Who may use the server: by Host, Origin, the token, and what only the page knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from walmere.errors import ConfigError
from walmere.serving.access import PAGE_HEADER, Access, Address, access_for

LOOPBACK = access_for(Address("127.0.0.1", 8432), (), None, "box")
TOKEN = "0123456789abcdef"
BEYOND = access_for(Address("0.0.0.0", 8432), ("walmere.example",), TOKEN, "box")


def code(access: Access, method: str = "GET", **headers: str) -> int | None:
    """The status code of a refusal; None: allowed."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = access.refusal(method, named, "walmere_8432")
    return None if found is None else found.code


@pytest.mark.parametrize("host", ["127.0.0.1:8432", "localhost:8432", "LOCALHOST", "[::1]:8432"])
def test_a_page_on_the_loopback_interface_needs_no_token(host: str) -> None:
    assert LOOPBACK.token is None
    assert code(LOOPBACK, Host=host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example:8432", "127.0.0.1.evil.example", "10.0.0.7:8432", "box", "", "localhost:8432@evil", "localhost:x"],
)
def test_a_foreign_host_is_refused(host: str) -> None:
    assert code(LOOPBACK, Host=host) == 421


def test_a_request_without_a_host_is_refused() -> None:
    assert code(LOOPBACK) == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:9999", "null", "http://127.0.0.1:8432"])
def test_a_foreign_origin_is_refused_also_for_reading(origin: str) -> None:
    assert code(LOOPBACK, Host="localhost:8432", Origin=origin) == 403


def test_the_own_origin_is_allowed() -> None:
    assert code(LOOPBACK, Host="localhost:8432", Origin="http://localhost:8432") is None


def test_a_button_needs_the_origin_and_what_is_in_the_page() -> None:
    page = {PAGE_HEADER.replace("-", "_"): LOOPBACK.page}
    own = {"Host": "localhost:8432", "Origin": "http://localhost:8432"}
    assert code(LOOPBACK, "POST", **own, **page) is None
    assert code(LOOPBACK, "POST", **own) == 403
    assert code(LOOPBACK, "POST", **own, X_Walmere_Page="guess") == 403
    assert code(LOOPBACK, "POST", Host="localhost:8432", **page) == 403
    assert code(LOOPBACK, "POST", Host="localhost:8432", Origin="http://evil.example", **page) == 403


def test_beyond_the_loopback_interface_a_token_is_needed() -> None:
    assert code(BEYOND, Host="10.0.0.7:8432") == 401
    assert code(BEYOND, Host="10.0.0.7:8432", Authorization=f"Bearer {TOKEN}") is None
    assert code(BEYOND, Host="walmere.example", Cookie=f"a=b; walmere_8432={TOKEN}") is None
    assert code(BEYOND, Host="box:8432", Authorization=f"bearer {TOKEN}") is None
    assert code(BEYOND, Host="10.0.0.7:8432", Authorization=f"Basic {TOKEN}") == 401
    assert code(BEYOND, Host="10.0.0.7:8432", Authorization="Bearer 0123456789abcdeF") == 401
    assert code(BEYOND, Host="10.0.0.7:8432", Cookie=f"walmere_9={TOKEN}") == 401
    assert code(BEYOND, Host="evil.example", Authorization=f"Bearer {TOKEN}") == 421


def test_a_token_is_made_if_none_is_given_and_one_is_needed() -> None:
    first, second = (access_for(Address("0.0.0.0", 1), (), None, "box").token for _ in range(2))
    assert first is not None
    assert first != second
    assert len(first) >= 32
    proxied = access_for(Address("127.0.0.1", 1), ("walmere.example",), None, "box")
    assert proxied.token is not None, "who has another name for it is beyond this machine"


def test_a_token_on_the_loopback_interface_is_asked_for_if_it_is_given() -> None:
    assert code(access_for(Address("127.0.0.1", 1), (), TOKEN, "box"), Host="localhost") == 401


@pytest.mark.parametrize("token", ["short", "with a space 0123456789", "", "ümlaut0123456789"])
def test_a_token_that_is_too_weak_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 characters"):
        access_for(Address("0.0.0.0", 1), (), token, "box")


def test_two_servers_have_different_pages() -> None:
    assert replace(LOOPBACK, page="x").page != LOOPBACK.page != BEYOND.page


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, True),
        ("8432", "127.0.0.1", 8432, True),
        (":8432", "127.0.0.1", 8432, True),
        ("localhost:0", "localhost", 0, True),
        ("0.0.0.0:8432", "0.0.0.0", 8432, False),
        ("[::1]:8432", "::1", 8432, True),
        ("[::]:8432", "::", 8432, False),
        ("walmere.example:8432", "walmere.example", 8432, False),
    ],
)
def test_an_address_is_parsed(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.loopback) == (host, port, loopback)


@pytest.mark.parametrize("text", ["", "host", "host:", "::1:8432", "host:65536", "host:-1", "host:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address.parse(text)
