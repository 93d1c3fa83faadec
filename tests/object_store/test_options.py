"""URLs and options of stores."""

from __future__ import annotations

import pytest

from walmere.errors import ConfigError
from walmere.object_store import open_store
from walmere.object_store.options import Location, is_secret, locate


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://bucket/lake/", Location("s3", "s3://bucket", "lake")),
        ("s3a://bucket/a/b", Location("s3", "s3://bucket", "a/b")),
        ("S3://bucket", Location("s3", "s3://bucket", "")),
        ("gs://bucket/lake", Location("gs", "gs://bucket", "lake")),
        (
            "abfss://files@account.dfs.core.windows.net/lake",
            Location("az", "abfss://files@account.dfs.core.windows.net", "lake"),
        ),
        ("az://files/lake", Location("az", "az://files", "lake")),
        ("file:///srv/the%20lake%2525/", Location("file", "file://", "/srv/the lake%25")),
    ],
)
def test_a_url_has_a_root_and_a_prefix(url: str, found: Location) -> None:
    assert locate(url) == found
    assert locate(found.url) == found


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://server/bucket", "http:// is not supported"),
        ("s3://key:secret@bucket/lake", "user name"),
        ("s3:///lake", "no bucket"),
        ("s3://bucket/lake?versionId=1", "after"),
        ("abfss://@account.dfs.core.windows.net/lake", "no bucket or container"),
        ("file://host/lake", "no host"),
    ],
)
def test_other_urls_are_refused(url: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        open_store(url)
    assert "secret" not in caught.value.wrong


@pytest.mark.parametrize(
    "name",
    [
        *("aws_secret_access_key", "secret_access_key", "AWS_ACCESS_KEY_ID", "session_token", "token"),
        *("azure_storage_account_key", "sas_token", "client_secret", "bearer_token", "google_service_account_key"),
        *("sse_customer_key_base64", "encryption_key", "password"),
    ],
)
def test_a_secret_is_no_option(name: str) -> None:
    assert is_secret(name)
    for url in ("s3://bucket/lake", "gs://bucket/lake", "az://files/lake", "file:///lake"):
        with pytest.raises(ConfigError, match=f"{name} is a secret") as caught:
            open_store(url, {name: "hunter2"})
        assert "environment" in caught.value.hint
        assert "hunter2" not in str(caught.value)


def test_options_have_one_name_each() -> None:
    store = open_store("s3://bucket", {"AWS_REGION": "eu-central-1", "aws_endpoint_url": "http://localhost:9000"})
    assert store.options == {"region": "eu-central-1", "endpoint": "http://localhost:9000"}
    assert not is_secret("sse_kms_key_id")
    with pytest.raises(ConfigError, match="regoin is not an option"):
        open_store("s3://bucket", {"regoin": "eu-central-1"})
    with pytest.raises(ConfigError, match="proxy_url has a password"):
        open_store("s3://bucket", {"proxy_url": "http://me:hunter2@proxy"})


def test_stores_of_the_clouds_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent: there is no such server here."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("gs://bucket/lake", "az://files/lake", "abfss://files@account.dfs.core.windows.net/lake"):
        store = open_store(url)
        assert store.client.prefix is None  # type: ignore[attr-defined]
        assert store.path("a") == "lake/a"  # type: ignore[attr-defined]
