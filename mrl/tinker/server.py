"""Serves the API on a port of loopback, in a thread of rank 0."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from mrl.service.registry import Registry
from mrl.service.sockets import open_tcp
from mrl.system.files import write_whole
from mrl.system.processes import Closing
from mrl.tinker.app import LIMITS, App
from mrl.tinker.calls import Calls
from mrl.tinker.keys import FOLDER, Keys
from mrl.tinker.ledger import Ledger
from mrl.web.server import HttpServer

ADDRESS = "address"
"""SERVICE_DIR/tinker/address holds the address at which the API listens."""


class TinkerServer(Closing):
    """The server of the API. It listens from its construction until `close()`. Raises InputError
    if it cannot listen."""

    def __init__(self, registry: Registry) -> None:
        port = registry.service.control.tinker
        assert port is not None
        folder = registry.root / FOLDER
        with ExitStack() as undo:
            ledger = undo.enter_context(Ledger(folder))
            self.calls = Calls(registry, ledger, Keys(registry.root))
            listener = undo.enter_context(open_tcp(port, "control.tinker"))
            self.address = self.calls.address = _address(listener)
            app = App(self.calls, LIMITS).asgi
            server = HttpServer(app, listener, LIMITS, name="the Tinker API", as_error=_as_error)
            undo.enter_context(server)
            write_whole(folder / ADDRESS, self.address + "\n")
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Answer the requests that wait, and stop listening. May be called more than once."""
        self.calls.is_closing = True
        self._undo.close()


def _as_error(status: int, why: str) -> dict[str, str]:
    return {"detail": why}


def _address(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
