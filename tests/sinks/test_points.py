"""What every sink says of itself: which versions of its tables belong together, for whoever reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sinks.conftest import Target
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.names import TableName


def point(lsn: int, **versions: int) -> Entry:
    return Entry(Lsn(lsn), lsn * 1_000_000, {f"public.{name}": version for name, version in versions.items()})


@pytest.mark.parametrize("name", ["shop", "Der Laden/…", "_delta_log", "."])
def test_points_are_published_one_after_the_other(target: Target, name: str) -> None:
    publisher = target.sink.open_ledger(name, [])
    assert target.newest(name) is None
    published = [point(1, a=1), point(2, a=2, b=1), point(2, a=2, b=2), point(3, b=2)]
    for number, each in enumerate(published, 1):
        publisher.append(each)
        assert target.newest(name) == each
        assert target.points(name) == published[:number]


def test_names_of_tables_are_published_as_they_are(target: Target) -> None:
    names = [str(TableName(*name)) for name in (("a.b", "c"), ("a", "b.c"), ("a", 'say "x"'), ("_walmere", "shop"))]
    each = Entry(Lsn(1), None, {name: number for number, name in enumerate(names)})
    target.sink.open_ledger("shop", []).append(each)
    assert (target.newest("shop"), target.points("shop")) == (each, [each])
    assert [str(TableName.parse(name)) for name in names] == names


def test_a_run_puts_right_what_was_published_before(target: Target) -> None:
    first = target.sink.open_ledger("shop", [])
    for each in (point(1, a=1), point(2, a=2)):
        first.append(each)
    known = [point(1, a=1), point(2, a=2), point(3, a=3)]  # a crash came between the ledger and this
    second = target.again().open_ledger("shop", known)
    assert (target.newest("shop"), target.points("shop")) == (known[-1], known)
    second.append(point(4, a=4))
    assert target.points("shop") == [*known, point(4, a=4)]
    third = target.again().open_ledger("shop", [])  # it begins anew, perhaps with another source
    assert target.newest("shop") == point(4, a=4), "readers have what there is until there is more"
    third.append(point(1, a=7))
    assert (target.newest("shop"), target.points("shop")) == (point(1, a=7), [point(1, a=7)])


def test_two_subscriptions_do_not_mix(target: Target) -> None:
    one, other = target.sink.open_ledger("one", []), target.sink.open_ledger("other", [])
    one.append(point(1, a=1))
    other.append(point(9, b=9))
    assert (target.newest("one"), target.newest("other")) == (point(1, a=1), point(9, b=9))


def test_readers_have_one_point_or_another_and_never_a_mixture(target: Target) -> None:
    def wider(number: int) -> Entry:  # than the one before: part of it would not do
        return point(number, **{f"t{table}": number for table in range(number)})

    publisher = target.sink.open_ledger("shop", [wider(1)])

    def publish() -> None:
        for number in range(2, 100):
            publisher.append(wider(number))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(publish)
        last = 0
        while not writing.done():
            newest = target.newest("shop")
            assert newest is not None
            assert newest == wider(newest.lsn)
            assert newest in target.points("shop")
            assert newest.lsn >= last
            last = newest.lsn
        writing.result()
