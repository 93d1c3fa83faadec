"""A log in an object store, for several test modules."""

from __future__ import annotations

import pytest

from s3_proxy import S3Proxy
from walmere.object_store import ObjectStore, open_store


@pytest.fixture
def store(proxy: S3Proxy) -> ObjectStore:
    return open_store(f"{proxy.bucket.url}/log", proxy.bucket.options)
