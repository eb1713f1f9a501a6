"""Runs an ASGI application on a listening socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

from mrl.errors import RunFailed
from mrl.system.processes import Closing
from mrl.web.connection import protocol_of
from mrl.web.limits import Limits
from mrl.web.stages import AsError, Callers

BACKLOG = 2048
"""The backlog of listen(): how many connections the kernel holds until the server accepts them."""
START_S = 30.0
CLOSE = (b"connection", b"close")
Application = Callable[[Any, Any, Any], Awaitable[None]]


def plain_error(status: int, why: str) -> dict[str, str]:
    """Return the usual answer to a refused request."""
    return {"error": why}


class HttpServer(Closing):
    """Answers the callers of a bound socket from its construction until `close()`.

    `app` is an ASGI application. Its limits on connections are those of `limits`; a connection that
    breaks them gets the answer that `as_error` returns. `answers_half_closed` is explained in
    `Callers`. Raises RunFailed if the server does not start.
    """

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        limits: Limits,
        *,
        name: str,
        as_error: AsError = plain_error,
        answers_half_closed: bool = True,
    ) -> None:
        self._stop_s = limits.stop_s
        callers = Callers(limits, as_error, answers_half_closed=answers_half_closed)
        # In a thread that is not the main one, uvicorn leaves the signals alone.
        self._server = uvicorn.Server(settings(app, callers))
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


def settings(app: Application, callers: Callers) -> uvicorn.Config:
    """Return uvicorn's configuration for an application and the callers of its socket."""
    limits = callers.limits
    return uvicorn.Config(
        _finished(app, callers),
        http=protocol_of(callers),
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


def _finished(app: Application, callers: Callers) -> Application:
    """Return an application that also answers what `app` leaves open.

    An answer to a request that has not been read closes the connection. Otherwise the rest of that
    request would be taken for the beginning of the next one. A request that the end of the server
    cancels is answered with 503.
    """

    async def application(scope: Any, receive: Any, send: Any) -> None:
        connection, has_started = scope["state"]["connection"], False

        async def sending(message: Any) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if not connection.is_read() and CLOSE not in message["headers"]:
                    message = {**message, "headers": [*message["headers"], CLOSE]}
            await send(message)

        try:
            await app(scope, receive, sending)
        except asyncio.CancelledError:
            if has_started:
                raise
            error = callers.as_error(503, "the server is ending; try again later")
            response = JSONResponse(error, 503, {"Connection": "close"})
            await response(scope, receive, send)

    return application
