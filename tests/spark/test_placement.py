"""On which executor a task runs, and for how many tasks a batch is divided."""

from __future__ import annotations

from collections import Counter

import pytest

from walmere.spark.placement import expected_cores, place

EXECUTORS = [f"executor_host_{number}" for number in range(4)]
KEYS = [f"{oid} 0" for oid in range(16400, 16440)]


def test_a_table_stays_on_its_executor_when_others_join_the_batch() -> None:
    few, many = (dict(zip(keys, place(keys, EXECUTORS), strict=True)) for keys in (KEYS[:30], KEYS))
    assert Counter(few.values()).most_common(1)[0][1] == 8
    assert Counter(many.values()) == dict.fromkeys(EXECUTORS, 10)
    assert sum(many[key] == few[key] for key in few) >= 20  # by chance, it would be 7


def test_a_lost_executor_moves_few_other_tables() -> None:
    before = dict(zip(KEYS, place(KEYS, EXECUTORS), strict=True))
    after = dict(zip(KEYS, place(KEYS, EXECUTORS[1:]), strict=True))
    stayed = [key for key in KEYS if before[key] != EXECUTORS[0]]
    assert sum(before[key] == after[key] for key in stayed) >= len(stayed) * 3 // 4


def test_more_executors_than_tasks_are_no_problem() -> None:
    assert len(set(place(KEYS[:3], EXECUTORS))) == 3
    assert place([], EXECUTORS) == []


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, 0),
        ({"spark.executor.instances": "5", "spark.executor.cores": "4"}, 20),
        ({"spark.executor.instances": "5", "spark.executor.cores": "4", "spark.cores.max": "8"}, 8),
        ({"spark.dynamicAllocation.enabled": "true", "spark.executor.instances": "1"}, 0),
        ({"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "6"}, 6),
        ({"spark.executor.instances": "5", "spark.default.parallelism": "3"}, 0),
    ],
)
def test_a_batch_is_divided_for_the_executors_that_are_asked_for(settings: dict[str, str], cores: int) -> None:
    assert expected_cores(settings) == cores
