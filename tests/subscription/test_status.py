"""What status says of itself when nobody answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Database
from receiving import receive_all
from walmere.subscription.status import status


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"received_lsn": 1}', '{"received_lsn": "x"}'])
def test_a_receiver_json_torn_by_a_crash_is_no_news(database18: Database, tmp_path: Path, content: str) -> None:
    config = database18.config(tmp_path)
    (tmp_path / "receiver.json").write_text(content)
    assert status(config)["received_lsn"] is None


def test_a_receiver_that_was_killed_long_ago_is_not_believed(database18: Database, tmp_path: Path) -> None:
    database18.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    config = database18.config(tmp_path)
    durable = receive_all(database18, config)
    (tmp_path / "receiver.json").write_text('{"received_lsn": "0/1"}')
    assert status(config)["received_lsn"] == str(durable)
