"""Vacuum: versions that can be read stay, and everything else goes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import walmere
from sinks.histories import rows_of
from sinks.upkeep import (
    ALL,
    BY_ID,
    TABLE,
    TRUNCATE,
    begin,
    content,
    delete,
    do,
    files,
    insert,
    on_disk,
    rewritten,
    rows,
    update,
)
from walmere.errors import OwnedByAnother, SinkMismatch
from walmere.ledger.entry import Entry
from walmere.lsn import Lsn
from walmere.owner import Owner
from walmere.sinks.delta import maintenance
from walmere.sinks.delta.files.vectors import DIRECTORY
from walmere.sinks.delta.log import commit, history, replay
from walmere.sinks.delta.sink import DeltaSink


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), index=str(tmp_path / "index"))


class Clock:
    """The time that commits and vacuum see."""

    def __init__(self) -> None:
        self.now = time.time() - 6 * 3600

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(commit, "time", found)
    monkeypatch.setattr(history, "time", found)
    monkeypatch.setattr(maintenance, "time", found)
    return found


def needed(sink: DeltaSink, versions: set[int]) -> set[str]:
    """The data files and vector files of some versions, as the log has them."""
    names = set()
    for version in versions:
        for file in replay.at(sink.directory(TABLE), version).files:
            names |= maintenance._names(file)
    return names


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), keep=st.sampled_from([0, 600, 3600]))
def test_vacuum_deletes_what_no_version_that_can_be_read_needs_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keep: int
) -> None:
    path = tmp_path_factory.mktemp("vacuum")
    sink = DeltaSink(str(path / "lake"), index=str(path / "index"), keep_seconds=keep)
    clock, checkpoint = Clock(), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "time", clock)
        patch.setattr(history, "time", clock)
        patch.setattr(maintenance, "time", clock)
        begin(sink, rows(*range(2000)), rows(*range(2000, 2010)))
        committed = {0: clock.now, 1: clock.now}
        expected = {1: content(sink)}
        for _ in range(data.draw(st.integers(3, 9))):
            clock.now += data.draw(st.sampled_from([1, 100, 500, 1800, 4000]))
            match data.draw(st.sampled_from(["many", "few", "upkeep", "truncate", "restore", "vacuum", "checkpoint"])):
                case "many":  # its vector is in a file, and is replaced by the next one
                    do(sink, *(delete(key) for key in data.draw(st.sets(st.integers(0, 1999), min_size=150))))
                case "few":
                    do(sink, update(2001, 1), insert(9000 + sink.version(TABLE)))
                case "upkeep":
                    sink.optimize(TABLE, BY_ID, ALL)
                case "truncate":
                    do(sink, TRUNCATE, *(insert(key) for key in range(1000)))
                case "restore":
                    older = range(1, sink.version(TABLE))
                    if readable := [each for each in older if committed[each + 1] > clock.now - keep]:
                        DeltaTable(sink.location(TABLE)).restore(data.draw(st.sampled_from(readable)))
                        now_as_seen_by_deltalake(sink, clock)
                case "checkpoint":
                    checkpoint = True
                    DeltaTable(sink.location(TABLE)).create_checkpoint()
                case "vacuum":
                    sink.vacuum(TABLE)
            version = sink.version(TABLE)
            for each in range(max(committed) + 1, version + 1):
                committed[each] = clock.now
            expected[version] = content(sink)
        sink.vacuum(TABLE)
        after = on_disk(sink) | {f"{DIRECTORY}/{name}" for name in on_disk(sink, DIRECTORY)}
    newest = max(committed)
    margin = 60 if keep else 0
    readable_versions = {v for v in committed if v == newest or committed[v + 1] > clock.now - keep - margin}
    for version in readable_versions & set(expected):
        assert content(sink, version) == expected[version]
    assert needed(sink, readable_versions) <= after
    if not checkpoint:  # deltalake drops tombstones by its own clock: these files are deleted after days
        assert needed(sink, readable_versions) == after


def now_as_seen_by_deltalake(sink: DeltaSink, clock: Clock) -> None:
    """deltalake has its own clock: set the time of what it has removed."""
    version = DeltaTable(sink.location(TABLE)).version()
    path = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "remove" in line:
            line["remove"]["deletionTimestamp"] = clock.time_ns() // 1_000_000
    path.write_text("\n".join(map(json.dumps, lines)))


def test_vacuum_deletes_all_files_that_were_replaced_longer_ago_than_they_are_kept(
    sink: DeltaSink, clock: Clock
) -> None:
    sink = replace(sink, keep_seconds=600)
    begin(sink, rows(*range(2000)))
    for number in range(5):  # the vector of one file is replaced many times
        do(sink, *(delete(key) for key in range(number, 2000, 6)))
        clock.now += 100
    assert len(on_disk(sink, DIRECTORY)) == 5
    [file] = sink.current(TABLE).files
    kept = {version: content(sink, version) for version in range(1, 7)}
    sink.vacuum(TABLE)
    assert len(on_disk(sink, DIRECTORY)) == 5, "all versions can be read"
    assert all(content(sink, version) == kept[version] for version in kept)
    clock.now += 360  # the first version that has a vector was replaced 760 s ago, the second 660 s, the third 560 s
    sink.vacuum(TABLE)
    assert len(on_disk(sink, DIRECTORY)) == 3 + 0
    assert all(content(sink, version) == kept[version] for version in (4, 5, 6))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 650
    sink.vacuum(TABLE)
    assert file.name in on_disk(sink), "60 s longer than they are kept"
    assert content(sink, 6) == kept[6]
    clock.now += 11
    sink.vacuum(TABLE)
    assert (on_disk(sink, DIRECTORY), on_disk(sink)) == (set(), files(sink))
    assert content(sink) == kept[6]


def test_vacuum_keeps_the_newest_point_of_every_subscription_however_old_it_is(sink: DeltaSink, clock: Clock) -> None:
    """A table that was copied is ahead of the others: no point is made until these have caught up."""
    sink = replace(sink, keep_seconds=600)
    begin(sink, rows(*range(2000)))
    for name in ("shop", "other"):
        do(sink, *(delete(key) for key in range(len(name), 2000, 6)))
        sink.open_ledger(name, [Entry(Lsn(1), None, {str(TABLE): sink.version(TABLE)})])
    expected = {name: content(sink, sink.points(name)[-1].versions[str(TABLE)]) for name in ("shop", "other")}
    do(sink, *(delete(key) for key in range(0, 2000, 6)))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 3600
    do(sink, *(delete(key) for key in range(1, 2000, 6)))
    clock.now += 3600
    sink.vacuum(TABLE)
    for name in ("shop", "other"):
        assert sorted(rows_of(walmere.lake(sink.path, name).latest().arrow("t"))) == expected[name]
        sink.open_ledger(name, [Entry(Lsn(2), None, {str(TABLE): sink.version(TABLE)})])
    sink.vacuum(TABLE)
    assert on_disk(sink) == files(sink)
    assert len(on_disk(sink, DIRECTORY)) == 1


def test_vacuum_keeps_all_points_that_must_be_readable_also_if_their_files_were_replaced_long_before(
    sink: DeltaSink, clock: Clock
) -> None:
    """A batch is committed to this table, and not to another. Two hours later it is repeated, and makes the point."""
    sink = replace(sink, keep_seconds=3600)
    begin(sink, rows(*range(2000)))

    def point(lsn: int) -> Entry:
        return Entry(Lsn(lsn), None, {str(TABLE): sink.version(TABLE)}, int(clock.now * 1e6))

    ledger = sink.open_ledger("shop", [point(100)])
    before = sink.version(TABLE)
    expected = content(sink)
    clock.now += 60
    do(sink, *(delete(key) for key in range(0, 2000, 3)))
    sink.optimize(TABLE, BY_ID, ALL)
    clock.now += 7200
    ledger.append(point(200))
    sink.vacuum(TABLE)
    assert content(sink, before) == expected
    clock.now += 3500
    sink.vacuum(TABLE)
    assert content(sink, before) == expected
    clock.now += 200
    sink.vacuum(TABLE)
    assert on_disk(sink) == files(sink), "the first point is too old now"


def test_upkeep_leaves_a_table_alone_that_another_subscription_has_taken_over(sink: DeltaSink) -> None:
    sink = sink.owned_by(Owner("shop", "1", 1))
    begin(sink, *(rows(number) for number in range(10)))
    done = rewritten(sink)
    other = sink.owned_by(Owner("other", "1", 1), take_over=True)
    other.claim(TABLE)
    version = other.version(TABLE)
    with pytest.raises(OwnedByAnother):
        sink.replace_files(TABLE, done)
    with pytest.raises(OwnedByAnother):
        sink.vacuum(TABLE)
    assert sink.version(TABLE) == version


def test_one_vector_file_of_several_data_files_stays_as_long_as_one_of_them_needs_it(
    sink: DeltaSink, clock: Clock
) -> None:
    sink = replace(sink, keep_seconds=0)
    begin(sink, rows(*range(2000)), rows(*range(2000, 4000)))
    do(sink, *(delete(key) for key in range(0, 4000, 3)))
    [shared] = on_disk(sink, DIRECTORY)
    clock.now += 1
    do(sink, *(delete(key) for key in range(1, 2000, 3)))  # the first data file only
    clock.now += 1
    expected = content(sink)
    sink.vacuum(TABLE)
    assert shared in on_disk(sink, DIRECTORY)
    assert content(sink) == expected


def test_staged_files_that_were_never_committed_are_deleted_after_days(sink: DeltaSink) -> None:
    sink = replace(sink, keep_seconds=0)
    begin(sink, rows(*range(2000)))
    orphan, late = (sink.stage(TABLE, rows(key).to_batches())[0].path for key in (1, 2))
    do(sink, *(delete(key) for key in range(0, 2000, 3)))
    lost = Path(sink.location(TABLE), DIRECTORY, "deletion_vector_of_a_killed_task.bin")
    lost.write_bytes(b"\1")
    others = [Path(sink.location(TABLE), name) for name in ("_SUCCESS", "_of_another_program")]
    temporary = Path(sink.location(TABLE), "_delta_log", ".0123.tmp")
    for path in (*others, temporary):
        path.touch()
    week, day = 7 * 86_400, 86_400
    in_use = [Path(sink.location(TABLE), name) for name in files(sink)]
    in_use += list(Path(sink.location(TABLE), "_delta_log").glob("*.json"))
    old = [Path(sink.location(TABLE), orphan), lost, *others, temporary, *in_use]
    for path in old:
        os.utime(path, (time.time() - week + day,) * 2)
    sink.vacuum(TABLE)
    assert all(path.exists() for path in old)
    for path in old:
        os.utime(path, (time.time() - week - 10,) * 2)
    replace(sink, keep_seconds=10 * day).vacuum(TABLE)
    assert all(path.exists() for path in old if path != temporary), "versions are kept for longer"
    sink.vacuum(TABLE)
    assert [path.exists() for path in old] == [False, False, True, True, False, *(True for _ in in_use)]
    assert Path(sink.location(TABLE), late).exists()
    assert content(sink) == [(key, 0) for key in range(2000) if key % 3]


def test_old_files_stay_if_the_log_may_have_forgotten_that_they_were_removed_lately(sink: DeltaSink) -> None:
    """Another program has shortened the retention of tombstones, and a checkpoint has dropped them."""
    begin(sink, rows(*range(10)))
    [old] = files(sink)
    os.utime(Path(sink.location(TABLE), old), (time.time() - 30 * 86_400,) * 2)
    version = sink.version(TABLE)
    do(sink, *(update(key, 1) for key in range(10)))
    sink.open(TABLE).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 hours"})
    sink.open(TABLE).create_checkpoint()
    sink.vacuum(TABLE)
    assert content(sink, version) == [(key, 0) for key in range(10)]


def test_a_vacuum_of_deltalake_and_ours_leave_what_the_other_needs(sink: DeltaSink) -> None:
    begin(sink, rows(*range(2000)), rows(5000))
    for number in range(3):
        do(sink, *(delete(key) for key in range(number, 2000, 4)), update(5000, number))
    expected = content(sink)
    sink.open(TABLE).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert content(sink) == expected
    replace(sink, keep_seconds=0).vacuum(TABLE)
    assert content(sink) == expected
    assert len(on_disk(sink, DIRECTORY)) == 1
    do(sink, update(3, 1))
    assert len(content(sink)) == len(expected)


def test_vacuum_keeps_the_newest_point_whatever_times_another_program_writes(sink: DeltaSink, clock: Clock) -> None:
    """Its removes say that they were made before the commit that they are in."""
    sink = replace(sink, keep_seconds=600)
    begin(sink, rows(*range(1000)), rows(*range(1000, 2000)))
    sink.open_ledger("shop", [Entry(Lsn(1), None, {str(TABLE): sink.version(TABLE)}, int(clock.now * 1e6))])
    expected = content(sink)
    clock.now += 3600
    sink.optimize(TABLE, BY_ID, replace(ALL, deleted_share=0))
    do(sink, *(delete(key) for key in range(2000)), insert(5000))
    for version in range(2, sink.version(TABLE) + 1):
        commit_file = Path(sink.location(TABLE), "_delta_log", f"{version:020d}.json")
        actions = [json.loads(line) for line in commit_file.read_text().splitlines()]
        for action in actions:
            if "remove" in action:
                action["remove"]["deletionTimestamp"] -= 1_200_000
        commit_file.write_text("".join(json.dumps(action) + "\n" for action in actions))
    replay._kept.clear()
    sink.vacuum(TABLE)
    assert sorted(rows_of(walmere.lake(sink.path, "shop").latest().arrow("t"))) == expected


def test_vacuum_refuses_a_table_with_features_whose_files_are_not_known(sink: DeltaSink) -> None:
    begin(sink, rows(1, 2))
    features = ["deletionVectors", "v2Checkpoint"]
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": features,
    }
    commit_file = Path(sink.location(TABLE), "_delta_log", f"{sink.version(TABLE) + 1:020d}.json")
    commit_file.write_text(json.dumps({"protocol": protocol}) + "\n")
    with pytest.raises(SinkMismatch, match="v2Checkpoint"):
        sink.vacuum(TABLE)
