"""What a task of the apply worker does. Executors import this module, and nothing that only the driver needs."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import SecretStr

from walmere.apply.worker import apply_table
from walmere.sinks.base import Sink, is_lake
from walmere.spark.executors import Versions, require_same
from walmere.spark.failures import Failure, result_or_failure


def apply_jobs(
    pickled: Iterable[bytes], batch: bytes, sink: Sink, hash_key: SecretStr | None, tries: int, driver: Versions
) -> Iterator[Any]:
    """Apply the jobs of a task. Returns their results. `batch`: the pickled Batch."""
    unsuitable = result_or_failure(tries, require_same, driver)  # first: other versions may have other classes
    if unsuitable is not None:
        yield unsuitable
        return
    jobs = [pickle.loads(job) for job in pickled]  # noqa: S301
    if is_lake(sink):
        for job in jobs:
            yield result_or_failure(tries, apply_table, job, sink, hash_key)
        return
    # here, because it imports the driver of a database, which other targets do not need
    from walmere.apply.transaction import apply_batch  # noqa: PLC0415

    done = result_or_failure(tries, apply_batch, jobs, pickle.loads(batch), sink)  # noqa: S301
    yield from [done] if isinstance(done, Failure) else done
