"""Which transactions a snapshot sees, by xid: as PostgreSQL decides it, also where xids wrap around."""

from __future__ import annotations

import pytest

from conftest import Database
from walmere.verify.open_transactions import Visible


@pytest.mark.parametrize(
    ("snapshot", "seen", "unseen"),
    [
        ("100:100:", [3, 99], [100, 101]),
        ("90:100:90,95", [89, 91, 99], [90, 95, 100]),
        ("8589934592:8589934600:8589934595", [4294967295, 2, 4], [3, 8, 100]),
    ],
)
def test_a_transaction_is_seen_unless_it_is_in_progress_or_newer(
    snapshot: str, seen: list[int], unseen: list[int]
) -> None:
    visible = Visible.parse(snapshot)
    assert [xid for xid in seen + unseen if visible.sees(xid)] == seen


def test_it_is_what_the_server_says(database18: Database) -> None:
    text = database18.value("SELECT '100:200:110,150'::pg_snapshot::text")
    visible = Visible.parse(text)
    for xid in range(95, 205):
        assert visible.sees(xid) == database18.value(
            "SELECT pg_visible_in_snapshot(%s::text::xid8, %s::pg_snapshot)", str(xid), text
        )
