"""Serves the endpoint on a port of loopback, in a thread of the process that collects rollouts."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn

from mrl.collect.endpoint.app import App
from mrl.errors import RunFailed
from mrl.system.processes import Closing

START_S, STOP_S = 30.0, 5.0
BACKLOG = 2048
KEEP_ALIVE_S = 3600
"""Agents keep a connection over a whole episode; one that is closed early may break a request."""


class EndpointServer(Closing):
    """Listens from its construction until `close()`. Raises RunFailed if it cannot."""

    def __init__(self) -> None:
        self.app = App()
        try:
            listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        except OSError as error:
            raise RunFailed(f"rollout.endpoint: no port of 127.0.0.1: {error.strerror}") from None
        self._listener = listener
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        """What agents take as base URL."""
        self._server = uvicorn.Server(  # in this thread it leaves the signals to the run
            uvicorn.Config(
                self.app.asgi,
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(STOP_S),
                lifespan="off",
                ws="none",
                http="h11",
                loop="asyncio",
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), daemon=True, name="mrl-endpoint"
        )
        self._thread.start()
        end = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                listener.close()
                raise RunFailed(f"rollout.endpoint: nothing listens at {self.address}")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening. May be called more than once."""
        self._server.should_exit = True
        self._thread.join(2 * STOP_S)
        self._listener.close()
        self.app.close()
