"""Credentials of AWS in files: `~/.aws/credentials` and `~/.aws/config`, as other tools read them.

`obstore` reads the environment and asks for the role of the machine, but does not read these files. Keys of a profile
are read here. A profile that has to log in, or to assume a role, is left to boto3, if that is installed.

The order is that of AWS's own tools: keys in the environment, a web identity, a profile, the role of the machine.
"""

from __future__ import annotations

import configparser
import os
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from walmere.errors import StoreRefused
from walmere.object_store.translate import CREDENTIALS

Provider = Callable[[], Any]

_FIRST: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Variables that come before a profile."""
_CONTAINER: Final = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_ANSWERS: Final = 2.0
"""Seconds in which the machine's own service must accept a connection."""
_READ_AGAIN: Final = timedelta(minutes=5)
_KEY_ID, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
_LOGS_IN: Final = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def settings_of_profile(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a store needs of the profile in use: the provider of its credentials, and its region; empty if none is."""
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    profile = _profile(environment, name or "default")
    found: dict[str, Any] = {}
    if "region" in profile and not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        found["region"] = profile["region"]
    if any(environment.get(variable) for variable in _FIRST):
        return found
    if _KEY_ID in profile and _SECRET in profile:
        found["credential_provider"] = lambda: _keys(_profile(environment, name or "default"))
    elif any(key in profile for key in _LOGS_IN):
        found["credential_provider"] = _by_boto3(name or "default")
    elif name is not None:
        wrong = f"AWS_PROFILE is {name}, and there is no such profile with credentials"
        raise StoreRefused("reading the credentials of AWS", wrong, "see ~/.aws/credentials and ~/.aws/config")
    return found


def require_role(metadata: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raise StoreRefused if only a role is left, and nobody answers at the address at which roles are asked for.

    The client would try for a minute.
    """
    if any(environment.get(variable) for variable in (*_FIRST, *_CONTAINER)):
        return
    address = urlsplit(metadata or environment.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    try:
        socket.create_connection((address.hostname or "", address.port or 80), _ANSWERS).close()
    except OSError:
        raise StoreRefused(
            "reading the credentials of AWS", "there are no credentials, and the machine has no role", CREDENTIALS
        ) from None


def _profile(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """The keys of a profile, in both files; empty if there is none."""
    home = Path(environment.get("HOME") or "~").expanduser() / ".aws"
    credentials = environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"
    config = environment.get("AWS_CONFIG_FILE") or home / "config"
    section = name if name == "default" else f"profile {name}"
    return {**_section(Path(config), section), **_section(Path(credentials), name)}


def _section(file: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(file.expanduser().read_text())
    except (OSError, UnicodeDecodeError):
        return {}
    except configparser.Error:  # its text has lines of the file
        wrong = f"{file} cannot be parsed"
        raise StoreRefused("reading the credentials of AWS", wrong, "correct the file, or remove it") from None
    return dict(parser[name]) if parser.has_section(name) else {}


def _keys(profile: Mapping[str, str]) -> dict[str, Any]:
    return {
        "access_key_id": profile.get(_KEY_ID, ""),
        "secret_access_key": profile.get(_SECRET, ""),
        "token": profile.get(_TOKEN),
        "expires_at": datetime.now(UTC) + _READ_AGAIN,  # other tools may replace the keys
    }


def _by_boto3(name: str) -> Provider:
    try:
        import boto3  # type: ignore[import-untyped]  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        raise StoreRefused(
            "reading the credentials of AWS",
            f"the profile {name} has to log in or to assume a role, which needs boto3",
            'pip install boto3, or run: eval "$(aws configure export-credentials --format env)"',
        ) from None
    provider: Provider = Boto3CredentialProvider(boto3.session.Session(profile_name=name))
    return provider
