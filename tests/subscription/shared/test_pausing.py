"""A pause with a store: the request is there, for commands and drivers on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from changelog.stored import open_cache
from object_stores import Bucket
from walmere.config import Config, Source, Storage, SubscriptionSettings
from walmere.errors import NotMirrored
from walmere.lsn import Lsn
from walmere.object_store import open_store
from walmere.subscription.requests import pausing, resync
from walmere.subscription.shared.requests import Request, SharedRequests
from walmere.subscription.shared.store import is_paused, set_paused
from walmere.subscription.tables import Tables


@pytest.fixture
def config(bucket: Bucket, tmp_path: Path) -> Config:
    return Config(
        source=Source.model_validate(
            {"dsn": "postgresql://127.0.0.1:1/shop", "publications": ["shop"], "slot": "walmere_shop"}
        ),
        subscription=SubscriptionSettings(name="shop", directory=tmp_path / "a", store=f"{bucket.url}/shop"),
        storage=Storage.model_validate(bucket.options),
    )


def test_a_pause_is_in_the_store_and_other_requests_do_not_end_it(config: Config, tmp_path: Path) -> None:
    with pytest.raises(NotMirrored, match="has never run"):
        set_paused(config, True)
    assert not is_paused(config)
    assert config.subscription.store is not None
    store = open_store(config.subscription.store, config.storage.settings)
    open_cache(store, tmp_path / "log")
    set_paused(config, True)
    set_paused(config, True)
    assert is_paused(config)

    requests, here = SharedRequests(store), tmp_path / "b"
    requests.add(Request(skip=Lsn(7)))
    here.mkdir()
    resync.take_shared(here, Tables(here), SharedRequests(store))  # a driver on another machine
    assert requests.read() == []
    assert is_paused(config)
    assert pausing.is_paused(here), "for the planner of its batches"

    set_paused(config, False)
    assert not is_paused(config)
    resync.take_shared(here, Tables(here), SharedRequests(store))
    assert not pausing.is_paused(here)
