"""Story 23: a partitioned table is mirrored by what its leaves log, whatever its root says; or it is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from conftest import Database
from mirror import Mirror
from walmere.errors import NotMirrored
from walmere.subscription import state

ROOTS = {
    "key": ("PRIMARY KEY (id, r)", "DEFAULT"),
    "full": ("", "FULL"),
    "key_full": ("PRIMARY KEY (id, r)", "FULL"),
    "index": ("UNIQUE (r, id)", "USING INDEX {table}_r_id_key"),
    "nothing": ("PRIMARY KEY (id, r)", "NOTHING"),
    "no_key": ("", "DEFAULT"),
}
LEAVES = {
    "inherited": "DEFAULT",  # the root's primary key, if it has one
    "own_key": "DEFAULT",
    "full": "FULL",
    "other_index": "USING INDEX {leaf}_u",  # unique in each leaf, and not over all of them
    "wide_index": "USING INDEX {leaf}_u_r_id",  # has the columns of the root's key, and one more
    "mixed": "DEFAULT",  # one leaf is FULL
    "nothing": "NOTHING",
}


def refused(root: str, leaf: str) -> bool:
    """Whether no key that all leaves log is unique over all of them."""
    # own_key is (id) in each leaf; where the root has a primary key, a leaf cannot have another
    return leaf == "other_index" or (leaf == "own_key" and "PRIMARY" not in ROOTS[root][0])


def create(database: Database, table: str, root: str, leaf: str) -> None:
    constraint, identity = ROOTS[root]
    columns = f"id int NOT NULL, r int NOT NULL, u int NOT NULL, v text{', ' * bool(constraint)}{constraint}"
    database.execute(f"CREATE TABLE {table} ({columns}) PARTITION BY LIST (r)")
    for number in (1, 2):
        name = f"{table}_{number}"
        database.execute(
            f"CREATE TABLE {name} PARTITION OF {table} FOR VALUES IN ({number})",
            f"CREATE UNIQUE INDEX {name}_u ON {name} (u)",
            f"CREATE UNIQUE INDEX {name}_u_r_id ON {name} (u, r, id)",
        )
        if leaf == "own_key" and "PRIMARY" not in constraint:
            database.execute(f"ALTER TABLE {name} ADD PRIMARY KEY (id)")
        mode = "FULL" if leaf == "mixed" and number == 2 else LEAVES[leaf].format(leaf=name)
        database.execute(f"ALTER TABLE {name} REPLICA IDENTITY {mode}")
    database.execute(
        f"ALTER TABLE {table} REPLICA IDENTITY {identity.format(table=table)}",
        f"ALTER TABLE {table} ALTER v SET STORAGE EXTERNAL",
    )
    database.execute(
        f"INSERT INTO {table} SELECT i, 1 + i % 2, i, repeat('x', 3000) || i FROM generate_series(1, 12) i"
    )


def change(database: Database, table: str) -> None:
    """Every kind of change; the large value is left alone by most, so that it is not sent."""
    database.execute(
        f"UPDATE {table} SET v = 'changed' WHERE id = 1",
        f"UPDATE {table} SET v = 'changed' WHERE id = 2",
        f"DELETE FROM {table} WHERE id IN (3, 4)",
        f"UPDATE {table} SET id = id + 100 WHERE id IN (5, 6)",  # another key
        f"UPDATE {table} SET u = u + 100 WHERE id IN (7, 8)",
        f"UPDATE {table} SET r = 3 - r WHERE id IN (9, 10)",  # to the other leaf
        f"INSERT INTO {table} VALUES (200, 1, 200, 'new')",
    )


@pytest.mark.long
def test_every_combination_of_the_identities_of_root_and_leaves_is_mirrored_or_refused_by_name(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    combinations = {f"{root}__{leaf}": (root, leaf) for root, leaf in itertools.product(ROOTS, LEAVES)}
    for table, (root, leaf) in combinations.items():
        create(database, table, root, leaf)
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    mirror = Mirror(database, tmp_path)
    wanted = {table for table, (root, leaf) in combinations.items() if refused(root, leaf)}
    with pytest.raises(NotMirrored, match="do not identify a row across all partitions"):
        mirror.run_once()
    errors = {each.table.name: each.error for each in mirror.tables() if each.error is not None}
    assert set(errors) == wanted, "those that cannot be mirrored, and no others"
    assert all("hint: ALTER TABLE" in (error or "") for error in errors.values())
    assert not any((tmp_path / "lake" / "public" / table).exists() for table in wanted), "nothing was written"
    updated = []
    for table, (root, leaf) in combinations.items():
        if table in wanted:
            continue
        no_identity = leaf == "nothing" or (leaf == "inherited" and root in ("full", "no_key", "index"))
        if no_identity or (
            leaf == "mixed" and root in ("full", "no_key", "index")
        ):  # the server itself refuses UPDATE there
            database.execute(f"INSERT INTO {table} VALUES (200, 1, 200, 'new')")
            if not no_identity:
                database.execute(
                    f"DELETE FROM {table} WHERE r = 2 AND id = 3", f"UPDATE {table} SET v = 'x' WHERE r = 2"
                )
        else:
            change(database, table)
        updated.append(table)
    with pytest.raises(NotMirrored):
        mirror.run_once()
    mirror.assert_equal(*updated)


@pytest.mark.long
def test_a_leaf_that_gets_another_identity_is_noticed(database18: Database, tmp_path: Path) -> None:
    database = database18
    create(database, "t", "key", "inherited")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    mirror = Mirror(database, tmp_path)
    with mirror.following():
        mirror.becomes_equal("t")
        database.execute("ALTER TABLE t_1 REPLICA IDENTITY USING INDEX t_1_u", "DELETE FROM t WHERE id = 2")
        mirror.becomes(lambda: "across all partitions" in (mirror.tables()[mirror.oid("t")].error or ""))
        database.execute("ALTER TABLE t_1 REPLICA IDENTITY FULL", "DELETE FROM t WHERE id = 4")
        mirror.becomes_equal("t")
        database.execute("UPDATE t SET id = id + 50 WHERE id < 8")
        mirror.becomes_equal("t")


def test_gathered_partitions_that_share_a_key_are_refused_and_others_are_not_mixed_up(
    database18: Database, tmp_path: Path
) -> None:
    database = database18
    for table, keys in {"shared": "(id)", "disjoint": "(id, r)"}.items():
        database.execute(
            f"CREATE TABLE {table} (id int NOT NULL, r int NOT NULL, v text) PARTITION BY LIST (r)",
            *(f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES IN ({n})" for n in (1, 2)),
            *(f"ALTER TABLE {table}_{n} ADD PRIMARY KEY {keys}" for n in (1, 2)),
            f"INSERT INTO {table} SELECT i, r, 'row' FROM generate_series(1, 5) i, generate_series(1, 2) r",
        )
    database.execute(
        "CREATE TABLE whole (id int, r int, v text) PARTITION BY LIST (r)",
        *(f"CREATE TABLE whole_{n} PARTITION OF whole FOR VALUES IN ({n})" for n in (1, 2)),
        *(f"ALTER TABLE whole_{n} REPLICA IDENTITY FULL" for n in (1, 2)),
        "INSERT INTO whole SELECT i, r, 'row' FROM generate_series(1, 5) i, generate_series(1, 2) r",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    mirror.set("target", gather_partitions=True)
    with pytest.raises(NotMirrored, match=r"public\.shared"):
        mirror.run_once()
    for table in ("disjoint", "whole"):
        database.execute(
            f"UPDATE {table} SET v = 'one' WHERE id = 1 AND r = 1", f"DELETE FROM {table} WHERE r = 2 AND id > 3"
        )
    with pytest.raises(NotMirrored, match=r"public\.shared"):
        mirror.run_once()
    mirror.assert_equal("disjoint", "whole")


def test_a_table_that_no_copy_helps_is_not_copied_again_for_ever() -> None:
    known = state.TableState(("s", "t"), 1, state.Phase.READY, copied_at=0.0)  # type: ignore[arg-type]
    now, waits = 10_000.0, []
    for _ in range(5):
        known = state.set_aside(known, "refused", now)
        waits.append(known.retry_at - now if known.retry_at else 0.0)
        now = max(now, known.retry_at) + 12
        known = state.TableState(known.table, 1, state.Phase.READY, setbacks=known.setbacks, copied_at=now - 5)
    assert waits == [0, 60, 3600, 14_400, 14_400]
    assert state.set_aside(known, "refused", now + 3600).retry_at == 0.0, "it was fine for an hour"
