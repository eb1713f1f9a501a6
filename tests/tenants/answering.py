"""A server with the rules of the control socket, whose answers a test gives."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mrl.service.control import make_api
from mrl.system.processes import Closing
from mrl.web.app import Incoming
from mrl.web.limits import Limits
from mrl.web.server import HttpServer

Answer = tuple[int, dict[str, Any]]


class JsonServer(Closing):
    """Calls `answer` for GET and POST of /x."""

    def __init__(self, answer: Callable[[Incoming], Answer], limits: Limits | None = None) -> None:
        self._answer, self._limits, self._undo = answer, limits or Limits(), ExitStack()

    def listen(self, listener: socket.socket, token: str | None = None) -> None:
        """Answer the callers of a bound socket, who must send the token if there is one."""
        api = make_api(token, self._limits)
        for method in ("GET", "POST"):
            api.add(method, "/x", self._answer)
        self._undo.enter_context(listener)
        self._undo.enter_context(HttpServer(api.asgi, listener, self._limits, name="a test"))

    def close(self) -> None:
        self._undo.close()
