"""Serves the API on a port of loopback, in a thread of rank 0."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import uvicorn

from mrl.errors import RunFailed
from mrl.service.callers import Limits
from mrl.service.registry import Registry
from mrl.service.sockets import open_tcp
from mrl.system.files import write_whole
from mrl.system.processes import Closing
from mrl.tinker.app import App
from mrl.tinker.calls import Calls
from mrl.tinker.keys import FOLDER, Keys
from mrl.tinker.ledger import Ledger

ADDRESS = "address"
"""SERVICE_DIR/tinker/address holds the address at which the API listens."""
START_S, STOP_S = 30.0, 5.0
CONNECTIONS = 1024
KEEP_ALIVE_S = 30


class TinkerServer(Closing):
    """The server of the API. It listens from its construction until `close()`. Raises InputError
    if it cannot listen."""

    def __init__(self, registry: Registry, limits: Limits | None = None) -> None:
        port = registry.service.control.tinker
        assert port is not None
        folder = registry.root / FOLDER
        with ExitStack() as undo:
            ledger = undo.enter_context(Ledger(folder))
            self.calls = Calls(registry, ledger, Keys(registry.root))
            listener = undo.enter_context(open_tcp(port))
            self.address = self.calls.address = _address(listener)
            app = App(self.calls, limits or Limits()).asgi
            self._server = uvicorn.Server(  # in this thread it leaves the signals to the service
                uvicorn.Config(
                    app,
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    limit_concurrency=CONNECTIONS,
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=int(STOP_S),
                    lifespan="off",
                    ws="none",
                    http="h11",
                    loop="asyncio",
                )
            )
            self._thread = threading.Thread(
                target=self._server.run, args=([listener],), daemon=True, name="tinker"
            )
            self._thread.start()
            end = time.monotonic() + START_S
            while not self._server.started:
                if not self._thread.is_alive() or time.monotonic() > end:
                    raise RunFailed(f"the Tinker API does not listen at {self.address}")
                time.sleep(0.01)
            write_whole(folder / ADDRESS, self.address + "\n")
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Answer the requests that wait, and stop listening. May be called more than once."""
        self.calls.is_closing = True
        self._server.should_exit = True
        self._thread.join(2 * STOP_S)
        self._undo.close()


def _address(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
