"""Where credentials come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from object_stores import ENVIRONMENT, Bucket
from s3_proxy import S3Proxy
from walmere.errors import StoreRefused
from walmere.object_store import open_store, remote
from walmere.object_store.aws_profile import settings_of_profile

FILES = {
    "credentials": "[default]\naws_access_key_id = DEFAULT\naws_secret_access_key = x\n"
    "[other]\naws_access_key_id = OTHER\naws_secret_access_key = x\naws_session_token = t\n",
    "config": "[default]\nregion = eu-central-1\n[profile other]\nregion = eu-west-1\n[profile sso]\nsso_session = s\n",
}


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Proxy]:
    """A store, in an environment without credentials."""
    for name in (*ENVIRONMENT, "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    remote._client.cache_clear()
    with S3Proxy(bucket) as made:
        yield made
    remote._client.cache_clear()


def write_files(home: Path) -> None:
    (home / ".aws").mkdir()
    for name, text in FILES.items():
        (home / ".aws" / name).write_text(text)


def signed_by(proxy: S3Proxy) -> set[str]:
    """Who has signed a request, by the ID of the key."""
    proxy.signers.clear()
    remote._client.cache_clear()
    open_store(proxy.bucket.url, proxy.bucket.options).put("a", b"1")
    return proxy.signers


def test_keys_of_the_environment_come_before_a_profile(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_files(tmp_path)
    assert signed_by(proxy) == {"DEFAULT"}
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert signed_by(proxy) == {"OTHER"}
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert signed_by(proxy) == {ENVIRONMENT["AWS_ACCESS_KEY_ID"]}


def test_a_profile_says_the_region_if_nobody_else_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_files(tmp_path)
    variables = {"HOME": str(tmp_path), "AWS_PROFILE": "other"}
    assert settings_of_profile(variables)["region"] == "eu-west-1"
    assert "region" not in settings_of_profile({**variables, "AWS_REGION": "us-east-1"})


def test_a_profile_without_credentials_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path)
    with pytest.raises(StoreRefused, match="AWS_PROFILE is nobody"):
        settings_of_profile({"HOME": str(tmp_path), "AWS_PROFILE": "nobody"})
    (tmp_path / ".aws/credentials").write_text("aws_secret_access_key = hunter2\n")
    with pytest.raises(StoreRefused, match="cannot be parsed") as caught:
        settings_of_profile({"HOME": str(tmp_path)})
    assert "hunter2" not in str(caught.value)


def test_a_machine_without_credentials_is_told_what_to_set(proxy: S3Proxy) -> None:
    bucket = proxy.bucket
    # nobody listens there: a machine that is none of Amazon's
    store = open_store(bucket.url, {**bucket.options, "metadata_endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StoreRefused, match="no credentials") as caught:
        store.get("a")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        ("gs://bucket/lake", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json"),
        ("gs://bucket/lake", "GOOGLE_SERVICE_ACCOUNT", "/nowhere/key.json"),
        ("az://bucket/lake", "AZURE_STORAGE_ACCOUNT_KEY", "hunter2, which is not base64"),
    ],
)
def test_credentials_that_cannot_be_read_are_refused_and_not_tried_again(
    url: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, value)
    remote._client.cache_clear()
    with pytest.raises(StoreRefused, match="opening the object store") as caught:
        open_store(url).get("a")
    assert not caught.value.transient
    assert variable in caught.value.hint
    assert "hunter2" not in str(caught.value)
    remote._client.cache_clear()
