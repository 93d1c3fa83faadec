"""The copy of a table into Delta, compared with two COPYs to /dev/null and a native subscription's initial sync.

Run it with `python -m bench.snapshot [--server 15] [--rounds 3] [--small]`, or run all with `make bench`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.ours import Ours, warm
from bench.side_by_side import Report, Run
from bench.source import Source, native, options, source

CREATE = """
CREATE TABLE b (id bigint PRIMARY KEY, customer int, status text, amount numeric(12,2), created timestamptz,
                note text)
"""
FILL = """
INSERT INTO b SELECT i, i % 777, 'shipped', (i % 10000 * 13.37)::numeric(12,2), now() + i * interval '1 second',
                     'note ' || md5(i::text) || substr(md5((i * 7)::text), 1, 20)
              FROM generate_series(1, {rows}) i
"""


def fill(made: Source, rows: int) -> None:
    """Create, fill and publish table b."""
    print(f"making {rows:,} rows …")
    made.sql.execute(CREATE)
    made.sql.execute(FILL.format(rows=rows).encode())
    made.sql.execute("VACUUM (ANALYZE, FREEZE) b")
    made.sql.execute("CREATE PUBLICATION b FOR TABLE b")


def main() -> None:
    """Run both comparisons."""
    arguments = options(__doc__).parse_args()
    rows = 50_000 if arguments.small else 5_000_000
    report = Report("snapshot", "source → committed Delta", {"server": arguments.server, "small": arguments.small})
    with (
        source(arguments.server) as made,
        native(made, arguments.server) as subscriber,
        tempfile.TemporaryDirectory(prefix="walmere-bench-") as directory,
    ):
        fill(made, rows)
        report.facts["spark_start_seconds"], report.facts["warm_up_seconds"] = warm(made, Path(directory))
        ours = Ours(made, Path(directory) / "ours", "b")

        def snapshot() -> Run:
            run = ours.run("b", made.end())
            assert ours.rows("b") == rows
            ours.remove()
            ours.directory.mkdir()
            made.drop("b")
            return run

        snapshot(), made.two_copies("b")  # once without timing: the disk is still writing the new rows
        name = f"copy of {rows:,} rows"
        report.ratio(name, 2.2, "two COPYs", lambda: made.two_copies("b"), snapshot, arguments.rounds)
        sync = lambda: subscriber.initial_sync("b", CREATE)  # noqa: E731
        report.ratio(name, 1 / 2.5, "native initial sync", sync, snapshot, arguments.rounds)
    report.finish()


if __name__ == "__main__":
    main()
