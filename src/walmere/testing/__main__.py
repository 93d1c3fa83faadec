"""`python -m walmere.testing`: a PostgreSQL server to try things on, with a database `shop`, until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess

from walmere.testing.server import LOGICAL, embedded


def main() -> None:
    """Start the server, print how to connect, and wait. SIGINT and SIGTERM end and delete it."""
    arguments = argparse.ArgumentParser(prog="python -m walmere.testing", description=__doc__)
    arguments.add_argument("--port", type=int, default=54320, help="of 127.0.0.1 (default: %(default)s)")
    arguments.add_argument("--database", default="shop", help="a database to create (default: %(default)s)")
    given = arguments.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for what it starts in the background
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), embedded(settings={**LOGICAL, "port": str(given.port)}) as server:
        server.port = given.port
        subprocess.run([server.bindir / "createdb", "--maintenance-db", server.dsn(), given.database], check=True)
        print(f"PostgreSQL listens on 127.0.0.1:{given.port}, until you press Ctrl-C. Then it is deleted.")
        print(f'{server.bindir / "psql"} "{server.dsn(given.database)}"', flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
