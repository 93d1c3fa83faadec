"""A real S3 server for the tests: moto, in a process of its own. `python -m s3_server` prints its port.

moto looks whether an object exists, and puts it then: two conditional puts at the same time could both succeed. So
requests that change something are served one after the other. The server ends when its standard input is closed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_changing = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *arguments: Any) -> None:
        pass


def _serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
        return _moto(environ, start_response)  # type: ignore[no-any-return]
    with _changing:
        return _moto(environ, start_response)  # type: ignore[no-any-return]


def main() -> None:
    server = make_server("127.0.0.1", 0, _serve, threaded=True, request_handler=_Handler)
    print(server.port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
