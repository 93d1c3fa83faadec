"""`Subscription`: the commands as methods. `walmere.cli` calls them.

    from walmere import Subscription

    shop = Subscription("walmere.toml")
    shop.run(once=True)
    assert shop.verify().equal

A method returns when it is done. It raises a `WalmereError` that says what was being done, what went wrong and what to
do. `stop` ends `run` and `receive` from another thread or a signal handler. Spark is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from walmere import config as configuration
from walmere import paths
from walmere.config import Config, PostgresTarget
from walmere.errors import (
    ChangeLogError,
    ChangeLogInUse,
    ConfigError,
    NotCompared,
    Paused,
    StoreUnavailable,
    WalmereError,
)
from walmere.libpq import check_dsn
from walmere.lsn import INVALID_LSN, Lsn
from walmere.names import TableName
from walmere.storage import Lock, read_error

# A method imports what it alone needs: the receiver and `walmere status` are started often, and must start fast.
if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from walmere.changelog.reader import LoggedTransaction
    from walmere.object_store import ObjectStore
    from walmere.publisher.finding import Finding
    from walmere.reads.lake import Lake
    from walmere.running import OnProgress
    from walmere.sinks.base import Sink
    from walmere.spark.apply import OnBatchEnd
    from walmere.subscription.advice import Advice
    from walmere.subscription.launcher import Launcher, OnRetry
    from walmere.subscription.receiver import Receiver
    from walmere.verify.proof import Proof, Verdict, VerifyOptions


_log = logging.getLogger(__name__)


class Subscription:
    """A subscription, by its configuration file."""

    def __init__(self, file: str | Path) -> None:
        """Read the configuration. Raises ConfigError if it is not usable. Starts nothing."""
        self.file = Path(file)
        self.config: Config = configuration.load(self.file)
        check_dsn(self.config.source)
        if isinstance(self.config.target, PostgresTarget):
            check_dsn(self.config.target)
        self._worker: Receiver | Launcher | None = None
        self._works = False  # whether `run` or `receive` is running
        self._stopping = threading.Event()  # ends it, or the next one
        self._stops = 0  # calls of `stop`: each ends the iterators of `transactions` that there are
        self._followers = 0

    @property
    def directory(self) -> Path:
        """The directory of its state: change log, tables, ledger."""
        return self.config.subscription.directory

    @property
    def running(self) -> bool:
        """Whether this process or another one runs it."""
        return Lock.holder(self.directory / paths.RUN) is not None

    @property
    def paused(self) -> bool:
        """Whether it is paused. Raises StoreError if its store does not answer."""
        from walmere.subscription.shared.store import is_paused

        return is_paused(self.config)

    def pause(self) -> None:
        """Copy and apply nothing until `resume`, also after a restart. The receiver goes on: no WAL piles up.

        A batch that is being applied is completed; a copy that is running is cancelled, and starts again later.
        """
        from walmere.subscription.shared.store import set_paused

        require_usable(self.directory)
        set_paused(self.config, True)

    def resume(self) -> None:
        """Continue after `pause`."""
        from walmere.subscription.shared.store import set_paused

        set_paused(self.config, False)

    def _require_not_paused(self, doing: str) -> None:
        """Raise Paused: what is to be done would wait until it is resumed."""
        with contextlib.suppress(StoreUnavailable):  # what is done next will tell
            if self.paused:
                raise Paused(doing, "the subscription is paused", "`walmere resume` first")

    def check(self) -> list[Finding]:
        """Check the source and this machine. Each problem and warning comes with its fix."""
        from walmere.subscription.checks.subscriber import check

        def require_java() -> None:
            from walmere.spark.jvm import require_java

            require_java()

        return check(self.config, require_java, self._sink(), on_cluster=self._on_cluster())

    def _on_cluster(self) -> bool:
        """Whether `run` would run its tasks on other machines."""
        from walmere.spark.interpreters import is_local
        from walmere.spark.session import master_of

        return self.config.target is not None and not is_local(master_of(self.config.spark.master))

    def _sink(self) -> Sink | None:
        return None if self.config.target is None else self._open_sink()

    def _open_sink(self) -> Sink:
        from walmere.subscription.target.sink import sink_of

        return sink_of(self.config, self.file)

    def status(self) -> dict[str, Any]:
        """Positions of the source and of the subscription, lag, and the state of the tables."""
        from walmere.subscription.status import status

        return status(self.config, self._open_sink)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """A function that returns what `status` does, for who calls it again and again: it keeps its connection."""
        from walmere.subscription.source_status import SourceReader
        from walmere.subscription.status import status

        open_sink = functools.cache(self._open_sink)
        with closing(SourceReader(self.config)) as reader:
            yield lambda: status(self.config, open_sink, reader)

    def advice(self, status: Mapping[str, Any]) -> list[Advice]:
        """What is wrong by a status, the worst first, and what to do: as `walmere status` and the page show it."""
        from walmere.subscription.advice import Processes, advice

        error = read_error(self.directory / paths.RECEIVER_ERROR)
        return advice(
            status,
            Processes(
                self.file,
                running=self.running,
                has_target=self.config.target is not None,
                receiver_error=None if error is None else str(error),
            ),
        )

    def source_position(self) -> Lsn:
        """The end of the source's WAL: everything that is committed now is before it."""
        from walmere.publisher import catalog
        from walmere.publisher.connect import connect, translate_errors

        doing = translate_errors(self.config.source, "reading the WAL position of the source")
        with doing, closing(connect(self.config.source, "walmere")) as connection:
            return catalog.insert_position(connection)

    def receive(self, until: Lsn | str | None = None, *, once: bool = False) -> Lsn:
        """Receive into the change log until stopped, or until everything before an LSN is durable. Returns the LSN.

        `once`: until everything that the source has committed by now is durable.
        """
        from walmere.subscription.receiver import Receiver

        until = _lsn(until)
        require_usable(self.directory)
        with self._stoppable():
            return self._work(Receiver(self.config), self._until(until, once)) or INVALID_LSN

    def run(
        self,
        until: Lsn | str | None = None,
        *,
        once: bool = False,
        on_progress: OnProgress | None = None,
        on_batch_end: OnBatchEnd = lambda *_: None,
        on_retry: OnRetry = lambda *_: None,
        take_over: bool = False,
        receives: bool = True,
    ) -> None:
        """Copy what is not copied yet, then apply changes, until stopped, or everything before an LSN is applied.

        `once`: until everything that the source has committed by now is applied. `on_progress` is called when a table
        has a new position or phase, `on_batch_end` after each batch that was applied, with its seconds,
        `on_retry` when applying has failed and is retried, with the error.
        `take_over`: take over tables of the target that belong to another subscription; they are copied again.
        `receives`: False if `walmere receive` on another machine writes to the same store.
        """
        until = _lsn(until)
        if not receives and self.config.subscription.store is None:
            wrong = "without a receiver, the changes come from a store, and subscription.store is not set"
            raise ConfigError("running the subscription", wrong, "set subscription.store")
        require_usable(self.directory)
        if (pid := Lock.holder(self.directory / paths.RUN)) is not None:  # before Spark starts, which takes seconds
            doing = f"running the subscription in {self.directory}"
            raise ChangeLogInUse(doing, f"process {pid} runs it already", f"stop process {pid} first")
        from walmere.subscription.receiver import require_source
        from walmere.subscription.shared.standby import wait_until_free

        if once or until is not None:
            self._require_not_paused("running the subscription up to an LSN")
        with self._stoppable():
            until = self._until(until, once)
            ends = until is not None
            if receives:  # also before Spark starts
                require_source(self.config)
                wait_until_free(self.config, self._stopping, ends=ends)
            if self._stopping.is_set():
                return
            try:
                made = self.launcher(
                    on_progress=on_progress,
                    on_batch_end=on_batch_end,
                    on_retry=on_retry,
                    take_over=take_over,
                    receives=receives,
                    ends=ends,
                )
            except Exception:
                if self._stopping.is_set():  # the signal that stops this process has ended Spark's JVM, too
                    return
                raise
            self._work(made, until)

    def launcher(
        self,
        *,
        on_progress: OnProgress | None = None,
        on_batch_end: OnBatchEnd = lambda *_: None,
        on_retry: OnRetry = lambda *_: None,
        take_over: bool = False,
        receives: bool = True,
        ends: bool = False,
    ) -> Launcher:
        """Return the launcher that `run` runs. Spark is started now or, if the run `ends`, when it is needed."""
        from walmere.running import launcher

        return launcher(
            self.config,
            self.file,
            on_progress=on_progress,
            on_batch_end=on_batch_end,
            on_retry=on_retry,
            take_over=take_over,
            receives=receives,
            ends=ends,
        )

    def refresh(self) -> None:
        """With a store: bring the local copies of the log and the state up to date, if no process here does that."""
        if self.config.subscription.store is not None:
            from walmere.subscription.shared.state import refresh_state
            from walmere.subscription.shared.store import refresh_log

            try:
                refresh_log(self.config)
                refresh_state(self.config)
            except StoreUnavailable as error:
                _log.warning("%s: %s; using the local copy", error.doing, error.wrong)

    def stop(self) -> None:
        """End `run`, `receive` or `transactions(follow=True)` soon; if none is running, end the next call at once.

        Safe in a signal handler.
        """
        self._stops += 1
        if self._works or not self._followers:
            self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    def abandon(self) -> None:
        """Kill the child processes. Call it just before the process exits without cleanup."""
        abandon = getattr(self._worker, "abandon", None)
        if abandon is not None:
            abandon()

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Forget the worker and a call of `stop` at the end, so that the next `run` is not stopped too."""
        self._works = True
        try:
            yield
        finally:
            self._works = False
            self._worker = None
            self._stopping.clear()

    def _work(self, worker: Any, until: Lsn | None) -> Any:
        self._worker = worker
        if self._stopping.is_set():
            worker.stop()
        return worker.run(until)

    def _until(self, until: Lsn | None, once: bool) -> Lsn | None:
        if not once:
            return until
        if until is not None:
            raise ConfigError("reading the arguments", "once and until cannot be given together", "give one")
        return self.source_position()

    def skip(self, lsn: Lsn | str) -> None:
        """Leave out the transaction with this commit LSN, as ALTER SUBSCRIPTION … SKIP."""
        lsn = _lsn(lsn)
        if not isinstance(self.config.target, PostgresTarget):
            raise ConfigError("skipping a transaction", "only a database as the target can skip one")
        if (store := self._store()) is not None:
            from walmere.subscription.shared.requests import Request, SharedRequests

            SharedRequests(store).add(Request(skip=lsn))
            return
        from walmere.subscription.requests import skipping

        skipping.request(self.directory, lsn)

    def transactions(
        self,
        start: Lsn | str = INVALID_LSN,
        table: str | None = None,
        follow: bool | Callable[[], bool] = False,
    ) -> Iterator[LoggedTransaction]:
        """The transactions of the change log that committed at or after an LSN, in commit order, with typed rows.

        `table`: only changes of this table, by name or schema.name. `follow`: at the end, wait for more until
        `stop` is called or, if it is a function, while it returns true. Needs no Spark, and starts no receiver.
        """
        start = _lsn(start)
        if callable(follow):
            return self._transactions(start, table, follow)
        stops = self._stops
        return self._transactions(start, table, lambda: follow and self._stops == stops)

    def _transactions(self, start: Lsn, table: str | None, follow: Callable[[], bool]) -> Iterator[LoggedTransaction]:
        from walmere.changelog.reader import Reader
        from walmere.subscription.logged_types import LoggedTypes

        wanted = (
            None
            if table is None
            else lambda relation: table in (relation.name, f"{relation.namespace}.{relation.name}")
        )
        types = LoggedTypes(self.directory, self.config.source)
        self._followers += 1
        try:
            self.refresh()
            if table is not None:
                self._require_known(table, refuse=not follow())
            with self._following(follow()), Reader(self.config.changelog, types) as reader:
                yield from reader.transactions(start, wanted=wanted, follow=follow)
        finally:
            self._followers -= 1

    def _following(self, follow: bool) -> contextlib.AbstractContextManager[object]:
        """With a store: keep the local log up to date, if no process on this machine does that."""
        if not follow or self.config.subscription.store is None or Lock.holder(self.config.changelog) is not None:
            return contextlib.nullcontext()
        from walmere.subscription.shared.follower import Follower

        return Follower(self.config)

    def _require_known(self, table: str, *, refuse: bool) -> None:
        """Refuse a table that neither the log nor the subscription knows, or only warn: it may be added later."""
        from walmere.changelog.manifest import Manifest
        from walmere.pgoutput.relation import RelationVersion
        from walmere.subscription.tables import Tables

        with Manifest(self.config.changelog) as log:
            versions = [entry.relation for entry in log.entries() if isinstance(entry, RelationVersion)]
        known = {TableName(relation.namespace, relation.name) for relation in versions}
        known |= {state.source_table for state in Tables(self.directory)}
        if any(table in (name.name, str(name)) for name in known):
            return
        names = ", ".join(sorted(map(str, known))) or "none yet"
        error = ConfigError("reading the change log", f"no table is called {table}", f"the tables are {names}")
        if refuse:
            raise error
        _log.warning("%s so far (%s)", error.wrong, error.hint)

    def resync(self, tables: Sequence[str], *, wait: bool = True) -> list[TableName]:
        """Copy tables again, in the running process or, if none is running, in this one. Returns their names.

        Until a new copy is complete, readers see the old one; the other tables go on. Without `wait`, only the request
        is written.
        """
        from walmere.subscription.requests import resync
        from walmere.subscription.shared.requests import Request, SharedRequests
        from walmere.subscription.tables import Tables

        self.refresh()
        store = self._store()
        shared = None if store is None else SharedRequests(store)
        wanted = resync.find(Tables(self.directory), tables)
        if wait:
            self._require_not_paused("copying tables again")
        if shared is None:
            resync.add(self.directory, wanted)
        else:
            if wait:
                self.require_not_elsewhere("copying tables again")
            shared.add(Request(tuple(wanted)))
        if wait and self.running:
            resync.wait(self.directory, wanted, shared)
        elif wait:
            self.run(once=True)
        return wanted

    def require_not_elsewhere(self, doing: str) -> None:
        """With a store: raise if the subscription is running on another machine. A run here would take it over."""
        from walmere.subscription.shared.store import running_elsewhere

        if (where := running_elsewhere(self.config)) is not None:
            hint = "use the command there; or stop it there, and try again"
            raise ChangeLogInUse(doing, f"the subscription is running on another machine: {where}", hint)

    def verify(
        self,
        tables: Sequence[str] = (),
        options: VerifyOptions | None = None,
        *,
        wait: float = 60.0,
        on_progress: Callable[[str, int, int], None] = lambda *_: None,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> Proof:
        """Compare source and target at one LSN, every row and column of these tables, or of all.

        A running process goes on meanwhile; if none is running, this one applies changes up to that LSN. `on_progress`
        is called with a table's name, the number of pieces compared, and the number of all its pieces; `on_verdict`
        with the result of each table. `wait`: seconds to wait for open transactions on the source, and for a running
        process that makes no progress; after that, NotCompared is raised.
        """
        from walmere.verify.run import verify

        self.refresh()
        doing = "looking for a point to compare at"
        self.require_not_elsewhere(doing)
        try:
            self._require_not_paused(doing)
        except Paused as error:
            raise NotCompared(*error.args) from None
        return verify(self, tables, options, wait=wait, on_progress=on_progress, on_verdict=on_verdict)

    def lake(self) -> Lake:
        """Its lake, to read tables as of one LSN. Raises ConfigError if it has no target."""
        from walmere.reads.lake import configured

        return configured(self.file)

    def session(self) -> SparkSession:
        """The Spark session of `run` and `verify`: the active one of this process, or a new one."""
        from walmere.running import spark

        return spark(self.config)

    def drop(self, *, keep_slot: bool = False) -> list[str]:
        """Drop the replication slot, and delete the change log and all state. Returns one line for each thing done.

        The target's tables stay as they are; a database loses what Walmere has stored in its own schema.
        `keep_slot`: do not connect to the source, because it or the slot is gone.
        """
        from walmere.sinks.postgres.sink import PostgresSink

        if self.config.subscription.store is not None:
            from walmere.subscription.shared.store import require_own

            require_own(self.config)
        changelog = self.config.changelog
        lock = Lock(changelog) if changelog.exists() else None
        try:
            done = [f"kept slot {self.config.source.slot}" if keep_slot else self._drop_slot()]
            target = self._sink()
            if isinstance(target, PostgresSink):
                done += target.drop()
        except WalmereError:
            if lock is not None:
                lock.close()
            raise
        if (store := self._store()) is not None:
            from walmere.subscription.shared.store import delete_all

            done.append(f"deleted {delete_all(store)} objects in {store.url}")
        # renamed first: a receiver that starts now creates a new log, which must not be deleted
        dropped = changelog.with_suffix(".dropped")
        _delete(dropped)
        if lock is None and self.running:
            return [*done, f"there is no change log in {self.directory}"]
        if lock is not None:
            changelog.rename(dropped)
        for name in paths.FILES:
            (self.directory / name).unlink(missing_ok=True)
        for name in paths.DIRECTORIES:
            _delete(self.directory / name)
        _delete(dropped)
        if lock is None:
            return [*done, f"there is no change log in {self.directory}"]
        lock.close()
        with contextlib.suppress(OSError):
            self.directory.rmdir()  # if nothing else is in it
        return [*done, f"deleted the change log in {self.directory}"]

    def _store(self) -> ObjectStore | None:
        if self.config.subscription.store is None:
            return None
        from walmere.subscription.shared.store import store_of_config

        return store_of_config(self.config)

    def _drop_slot(self) -> str:
        from walmere.publisher import slot
        from walmere.publisher.connect import connect, translate_errors

        source = self.config.source
        with closing(connect(source, "walmere drop")) as connection:
            with translate_errors(source, f"reading replication slot {source.slot}"):
                found = slot.read(connection, source.slot)
            if found is None:
                return f"there is no slot {source.slot} on the source"
            slot.require_ours(found, connection.info.dbname)
        with closing(connect(source, "walmere drop", replication=True)) as connection:
            slot.drop(connection, source)
        return f"dropped slot {source.slot}"


@overload
def _lsn(lsn: Lsn | str) -> Lsn: ...
@overload
def _lsn(lsn: Lsn | str | None) -> Lsn | None: ...
def _lsn(lsn: Lsn | str | None) -> Lsn | None:
    """An argument that may be text. Raises ConfigError."""
    try:
        return None if lsn is None else Lsn(lsn)
    except (ValueError, TypeError) as error:
        raise ConfigError("reading the arguments", str(error)) from None


def _delete(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def require_usable(directory: Path) -> None:
    """Refuse a directory that cannot be created or written to, before anything is started. Creates nothing."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    wrong = (
        "is not a directory"
        if not place.is_dir()
        else "cannot be written to"
        if not os.access(place, os.W_OK | os.X_OK)
        else None
    )
    if wrong is not None:
        hint = "correct subscription.directory, or make it writable"
        raise ChangeLogError(f"opening subscription.directory {directory}", f"{place} {wrong}", hint)
