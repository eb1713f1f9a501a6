"""Serves the endpoint on a port of loopback, in a thread of the process that collects rollouts."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from mrl.collect.endpoint.app import App, as_error
from mrl.errors import RunFailed
from mrl.system.processes import Closing
from mrl.web.limits import Limits
from mrl.web.server import HttpServer

LIMITS = Limits(
    head_bytes=64 << 10,
    head_s=300.0,
    request_s=600.0,
    answer_s=3600.0,
    idle_s=3600.0,
    unread=1 << 16,
    idle=1 << 16,
)
"""Agents are trusted, and many may run on few cores, so the limits are wide. They keep a connection
over a whole episode; one that is closed early may break a request."""


class EndpointServer(Closing):
    """Listens from its construction until `close()`. Raises RunFailed if it cannot."""

    def __init__(self) -> None:
        self.app = App()
        with ExitStack() as undo:
            undo.callback(self.app.close)
            try:
                listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            except OSError as error:
                raise RunFailed(
                    f"rollout.endpoint: no port of 127.0.0.1: {error.strerror}"
                ) from None
            self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            """What agents take as base URL."""
            server = HttpServer(
                self.app.asgi,
                listener,
                LIMITS,
                name="rollout.endpoint",
                as_error=as_error,
                answers_half_closed=False,  # a closed connection looks the same, and is an abort
            )
            undo.enter_context(server)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Stop listening. May be called more than once."""
        self._undo.close()
