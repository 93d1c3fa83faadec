"""Rates and lag over time, for the charts."""

from __future__ import annotations

from walmere.dashboard.history import KEPT_SECONDS, History, HistoryPoint


def add(history: History, time: float, count: int | None, *, applied: int | None = None) -> HistoryPoint:
    return history.add(time, lag_seconds=0.5, lag_bytes=1, received=count, applied=applied, wal=count)


def test_a_rate_is_the_mean_of_the_last_seconds() -> None:
    history = History()
    assert add(history, 100.0, 1000).received_per_second is None
    assert add(history, 101.0, 1200).received_per_second == 200.0
    assert add(history, 102.0, 1200).received_per_second == 100.0
    for second in range(3, 10):
        add(history, 100.0 + second, 1200)
    assert add(history, 110.0, 1200).received_per_second == 0.0


def test_a_count_that_starts_again_or_is_unknown_has_no_rate() -> None:
    history = History()
    add(history, 100.0, 1000)
    assert add(history, 101.0, 10).received_per_second is None
    assert add(history, 102.0, None).received_per_second is None
    assert add(history, 103.0, 20, applied=5).applied_per_second is None


def test_old_points_are_forgotten() -> None:
    history = History()
    for second in range(0, int(KEPT_SECONDS) + 100, 10):
        add(history, float(second), second)
    rows = history.rows()
    assert rows[0][0] == 990.0 - KEPT_SECONDS
    assert len(rows) == KEPT_SECONDS / 10 + 1
    assert rows[-1] == (990.0, 0.5, 1, 1.0, None, 1.0)
