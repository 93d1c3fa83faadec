"""Story 33: native applies changes as the owner of the table. Ours applies them as the role of the target's dsn."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = [pytest.mark.long, pytest.mark.since(16, "run_as_owner")]


@pytest.mark.parametrize("triggered", [True, False], ids=["trigger", "default"])
def test_the_user_is_the_owner_of_the_table_with_native_and_the_role_of_the_dsn_with_ours(
    both: SideBySide, triggered: bool
) -> None:
    alice = both.role("alice")
    both.source("CREATE TABLE t (a int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE t")
    both.target(
        f"CREATE TABLE t (a int PRIMARY KEY, who text{'' if triggered else ' DEFAULT current_user'})",
        "CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.who = current_user; RETURN NEW; END $$",
        f"ALTER TABLE t OWNER TO {alice}",
        f"GRANT USAGE, CREATE ON SCHEMA public TO {alice}",
    )
    if triggered:
        both.target(
            "CREATE TRIGGER who BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION who()",
            "ALTER TABLE t ENABLE ALWAYS TRIGGER who",
        )
    both.source("INSERT INTO t VALUES (1)")
    both.start()
    both.source("INSERT INTO t VALUES (2)")
    both.sync()
    role = both.ours.value("SELECT current_user")
    assert role != alice
    assert both.native.rows("SELECT a, who FROM t ORDER BY a") == [(1, alice), (2, alice)]
    assert both.ours.rows("SELECT a, who FROM t ORDER BY a") == [(1, role), (2, role)]
