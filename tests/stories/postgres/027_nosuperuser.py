"""Story 27: the role of the subscription is not a superuser."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide
from walmere.errors import WalmereError

pytestmark = [pytest.mark.long, pytest.mark.since(16, "run_as_owner")]


def _start(both: SideBySide, *, run_as_owner: bool) -> tuple[str, str]:
    """Tables of alice, and a subscription of admin, who has no privileges yet. Returns both names."""
    alice, admin = both.role("alice"), both.role("admin")
    both.everywhere(
        f"CREATE SCHEMA shop AUTHORIZATION {alice}",
        "CREATE TABLE shop.t (a int PRIMARY KEY, b int)",
        f"ALTER TABLE shop.t OWNER TO {alice}",
        f"GRANT USAGE ON SCHEMA shop TO {admin}",
    )
    both.source("INSERT INTO shop.t VALUES (1, 1)", "CREATE PUBLICATION pub FOR TABLE shop.t")
    both.native.execute(f"GRANT CREATE ON DATABASE {both.native.name} TO {admin}")
    both.ours.execute(
        f"GRANT CREATE ON DATABASE {both.ours.name} TO {admin}",
        f"GRANT SET ON PARAMETER session_replication_role TO {admin}",  # which workers of PostgreSQL may always do
    )
    both.subscribe(
        native={
            "password_required": "false",
            "enabled": "false",
            "run_as_owner": str(run_as_owner).lower(),
        },
        target={"dsn": both.ours.server.dsn(both.ours.name, admin)},
    )
    both.alter_native(f"OWNER TO {admin}")
    both.enable_native()
    return alice, admin


def test_privileges_of_the_owner_are_enough_and_missing_ones_are_named_before_the_copy(both: SideBySide) -> None:
    alice, admin = _start(both, run_as_owner=False)
    assert alice in both.native_stops()
    error = both.ours_stops(WalmereError)
    assert "shop.t" in str(error)
    assert both.rows("SELECT * FROM shop.t") == []
    both.native.execute(f"GRANT {alice} TO {admin}")  # roles are of the server, not of a database
    both.enable_native()
    both.sync()
    both.source("INSERT INTO shop.t VALUES (2, 2)", "UPDATE shop.t SET b = 10 WHERE a = 1", "TRUNCATE shop.t")
    both.source("INSERT INTO shop.t VALUES (3, 3), (4, 4)", "DELETE FROM shop.t WHERE a = 4")
    both.sync()
    both.assert_equal(source=True)


def test_granted_privileges_are_enough_and_a_revoked_one_stops_both(both: SideBySide) -> None:
    _, admin = _start(both, run_as_owner=True)
    both.native_stops()
    both.target(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON shop.t TO {admin}")
    both.enable_native()
    both.sync()
    both.target(f"REVOKE DELETE ON shop.t FROM {admin}")
    both.source("INSERT INTO shop.t VALUES (2, 2)", "DELETE FROM shop.t WHERE a = 1")
    assert "permission denied for table t" in both.native_stops()
    error = both.ours_stops(WalmereError)
    assert "DELETE" in str(error) or "permission denied" in str(error)
    both.target(f"GRANT DELETE ON shop.t TO {admin}")
    both.enable_native()
    both.sync()
    both.assert_equal(source=True)


def test_a_table_whose_rows_are_hidden_by_policies_is_refused(both: SideBySide) -> None:
    alice, admin = _start(both, run_as_owner=False)
    both.native_stops()
    both.native.execute(f"GRANT {alice} TO {admin}")
    both.enable_native()
    both.sync()
    both.target("ALTER TABLE shop.t ENABLE ROW LEVEL SECURITY", "ALTER TABLE shop.t FORCE ROW LEVEL SECURITY")
    both.source("INSERT INTO shop.t VALUES (2, 2)", "UPDATE shop.t SET b = 10 WHERE a = 1")
    assert "row-level security" in both.native_stops()
    assert "row security applies to the role on shop.t" in str(both.ours_stops(WalmereError))
    both.assert_equal()
    both.target("ALTER TABLE shop.t NO FORCE ROW LEVEL SECURITY")  # the owner is exempt
    both.enable_native()
    both.sync()
    both.assert_equal(source=True)
