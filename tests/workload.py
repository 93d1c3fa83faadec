"""A load of mixed transactions, and what the source itself says that was committed."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import replace
from types import TracebackType

import psycopg

from conftest import Database
from walmere.changelog.assembly import HEARTBEAT
from walmere.changelog.reader import Reader
from walmere.config import Config
from walmere.lsn import Lsn
from walmere.pgoutput import messages as m
from walmere.pgoutput.decode import decode

Spoken = list[tuple[int, int, list[m.Message]]]


class MixedLoad:
    """Writers that commit, roll back, use savepoints, and now and then write enough to be streamed."""

    TABLES = ("accounts", "ledger", "notes")

    def __init__(self, database: Database, seed: int, writers: int = 3, pause: float = 0.05) -> None:
        """`pause`: the longest time between two transactions of a writer, in seconds."""
        self._database = database
        self._pause = pause
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(seed + number,)) for number in range(writers)]
        self.failures: list[BaseException] = []

    @staticmethod
    def create(database: Database, amount: str = "numeric") -> None:
        """`amount`: the type of amounts."""
        database.execute(
            f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
            f"CREATE TABLE accounts (id int PRIMARY KEY, balance {amount})",
            f"CREATE TABLE ledger (id serial PRIMARY KEY, account int, amount {amount}, note text)",
            "CREATE TABLE notes (id int, body text)",
            "ALTER TABLE notes REPLICA IDENTITY FULL",
            "INSERT INTO accounts SELECT i, 100 FROM generate_series(1, 100) i",
            "CREATE PUBLICATION pub FOR TABLE accounts, ledger, notes",
        )

    def __enter__(self) -> MixedLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if kind is None and self.failures:
            raise self.failures[0]

    def _write(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(self._database.dsn) as connection:
                while not self._stopping.wait(rng.uniform(0, self._pause)):
                    with contextlib.suppress(psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable):
                        self._transaction(connection, rng)
                    if rng.random() < 0.1:
                        connection.rollback()
                    else:
                        connection.commit()
        except BaseException as error:
            self.failures.append(error)
            raise

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]], rng: random.Random) -> None:
        for _ in range(rng.randint(1, 4)):
            account = rng.randint(1, 100)
            match rng.randrange(10):
                case 0 | 1 | 2:
                    connection.execute("INSERT INTO ledger (account, amount) VALUES (%s, 1)", [account])
                case 3 | 4:
                    connection.execute("UPDATE accounts SET balance = balance + 1 WHERE id = %s", [account])
                case 5:
                    connection.execute("DELETE FROM ledger WHERE id IN (SELECT min(id) FROM ledger)")
                case 6:
                    connection.execute("INSERT INTO notes VALUES (%s, md5(%s::text))", [account, account])
                    connection.execute("UPDATE notes SET id = id + 1 WHERE id = %s", [account])
                case 7:
                    connection.execute("SAVEPOINT s")
                    connection.execute(
                        "INSERT INTO notes SELECT i, 'gone' FROM generate_series(1, %s) i", [rng.randint(1, 900)]
                    )
                    connection.execute("ROLLBACK TO SAVEPOINT s")
                case 8:
                    connection.execute(
                        "INSERT INTO ledger (account, amount, note)"
                        " SELECT %s, i, md5(i::text) FROM generate_series(1, %s) i",
                        [account, rng.choice([10, 2000])],
                    )
                case 9:
                    connection.execute("SELECT pg_logical_emit_message(%s, 'load', 'x')", [rng.random() < 0.5])
                    if rng.random() < 0.05:
                        connection.execute("SET LOCAL lock_timeout = '100ms'")
                        connection.execute("TRUNCATE notes")


class Transfers:
    """Moves amounts from rows of one table to rows of the other: their sum is always the same."""

    TOTAL = 2 * 20 * 1000
    TABLES = ("giro", "savings")

    def __init__(self, database: Database, pause: float = 0.003) -> None:
        self._database = database
        self._pause = pause
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._transfer)

    @staticmethod
    def create(database: Database, publication: str = "pub") -> None:
        for table in Transfers.TABLES:
            database.execute(
                f"CREATE TABLE {table} (id int PRIMARY KEY, amount bigint)",
                f"INSERT INTO {table} SELECT i, 1000 FROM generate_series(1, 20) i",
            )
        database.execute(f"CREATE PUBLICATION {publication} FOR TABLE giro, savings")

    def _transfer(self) -> None:
        rng = random.Random(8)
        with psycopg.connect(self._database.dsn) as connection:
            while not self._stopping.wait(self._pause):
                tables = rng.sample(Transfers.TABLES, 2)
                for table, amount in zip(tables, (-7, 7), strict=True):
                    connection.execute(
                        f"UPDATE {table} SET amount = amount + %s WHERE id = %s", [amount, rng.randint(1, 20)]
                    )
                connection.commit()

    def __enter__(self) -> Transfers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def source_says(database: Database, slot: str) -> Spoken:
    """Every committed transaction, in commit order, as the server itself decodes it from another slot."""
    spoken: Spoken = []
    for lsn, data in database.rows(
        "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub', 'messages', 'true')",
        slot,
    ):
        match message := decode(data):
            case m.Begin():
                spoken.append((message.xid, message.final_lsn, []))
            case m.LogicalMessage(prefix=prefix) if prefix == HEARTBEAT:
                pass  # a receiver's own: the log only takes its position from it
            case m.LogicalMessage(transactional=False):
                # its LSN is where its record ends; the log has a position inside the record
                spoken.append((0, Lsn(message.lsn - 1), [message]))
            case m.Insert() | m.Update() | m.Delete() | m.Truncate() | m.LogicalMessage():
                spoken[-1][2].append(message)
            case m.Commit() | m.Relation() | m.Type() | m.Origin():
                pass
            case _:
                raise AssertionError((lsn, message))
    return [transaction for transaction in spoken if transaction[2]]  # PostgreSQL 14 sends empty ones, too


def log_says(config: Config) -> Spoken:
    """The same from the change log. A streamed transaction of which nothing is left is not counted by the server."""
    with Reader(config.changelog) as reader:
        spoken = [
            (t.xid, t.commit_lsn, [_outside_stream(change.message) for change in t.changes])
            for t in reader.transactions()
        ]
    return [transaction for transaction in spoken if transaction[2]]


def _outside_stream(message: m.Insert | m.Update | m.Delete | m.Truncate | m.LogicalMessage) -> m.Message:
    """The message as it would be if its transaction had not been streamed."""
    return replace(message, xid=None)
