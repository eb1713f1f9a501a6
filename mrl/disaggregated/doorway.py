"""Lets those workers in who show the token of the run."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.disaggregated.wire import Wire, WireClosed, is_token
from mrl.system.rendezvous import listen_for


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
        host, port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)

    def open(self) -> None:
        """Let workers in from now on."""
        threading.Thread(target=self._accept, name="mrl-join", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake its thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        wire = Wire(connection, is_trusted=False)
        try:
            hello, _ = wire.receive()
        except WireClosed:
            hello = {}
        if not is_token(hello.get("token"), self.token):
            wire.close()  # a stranger
            return
        wire.trust()
        self._serve(wire, hello)
