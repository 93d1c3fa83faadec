"""Freshness: the time from a commit at the source until it is visible in the target.

Every transaction writes its number, and the time just before it is sent is recorded.

A Delta table is not queried: afterwards, the data files that each version adds show which numbers it has, and its
commit file when it was written.

A table of a database is polled. The commit timestamps of PostgreSQL are of no use here: a transaction that has a
replication origin is given the time of the commit at the source.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import matplotlib as mpl
import numpy as np
import psycopg
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib import pyplot

from walmere.object_store import open_store

mpl.use("agg")

POLL = 0.01

Times: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Transaction: TypeAlias = Callable[[int], tuple[bytes, list[Any]]]
"""The statement of a transaction and its parameters, by the number of the transaction."""


@contextmanager
def writing(dsn: str, transaction: Transaction, count: int, rate: int) -> Iterator[Future[Times]]:
    """Write transactions at a constant rate. Yields the time of each, when all are written."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # no lock shared with the driver
        pool.submit(_ready).result()  # starting the process takes a second
        yield pool.submit(_write, dsn, transaction, count, rate)


@contextmanager
def polling(dsn: str, query: str, count: int, seconds: float) -> Iterator[Future[Times]]:
    """Poll a table. Yields the time at which each transaction was first seen, when all are, or after these seconds.

    The query returns the newest number. A time is up to `POLL` and one query late, never early. Transactions that were
    not seen have the time infinity.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_ready).result()
        yield pool.submit(_poll, dsn, query, count, seconds)


def _poll(dsn: str, query: str, count: int, seconds: float) -> Times:
    when = np.full(count, np.inf)
    done = 0
    deadline = time.time() + seconds
    with psycopg.connect(dsn, autocommit=True) as connection:
        while done < count and time.time() < deadline:
            [[newest]] = connection.execute(query.encode()).fetchall()
            if newest >= done:
                when[done : newest + 1] = time.time()
                done = newest + 1
            time.sleep(POLL)
    return when


@contextmanager
def polling_commits(table: str, options: Mapping[str, str], count: int, seconds: float) -> Iterator[Future[Times]]:
    """The same for a Delta table in an object store: polls for its next commit, because a store has only whole seconds.

    Needs statistics of column `number`.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_ready).result()
        yield pool.submit(_poll_commits, table, dict(options), count, seconds)


def _poll_commits(table: str, options: Mapping[str, str], count: int, seconds: float) -> Times:
    store = open_store(f"{table}/_delta_log", options)
    when = np.full(count, np.inf)
    done = version = 0
    deadline = time.time() + seconds
    while done < count and time.time() < deadline:
        found = store.get(f"{version:020d}.json")
        if found is None:
            time.sleep(POLL)
            continue
        seen = time.time()
        version += 1
        actions = map(json.loads, found[0].splitlines())
        files = [json.loads(action["add"]["stats"]) for action in actions if "add" in action]
        newest = max((each["maxValues"].get("number", -1) for each in files), default=-1)
        if newest >= done:
            when[done : newest + 1] = seen
            done = newest + 1
    return when


def _ready() -> None:
    """Do nothing."""


def _write(dsn: str, transaction: Transaction, count: int, rate: int) -> Times:
    """Write the transactions, numbered in commit order."""
    sent = np.empty(count)
    began = time.time()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.time()))
            sent[number] = time.time()
            connection.execute(*transaction(number))
    return sent


def visible(table: Path, count: int) -> Times:
    """The time at which each transaction became visible: that of the first version with its number or a later one.

    A row that no transaction has written has a number below 0.
    """
    when = np.full(count, np.inf)
    done = 0
    seen: set[str] = set()
    for commit in sorted((table / "_delta_log").glob("*.json")):
        adds = [
            action["add"]["path"] for line in commit.read_text().splitlines() if "add" in (action := json.loads(line))
        ]
        # a file that gets a deletion vector is added again, with the same path
        newest = max((_newest(table / unquote(path)) for path in adds if path not in seen), default=-1)
        seen.update(adds)
        if newest >= done:
            when[done : newest + 1] = commit.stat().st_mtime
            done = newest + 1
    return when


def _newest(file: Path) -> int:
    newest = pc.max(pq.read_table(file, columns=["number"])["number"]).as_py()
    return -1 if newest is None else int(newest)


def plot(sent: Times, delay: Times, path: Path) -> None:
    """Plot the delay over time, and its distribution."""
    figure, (over_time, spread) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=[2, 1], layout="constrained")
    over_time.plot(sent, delay, ".", markersize=1)
    over_time.set(xlabel="seconds since the first transaction", ylabel="source commit → visible, s", ylim=(0, None))
    spread.plot(np.sort(delay), np.arange(1, len(delay) + 1) / len(delay) * 100)
    spread.set(xlabel="source commit → visible, s", ylabel="% of transactions", xlim=(0, None))
    for axes in (over_time, spread):
        axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"  plotted to {path}")
