"""Accepts the connections of workers and rollout ranks, which show the run's token first."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.engine_pool.remote.wire import WAITS, Wire, WireClosed, is_token
from mrl.system.rendezvous import listen_for

MOST_STRANGERS = 64
"""Maximum number of open connections that have not sent the token yet. If there is one more, the
oldest is closed."""
RETRY_S = 0.2


class AuthenticatedListener:
    """Accepts connections whose first message contains the run's token, and closes all others."""

    def __init__(self, hosts: Sequence[str], serve: Callable[[Wire, dict[str, Any]], None]) -> None:
        """Listen on an address that `hosts`, the machines of the rollout ranks, can reach.

        `serve(wire, hello)` is called for each worker in a separate thread. `hello` is the worker's
        first message.
        """
        self._serve = serve
        is_here = set(hosts) == {socket.gethostname()}
        self._listener = socket.create_server(("127.0.0.1", 0)) if is_here else listen_for(hosts)
        self.token = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._strangers: list[Wire] = []
        """Connections whose first message has not arrived yet, the oldest first."""
        self._waiting: list[Wire] = []
        """Connections of rollout ranks without a worker. This process never closes them, so a rank
        learns from the end of its connection that this process has ended."""
        self._is_closed = False
        host, port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)

    def open(self) -> None:
        """Begin to accept connections."""
        threading.Thread(target=self._accept, name="mrl-join", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Accepted connections stay open."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake its thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                wire = Wire(connection, is_trusted=False)
            except OSError:
                if self._is_closed:
                    return
                # The other side has given up, or this process has too many open files.
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._strangers.append(wire)
                surplus = self._strangers[:-MOST_STRANGERS]
            for other in surplus:
                other.close()
            threading.Thread(target=self._admit, args=(wire,), daemon=True).start()

    def _admit(self, wire: Wire) -> None:
        try:
            hello, _ = wire.receive()
        except WireClosed:
            hello = {}
        with self._lock:
            self._strangers.remove(wire)
        if not is_token(hello.get("token"), self.token):
            wire.close()
            return
        if hello.get("type") == WAITS:
            self._waiting.append(wire)
            return
        wire.trust()
        self._serve(wire, hello)
