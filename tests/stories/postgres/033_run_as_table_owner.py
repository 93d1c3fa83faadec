"""Story 33: changes are applied as the owner of the table, so its triggers have no more privileges than the owner."""

from __future__ import annotations

import pytest

from side_by_side import SideBySide

pytestmark = pytest.mark.since(16, "run_as_owner")


@pytest.mark.parametrize("triggered", [True, False], ids=["trigger", "default"])
def test_triggers_and_defaults_see_the_owner_of_the_table(both: SideBySide, triggered: bool) -> None:
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
    assert both.rows("SELECT a, who = %s FROM t ORDER BY a", alice) == [(1, True), (2, True)]
