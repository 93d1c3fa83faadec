"""Story 5: the subscriber's database has another encoding than the publisher's."""

from __future__ import annotations

import pytest

from side_by_side import Pair, SideBySide

pytestmark = pytest.mark.long


@pytest.mark.parametrize("both", [Pair(subscriber_options="ENCODING 'LATIN1' TEMPLATE template0")], indirect=True)
def test_text_is_converted_to_the_encoding_of_the_subscriber(both: SideBySide) -> None:
    both.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    both.source("INSERT INTO t VALUES (1, 'Mot\u00f6rhead')", "CREATE PUBLICATION pub FOR TABLE t")
    both.start()
    both.source("INSERT INTO t VALUES (2, '\u00e9t\u00e9')", "UPDATE t SET v = v || '\u00df' WHERE id = 1")
    both.sync()
    assert both.rows("SELECT id, v, octet_length(v) FROM t ORDER BY id") == [
        (1, "Mot\u00f6rhead\u00df", 10),
        (2, "\u00e9t\u00e9", 3),
    ]
