"""Story 19: a table that cannot be mirrored is refused with what was found and the way out, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from conftest import Database
from delta_rows import read_delta
from mirror import Mirror
from processes import Here, walmere
from walmere.errors import WalmereError
from walmere.subscription import copies


def errors(mirror: Mirror) -> dict[str, str]:
    return {each.table.name: each.error for each in mirror.tables() if each.error is not None}


def test_what_is_refused_at_the_copy_names_the_table_and_the_way_out(
    database18: Database, tmp_path: Path, here: Here
) -> None:
    database = database18
    database.execute(
        "CREATE TABLE fine (id int PRIMARY KEY)",
        "INSERT INTO fine VALUES (1)",
        "CREATE TABLE days (day date PRIMARY KEY)",
        "INSERT INTO days VALUES ('2026-01-01'), ('infinity')",
        'CREATE TABLE capitals (id int PRIMARY KEY, "Id" int)',
        "CREATE TABLE theirs (id int PRIMARY KEY, v text)",
        "CREATE TABLE secret (id int PRIMARY KEY)",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    theirs = pa.table({"somebody": ["else"]})
    write_deltalake(tmp_path / "lake" / "public" / "theirs", theirs)
    with pytest.raises(WalmereError, match=r"mirroring public\.\w+, .*(\n.*)*hint: "):
        mirror.run_once()
    assert set(errors(mirror)) == {"days", "capitals", "theirs"}
    for table, found in {
        "days": ("column day, which is part of the key", "infinity", "REPLICA IDENTITY"),
        "capitals": ("differ only in case", "remove one of them from the publication"),
        "theirs": ("which Walmere did not write", "move it to another directory"),
    }.items():
        assert all(part in errors(mirror)[table] for part in found), errors(mirror)[table]
    mirror.assert_equal("fine", "secret")
    assert read_delta(DeltaTable(tmp_path / "lake" / "public" / "theirs")) == theirs, "nothing was touched"
    code, _, said = here("run", "-c", mirror.file, "--once")
    assert code == 1
    assert "walmere: mirroring public." in said
    assert "hint: " in said
    # each way out leads out
    database.execute("DELETE FROM days WHERE day = 'infinity'", 'ALTER TABLE capitals RENAME "Id" TO other')
    (tmp_path / "lake" / "public" / "theirs").rename(tmp_path / "lake" / "moved away")
    mirror.run_once()
    mirror.assert_equal("fine", "days", "capitals", "theirs", "secret")
    assert errors(mirror) == {}


def test_what_is_refused_in_the_stream_sets_its_table_aside_until_it_is_mended(
    database18: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "RETRY_INTERVAL", 0.5)
    database = database18
    database.execute(
        "CREATE TABLE days (day date PRIMARY KEY, v text)",
        "CREATE TABLE fine (id int PRIMARY KEY)",
        "CREATE TABLE capitals (id int PRIMARY KEY, v text)",
        "INSERT INTO days VALUES ('2026-01-01', 'a')",
        "CREATE PUBLICATION pub FOR ALL TABLES",
    )
    mirror = Mirror(database, tmp_path)
    with mirror.following():
        mirror.becomes_equal("days", "fine", "capitals")
        database.execute(
            'ALTER TABLE capitals RENAME v TO "ID"',
            "INSERT INTO capitals VALUES (1, 'x')",
            "BEGIN; INSERT INTO days VALUES ('2026-01-02', 'b'), ('infinity', 'c');"
            " INSERT INTO fine VALUES (1); COMMIT",
        )
        mirror.becomes_equal("fine")
        mirror.becomes(lambda: "infinity" in errors(mirror).get("days", ""))
        mirror.becomes(lambda: "differ only in case" in errors(mirror).get("capitals", ""))
        mirror.becomes(lambda: "s, or now with `walmere resync public.days`" in caplog.text)
        assert mirror.rows("days").total() == 1, "nothing is half applied"
        [shown] = [
            each
            for each in json.loads(walmere("status", "-c", mirror.file, "--json").stdout)["tables"]
            if each["name"] == "public.days"
        ]
        assert "infinity" in shown["error"]
        assert "hint: " in shown["error"]
        database.execute("INSERT INTO fine VALUES (2)")
        mirror.becomes_equal("fine")
        database.execute("DELETE FROM days WHERE day = 'infinity'", "INSERT INTO days VALUES ('2026-01-03', 'd')")
        database.execute('ALTER TABLE capitals RENAME "ID" TO w')
        mirror.becomes_equal("days", "fine", "capitals")
    assert errors(mirror) == {}
