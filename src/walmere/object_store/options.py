"""URLs and options of stores. What names a secret is refused: secrets come from the environment, where they are used.

Options are those of `obstore` and `deltalake`, which agree in their names, without a prefix such as `aws_`. Only known
names are accepted, so that a secret is never kept by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from walmere.errors import ConfigError

KINDS: Final[Mapping[str, str]] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "file": "file",
}
"""The schemes of URLs, each with the kind of store."""
_OF_KIND: Final[Mapping[str, frozenset[str]]] = {
    "s3": frozenset(
        {
            *("endpoint", "region", "virtual_hosted_style_request", "s3_express", "request_payer", "skip_signature"),
            *("role_arn", "role_session_name", "sts_endpoint", "metadata_endpoint", "imdsv1_fallback"),
            *("server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"),
            *("checksum_algorithm", "unsigned_payload", "disable_bulk_delete", "disable_tagging"),
        }
    ),
    "gs": frozenset({"base_url", "application_credentials", "service_account", "skip_signature"}),
    "az": frozenset(
        {
            *("endpoint", "account_name", "use_fabric_endpoint", "use_emulator", "skip_signature"),
            *("tenant_id", "client_id", "authority_host", "federated_token_file", "credential_type"),
            *("msi_endpoint", "msi_resource_id", "object_id", "use_azure_cli"),
        }
    ),
    "file": frozenset(),
}
_CLIENT: Final = frozenset(
    {
        *("timeout", "connect_timeout", "read_timeout", "pool_idle_timeout", "pool_max_idle_per_host", "user_agent"),
        *("allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "proxy_url", "proxy_excludes"),
    }
)
_PREFIXES: Final = ("aws_", "google_", "azure_storage_", "azure_")
_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "default_region": "region",
    "virtual_hosted": "virtual_hosted_style_request",
}
_SECRET: Final = re.compile(r"secret|password|token|key|sas|credential|signature")
VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "the variables of its store",
}
TIMEOUT: Final = 30.0
"""Seconds for one request."""


@dataclass(frozen=True, slots=True)
class Location:
    """A URL, in parts."""

    kind: str  # s3, gs, az or file
    root: str  # the URL of the bucket or container
    prefix: str  # the rest, without slashes at its ends; of a directory, its path

    @property
    def url(self) -> str:
        """The URL, without a slash at the end."""
        path = quote(self.prefix) if self.kind == "file" else self.prefix
        return f"{self.root}/{path.lstrip('/')}".rstrip("/")


def is_url(location: str) -> bool:
    """Whether this is a URL, not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None


def locate(url: str) -> Location:
    """The parts of a URL. Raises ConfigError if no store has such a URL."""
    doing = "opening an object store"
    parts = urlsplit(url)
    kind = KINDS.get(parts.scheme.lower())
    if kind is None:
        schemes = ", ".join(f"{scheme}://" for scheme in KINDS)
        raise ConfigError(doing, f"the scheme {parts.scheme}:// is not supported", f"use one of {schemes}")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ConfigError(doing, "a URL must not have a part after ? or #", "write options under [storage]")
    if kind == "file":
        if parts.netloc.lower() not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(doing, "a file:// URL has an absolute path and no host", "use file:///path")
        return Location(kind, "file://", unquote(parts.path).rstrip("/") or "/")
    container, at, _ = parts.netloc.rpartition("@")
    if (at and kind != "az") or ":" in parts.netloc:
        raise ConfigError(doing, "the URL has a user name, password or port", f"set {VARIABLES[kind]} instead")
    if not parts.netloc or (at and not container):
        raise ConfigError(doing, f"the URL {url} has no bucket or container", f"use {parts.scheme}://bucket/path")
    scheme = "s3" if kind == "s3" else parts.scheme.lower()  # s3a is Hadoop's name for it
    return Location(kind, f"{scheme}://{parts.netloc}", parts.path.strip("/"))


def checked(location: Location, options: Mapping[str, str]) -> dict[str, str]:
    """The options under their plain names. Raises ConfigError if one is unknown, or may have a secret.

    A directory has none: those that are given are for other stores.
    """
    found: dict[str, str] = {}
    for given, value in options.items():
        name = plain_name(given)
        if location.kind == "gs" and name == "endpoint":
            name = "base_url"
        doing = "reading the options of an object store"
        if is_secret(name):
            hint = f"set {VARIABLES[location.kind]} in the environment of Walmere and of Spark's executors"
            raise ConfigError(doing, f"{given} is a secret, or names one, and must not be an option", hint)
        if location.kind == "file":
            continue
        if name not in _OF_KIND[location.kind] and name not in _CLIENT:
            known = ", ".join(sorted(_OF_KIND[location.kind] | _CLIENT))
            raise ConfigError(doing, f"{given} is not an option of {location.root}", f"the options are {known}")
        if name in ("endpoint", "base_url") and not _is_address(value):  # obstore would panic
            raise ConfigError(doing, f"{given} is not the address of a server", "write it as http://host:9000")
        if urlsplit(value).password is not None:
            raise ConfigError(doing, f"{given} has a password", "remove the password from the URL")
        found[name] = value
    return found


def _is_address(url: str) -> bool:
    """Whether this is http:// or https:// with a host, and a port if there is one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if is_ip := ":" in host or re.fullmatch("[0-9.]+", host) is not None:
            ip_address(host)
    except ValueError:  # of the port, of brackets, or of an IP address
        return False
    valid = is_ip or re.fullmatch("[A-Za-z0-9._-]+", host) is not None
    return parts.scheme in ("http", "https") and valid and port != 0 and re.fullmatch("[!-~]+", url) is not None


def is_secret(name: str) -> bool:
    """Whether an option of this name may have a secret."""
    plain = plain_name(name)
    return not any(plain in names for names in (*_OF_KIND.values(), _CLIENT)) and _SECRET.search(plain) is not None


def plain_name(name: str) -> str:
    """The name of an option, without its prefix."""
    plain = name.lower()
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return _ALIASES.get(plain, plain)


def store_settings(location: Location, options: Mapping[str, str]) -> dict[str, Any]:
    """The options of the store itself, for `obstore`."""
    return {name: value for name, value in options.items() if name in _OF_KIND[location.kind]}


def deltalake_settings(options: Mapping[str, str]) -> dict[str, str]:
    """All options, for `deltalake`."""
    found = {"timeout": f"{TIMEOUT:.0f}s", **options}
    if _endpoint(options).startswith("http://"):
        found.setdefault("allow_http", "true")
    return found


def client_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """The options of the HTTP client, for `obstore`."""
    found: dict[str, Any] = {"timeout": timedelta(seconds=TIMEOUT), "connect_timeout": timedelta(seconds=5)}
    found |= {name: value for name, value in options.items() if name in _CLIENT}
    if _endpoint(options).startswith("http://"):
        found.setdefault("allow_http", "true")
    return found


def _endpoint(options: Mapping[str, str]) -> str:
    return options.get("endpoint") or options.get("base_url") or ""
