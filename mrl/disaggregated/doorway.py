"""Lets those workers in who show the token of the run."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.disaggregated.wire import WAITS, Wire, WireClosed, is_token
from mrl.system.rendezvous import listen_for

MOST_STRANGERS = 64
"""Unauthenticated connections that may be open at a time; one more closes the oldest."""
RETRY_S = 0.2


class Doorway:
    """Listens for workers until it is closed."""

    def __init__(self, hosts: Sequence[str], serve: Callable[[Wire, dict[str, Any]], None]) -> None:
        """Listen where `hosts`, the machines of the rollout ranks, reach this one.

        `serve(wire, hello)` is called in a thread of its own for each worker, after its first message.
        """
        self._serve = serve
        is_here = set(hosts) == {socket.gethostname()}
        self._listener = socket.create_server(("127.0.0.1", 0)) if is_here else listen_for(hosts)
        self.token = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._strangers: list[Wire] = []
        """Connections that have not sent the token yet, the oldest first."""
        self._waiting: list[Wire] = []
        """Connections of ranks that share an engine and wait for the end of this process."""
        self._is_closed = False
        host, port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)

    def open(self) -> None:
        """Let workers in from now on."""
        threading.Thread(target=self._accept, name="mrl-join", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
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
                # The caller has given up, or this process has too many open files.
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
            wire.close()  # a stranger
            return
        if hello.get("type") == WAITS:
            self._waiting.append(wire)
            return
        wire.trust()
        self._serve(wire, hello)
