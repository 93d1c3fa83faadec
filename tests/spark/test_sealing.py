"""What PySpark writes to a file has no passwords."""

from __future__ import annotations

import pickle

from walmere.config import Source
from walmere.spark.sealing import Secrets


def test_items_have_no_secrets_until_a_worker_opens_them() -> None:
    source = Source(dsn="host=h password=s3cret", password="0ther", publications=("p",), slot="s")  # type: ignore[arg-type]
    secrets = Secrets()
    items = [(1, source), (2, source), (3, None)]
    sealed = secrets.seal(items)
    for each in sealed:
        assert b"s3cret" not in each
        assert b"0ther" not in each
    assert "s3cret" not in repr(secrets)
    there = pickle.loads(pickle.dumps(secrets))  # as it is sent with the function
    opened = [there.open(each) for each in sealed]
    assert opened == items
    assert opened[0][1].dsn.get_secret_value() == "host=h password=s3cret"
