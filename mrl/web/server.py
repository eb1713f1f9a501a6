"""Runs an ASGI application on a listening socket, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from mrl.errors import RunFailed
from mrl.system.processes import Closing
from mrl.web.connection import Callers, Connection
from mrl.web.limits import Limits

BACKLOG = 1024
"""The backlog of listen(): how many connections the kernel holds until the server accepts them."""
START_S = 30.0


class HttpServer(Closing):
    """Answers the callers of a bound socket from its construction until `close()`.

    `app` is an ASGI application. Its limits on connections are those of `limits`; a connection that
    breaks them is answered with `{error_key: WHY}`. Raises RunFailed if the server does not start.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        limits: Limits,
        *,
        name: str,
        error_key: str = "error",
    ) -> None:
        self._stop_s = limits.stop_s
        # In a thread that is not the main one, uvicorn leaves the signals alone.
        self._server = uvicorn.Server(settings(app, limits, error_key))
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), daemon=True, name=name
        )
        self._thread.start()
        end = time.monotonic() + START_S
        while not self._server.started:
            if not self.is_alive or time.monotonic() > end:
                raise RunFailed(f"{name} does not listen; the lines above say why")
            time.sleep(0.002)

    @property
    def is_alive(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Accept no more connections, and wait for requests that are being carried out, for
        about `limits.stop_s` seconds. May be called more than once."""
        self._server.should_exit = True
        self._thread.join(2 * self._stop_s)


def settings(app: Callable[..., Any], limits: Limits, error_key: str = "error") -> uvicorn.Config:
    """Return what uvicorn is told about an application."""
    callers = Callers(limits, error_key)
    return uvicorn.Config(
        app,
        http=partial(Connection, callers=callers),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=limits.stop_s,
        h11_max_incomplete_event_size=limits.head_bytes,
    )
