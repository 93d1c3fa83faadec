"""Who may use the server. Pure: decides by the headers of a request.

- Host must be a name of this server. Otherwise a web page of somebody else could use a DNS name that it points to
  127.0.0.1, and read everything as its own (DNS rebinding).
- Origin, if a browser sends it, must be the server itself. A POST must have it.
- A POST must also carry a value that is in the page, which other origins cannot read (CSRF).
- A token is needed if the server listens beyond the loopback interface, or has names beyond it (a proxy).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from walmere.errors import ConfigError

PAGE_HEADER: Final = "X-Walmere-Page"
"""The header of a POST with the value that stands in the page."""
MIN_TOKEN: Final = 16
"""A token has at least this many characters."""
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?\Z")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, :PORT or PORT; an IPv6 address in brackets. Raises ValueError."""
        host, separator, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not port.isascii() or not port.isdecimal() or int(port) > 65535 or (":" in host and bare == host):
            raise ValueError(f"{text!r} is not HOST:PORT; an example is 127.0.0.1:8432")
        return cls(bare if separator and bare else "127.0.0.1", int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def in_url(self) -> str:
        """The host as a URL has it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"{self.in_url}:{self.port}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    names: frozenset[str]  # that Host may have, in lower case
    any_address: bool = False  # Host may also be an IP address: no DNS name is involved then
    token: str | None = None
    made_token: bool = False  # nobody knows it yet, so it has to be printed
    page: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def refusal(self, method: str, headers: Mapping[str, str], cookie: str) -> Refusal | None:
        """Why a request is refused; None: it is allowed. `cookie`: the name of the cookie with the token."""
        host = headers.get("Host", "")
        if not self._is_own(host):
            return Refusal(421, f"the host {host!r} is not a name of this server; --allow-host adds one")
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return Refusal(403, f"a request from {origin!r} is refused: it is another origin")
        if self.token is not None and not self._has_token(headers, cookie):
            return Refusal(401, "a token is needed: open the address that walmere has printed at its start")
        if method == "POST" and (origin is None or not _equal(headers.get(PAGE_HEADER, ""), self.page)):
            return Refusal(403, "the request does not come from the page of this server; reload the page")
        return None

    def accepts(self, token: str) -> bool:
        """Whether this is the token."""
        return self.token is not None and _equal(token, self.token)

    def _is_own(self, host: str) -> bool:
        if (found := _HOST.match(host)) is None:
            return False
        name = found[1].lower()
        return name in self.names or (self.any_address and _is_address(name))

    def _has_token(self, headers: Mapping[str, str], cookie: str) -> bool:
        kind, _, sent = headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.accepts(sent.strip()):
            return True
        try:
            found = SimpleCookie(headers.get("Cookie", "")).get(cookie)
        except CookieError:
            return False
        return found is not None and self.accepts(found.value)


def access_for(
    address: Address, allow_hosts: Sequence[str], token: str | None, machine: str, *, make_token: bool = True
) -> Access:
    """The rules for a page at this address. Makes a token if one is needed and none is given.

    `machine`: the name of this machine. `make_token`: False if a token is not needed anywhere. Raises ConfigError for
    a token that is too short.
    """
    if token is not None and (len(token) < MIN_TOKEN or not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token)):
        wrong = f"the token must have at least {MIN_TOKEN} characters: letters, digits and . _ ~ + / = -"
        raise ConfigError("reading the token", wrong, "make one with: openssl rand -hex 24")
    others = {each.lower() for each in allow_hosts}
    beyond = not address.loopback or bool(others - _LOOPBACK_NAMES)
    names = _LOOPBACK_NAMES | others | {address.in_url.lower()}
    if not address.loopback:
        names |= {machine.lower()}
    made = beyond and token is None and make_token
    return Access(names, not address.loopback, secrets.token_urlsafe(24) if made else token, made)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
