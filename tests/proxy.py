"""A TCP proxy that can be slow, or stop forwarding without closing anything: a frozen peer whose kernel answers."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    """Forwards connections to a server. While frozen, it accepts connections and reads nothing from any of them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thawed = threading.Event()
        self._thawed.set()
        self._ended = False
        self._sockets: list[socket.socket] = []
        self.delay = 0.0
        """Seconds for each 64 kB that come from the server, of each connection."""
        self.passed = 0
        """Bytes that came from the server."""
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended = True
        self._thawed.set()
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def dsn(self, dsn: str) -> str:
        """The same connection string, through us."""
        return dsn.replace(f":{urlsplit(dsn).port}/", f":{self.port}/")

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client:
            self._sockets.append(client)
            self._thawed.wait()
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                self._sockets.append(server)
                while not self._ended:
                    ready = select.select([client, server], [], [], 0.05)[0]
                    self._thawed.wait()
                    for each in ready:
                        if not (data := each.recv(1 << 16)):
                            return
                        if each is server:
                            self.passed += len(data)
                            time.sleep(self.delay * len(data) / (1 << 16))
                        (client if each is server else server).sendall(data)
