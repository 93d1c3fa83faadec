"""The workload: two writers, each with its own half of the keys, so that they never wait for each other.

A writer runs one transaction after the other at a constant rate. The kind of each is random, with a fixed seed. They
cover what is difficult for replication: keys that change (with unchanged TOASTed values, with ON UPDATE CASCADE), rows
that move to another partition, deletes, transactions that are rolled back, and one TRUNCATE with inserts after it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import Final

from walmere.config import Source
from walmere.demo.shop import Sizes
from walmere.errors import WalmereError
from walmere.publisher.connect import Connection, connect, translate_errors

WRITERS: Final = 2
RATE: Final = 125.0
"""Transactions per second of each writer, if the machine is fast enough."""
_FRESH: Final = 10_000_000
_SEED: Final = 18


class LoadWriter(threading.Thread):
    """A writer, with its own connection."""

    def __init__(self, number: int, source: Source, sizes: Sizes, truncate_after: float, stopping: threading.Event):
        super().__init__(name=f"writer {number}", daemon=True)
        self.done: Counter[str] = Counter()
        self.error: WalmereError | None = None
        self._number = number
        self._source = source
        self._stopping = stopping
        self._truncate_after = truncate_after
        self._random = random.Random(_SEED + number)  # noqa: S311
        self._fresh = itertools.count(_FRESH + number, WRITERS)
        self._customers = list(range(1 + number, sizes.customers + 1, WRITERS))
        self._orders = list(range(1 + number, sizes.orders + 1, WRITERS))
        self._skus = [f"P{i:05}" for i in range(1 + number, sizes.products + 1, WRITERS)]
        self._carts: list[uuid.UUID] = []
        self._kinds: dict[Callable[[Connection], None], int] = {
            self._order: 30,
            self._status: 25,
            self._stock: 8,
            self._profile: 8,
            self._cart: 12,
            self._forget_cart: 3,
            self._send_elsewhere: 5,
            self._renumber_order: 2,
            self._renumber_customer: 1,
            self._rename_product: 1,
            self._cancel: 4,
            self._change_of_mind: 1,
        }

    def run(self) -> None:
        """Write until `stopping` is set."""
        try:
            with (
                closing(connect(self._source, self.name)) as connection,
                translate_errors(self._source, "writing to the shop"),
            ):
                connection.execute("SET search_path = public")
                self._write(connection)
        except WalmereError as error:
            self.error = error

    def _write(self, connection: Connection) -> None:
        kinds, weights = list(self._kinds), list(self._kinds.values())
        begin = due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due = max(due + 1 / RATE, time.monotonic() - 1)  # after a delay, catch up by one second at most
            [kind] = self._random.choices(kinds, weights)
            if self._number == 0 and not self.done["truncate"] and time.monotonic() - begin >= self._truncate_after:
                kind = self._truncate
            with connection.pipeline():
                if kind == self._change_of_mind:
                    kind(connection)
                else:
                    with connection.transaction():
                        kind(connection)
            self.done[kind.__name__.strip("_")] += 1

    def _one(self, of: list[int]) -> int:
        return self._random.choice(of)

    def _take(self, of: list[int]) -> int:
        """Remove and return a random element."""
        index = self._random.randrange(len(of))
        of[index], of[-1] = of[-1], of[index]
        return of.pop()

    def _order(self, connection: Connection) -> None:
        order, dice = next(self._fresh), self._random.random()
        if dice < 0.3:
            customer = next(self._fresh)
            connection.execute(
                "INSERT INTO customers VALUES (%s, %s, %s, %s, current_date, %s)",
                [customer, f"new{customer}@example.com", f"New {customer}", '{"points": 0}', dice < 0.1],
            )
            self._customers.append(customer)
        connection.execute(
            "INSERT INTO orders VALUES (%s, %s, 'placed', 0, clock_timestamp(), NULL)",
            [order, self._one(self._customers)],
        )
        for line in range(1, self._random.randint(1, 4)):
            price, quantity = self._random.randint(100, 9999) / 100, self._random.randint(1, 5)
            connection.execute(
                "INSERT INTO order_lines VALUES (%s, %s, %s, %s, %s::numeric)",
                [order, line, self._random.choice(self._skus), quantity, f"{price:.2f}"],
            )
        connection.execute(
            "UPDATE orders SET total = (SELECT coalesce(sum(quantity * price), 0) FROM order_lines WHERE order_id = id)"
            " WHERE id = %s",
            [order],
        )
        region = self._random.choice(("north", "south", "east"))
        connection.execute("INSERT INTO deliveries VALUES (%s, %s, localtimestamp, NULL)", [order, region])
        self._orders.append(order)

    def _status(self, connection: Connection) -> None:
        orders = [self._one(self._orders) for _ in range(3)]
        status = self._random.choice(("paid", "packed", "shipped", "returned"))
        connection.execute("UPDATE orders SET status = %s WHERE id = ANY(%s)", [status, orders])

    def _stock(self, connection: Connection) -> None:
        connection.execute(
            "UPDATE products SET attributes = jsonb_set(attributes, '{stock}', %s::text::jsonb), price = price + 0.01"
            " WHERE sku = %s",
            [str(self._random.randint(0, 99)), self._random.choice(self._skus)],
        )

    def _profile(self, connection: Connection) -> None:
        customer = self._one(self._customers)
        connection.execute(
            """UPDATE customers SET profile = profile || jsonb_build_object('seen', %s::int, 'city', 'Späti "7"')"""
            " WHERE id = %s",
            [self._random.randint(0, 10**6), customer],
        )

    def _cart(self, connection: Connection) -> None:
        cart = uuid.UUID(int=self._random.getrandbits(128), version=4)
        connection.execute(
            "INSERT INTO carts VALUES (%s, %s, %s, 0)", [cart, self._one(self._customers), [self._skus[0], "a, \\b"]]
        )
        self._carts.append(cart)
        connection.execute(
            "UPDATE carts SET skus = skus || %s::text, total = total + 1 / 7.0 WHERE id = %s",
            [self._random.choice(self._skus), self._random.choice(self._carts[-20:])],
        )

    def _forget_cart(self, connection: Connection) -> None:
        if self._carts:
            connection.execute("DELETE FROM carts WHERE id = %s", [self._carts.pop()])

    def _send_elsewhere(self, connection: Connection) -> None:
        connection.execute(
            "UPDATE deliveries SET region = CASE region WHEN 'north' THEN 'south' WHEN 'south' THEN 'east'"
            " ELSE 'north' END WHERE order_id = %s",
            [self._one(self._orders)],
        )

    def _renumber_order(self, connection: Connection) -> None:
        old, new = self._take(self._orders), next(self._fresh)
        connection.execute("UPDATE orders SET id = %s WHERE id = %s", [new, old])
        connection.execute("UPDATE deliveries SET order_id = %s WHERE order_id = %s", [new, old])
        self._orders.append(new)

    def _renumber_customer(self, connection: Connection) -> None:
        old, new = self._take(self._customers), next(self._fresh)
        connection.execute("UPDATE customers SET id = %s WHERE id = %s", [new, old])
        self._customers.append(new)

    def _rename_product(self, connection: Connection) -> None:
        index = self._random.randrange(len(self._skus))
        old = self._skus[index]
        new = f"{old.partition('.')[0]}.{next(self._fresh)}"
        connection.execute("UPDATE products SET sku = %s WHERE sku = %s", [new, old])
        self._skus[index] = new

    def _cancel(self, connection: Connection) -> None:
        order = self._take(self._orders)
        connection.execute("DELETE FROM orders WHERE id = %s", [order])
        connection.execute("DELETE FROM deliveries WHERE order_id = %s", [order])

    def _change_of_mind(self, connection: Connection) -> None:
        with connection.transaction(force_rollback=True):
            connection.execute("DELETE FROM orders WHERE id = %s", [self._one(self._orders)])

    def _truncate(self, connection: Connection) -> None:
        connection.execute("TRUNCATE carts")
        self._carts.clear()
        self._cart(connection)


class Writers:
    """All writers. They run while the context is open."""

    def __init__(self, source: Source, sizes: Sizes, truncate_after: float) -> None:
        self._stopping = threading.Event()
        self._writers = [LoadWriter(number, source, sizes, truncate_after, self._stopping) for number in range(WRITERS)]

    def __enter__(self) -> Writers:
        for writer in self._writers:
            writer.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stopping.set()
        for writer in self._writers:
            writer.join(10)

    @property
    def done(self) -> Counter[str]:
        """The number of transactions by kind."""
        return sum((writer.done for writer in self._writers), Counter())

    def check(self) -> None:
        """Raise the error of a writer that has failed."""
        for writer in self._writers:
            if writer.error is not None:
                raise writer.error
