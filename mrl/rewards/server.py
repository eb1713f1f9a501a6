"""Serves a reward function over HTTP; `mrl/rewards/remote.py` is the client.

The function runs in worker processes that can be killed. GET returns `{"reward": SPEC}`, on every path
but /openapi.json, which describes the server. A POST is handled by the first free worker. A worker
whose function hangs is killed after the time limit, and the answer has status 500. If no worker
becomes free within a quarter of the seconds in the header `X-Timeout-S`, or within the time limit of a
call if that is shorter, the answer has status 503.

A server on an address other than loopback must have a token. If the server has a token, a request
without the token gets status 401. If the server has no token, a request from a web page gets status
403.
"""

from __future__ import annotations

import ipaddress
import json
import math
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers

from mrl.errors import InputError, RunFailed
from mrl.rewards.remote import TIME_LEFT_HEADER, TOKEN_VARIABLE
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.system.processes import Closing
from mrl.web.app import BEARER, Api, Incoming, Rules
from mrl.web.callers import has_token, is_of_this_machine
from mrl.web.limits import Limits, Refused
from mrl.web.server import HttpServer

LIMITS = Limits(
    body_bytes=1 << 30,
    request_s=600.0,
    answer_s=60.0,
    idle_s=3600.0,
    stop_s=1,
    connections=1024,
    threads=256,
)
"""Callers may be far away, and each holds one connection for its whole run. A thread waits for a
worker."""
WAIT_SHARE = 0.25
"""Share of the client's time limit that a call may wait for a worker. The rest is for the reward
function."""


class _WorkerThread:
    """A worker process and the thread that starts and calls it.

    A worker process is killed when the thread that started it ends. The thread that handles an HTTP
    request ends with the request, so each worker needs a thread that lives longer.
    """

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._worker = reward_worker(spec, timeout_s)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._worker.start).result()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer, or a dict with the key `error` if the call fails."""
        return self._thread.submit(call_worker, self._worker, request, self._timeout_s).result()

    def close(self) -> None:
        self._worker.close()
        self._thread.shutdown()


class RewardServer(Closing):
    """An HTTP server of one reward function. The server listens as soon as it is created.

    `serve()` answers requests until another thread calls `stop()`.

    Raises InputError if the reward cannot be loaded, if the address is in use, or if other machines
    can reach the address and there is no `token`.
    """

    def __init__(
        self,
        spec: str,
        host: str,
        port: int,
        *,
        num_workers: int,
        timeout_s: float,
        token: str | None = None,
    ) -> None:
        self._stack = ExitStack()
        self._free: queue.SimpleQueue[_WorkerThread] = queue.SimpleQueue()
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self.spec, self.token = spec, token
        self._stopped = threading.Event()
        self._listener = self._stack.enter_context(_listening(host, port, token))
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for _ in range(num_workers):
                worker = _WorkerThread(spec, timeout_s)
                self._stack.callback(worker.close)
                self._free.put(worker)
            undo.pop_all()

    @property
    def url(self) -> str:
        """The address for clients.

        If port 0 was requested, the address has the port that the system chose. If the server
        listens on all network interfaces, the address has the machine's host name.
        """
        host, port = self._listener.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{host}:{port}"

    def serve(self) -> None:
        """Answer requests until another thread calls `stop()`.

        An exception in this thread, such as KeyboardInterrupt, also ends the call.
        """
        api = make_api(self)
        with HttpServer(api.asgi, self._listener, LIMITS, name="the reward server") as http:
            while not self._stopped.wait(1.0):
                if not http.is_alive:
                    raise RunFailed("the reward server has ended; the lines above say why")

    def stop(self) -> None:
        """End `serve()`, which runs in another thread."""
        self._stopped.set()

    def close(self) -> None:
        """Kill the workers and free the port. May be called more than once."""
        self._stack.close()

    def answer(self, body: bytes, wait_until: float = math.inf) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the message that answer a POST with this `body`.

        The call waits for a free worker until the monotonic time `wait_until`, but not for longer than
        the time limit of a reward call.
        """
        try:
            request = _checked(json.loads(body))
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"not a request for rewards: {error}"}
        wait_s = min(wait_until - time.monotonic(), self._timeout_s)
        try:
            worker = self._free.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return 503, {
                "error": f"all {self._num_workers} workers are busy; "
                "start the server with more --workers"
            }
        try:
            reply = worker.call(request)
        finally:
            self._free.put(worker)
        return (500 if "error" in reply else 200), reply


class Call(BaseModel):
    """The body of a POST. All lists have one length."""

    prompts: list[Any]
    completions: list[str]
    columns: dict[str, list[Any]] = {}


def _listening(host: str, port: int, token: str | None) -> socket.socket:
    """Return a socket that is bound to an address. Raises InputError if it is not loopback and there is
    no token, or if it is in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with ExitStack() as undo:
        undo.enter_context(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()  # callers wait while the workers start
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {host}:{port}: {error}; choose another") from None
        if token is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            raise InputError(
                f"address {host!r} is open to other machines, so callers need a token: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) here, and the same value for the run"
            )
        undo.pop_all()
    return listener


def make_api(rewards: RewardServer) -> Api:
    """Return the API of a server."""
    token = rewards.token

    def allow(headers: Headers, path: str) -> str:
        """A request must have the server's token or, if the server has none, must come from this
        machine and not from a web page."""
        if token is None and not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(
                403,
                f"requests from web pages are refused; set {TOKEN_VARIABLE} to allow other callers",
            )
        if token is not None and not has_token(headers.get("authorization"), token):
            raise Refused(
                401, f"expected the token of {TOKEN_VARIABLE}: Authorization: Bearer TOKEN"
            )
        return ""

    def score(incoming: Incoming) -> tuple[int, dict[str, Any]]:
        left_s = _seconds(incoming.headers.get(TIME_LEFT_HEADER, "inf"))
        if left_s is None:
            raise Refused(400, f"{TIME_LEFT_HEADER}: expected seconds above 0")
        return rewards.answer(incoming.content, incoming.since + WAIT_SHARE * left_s)

    rules = Rules(
        "A reward server of mrl",
        "docs/rewards.md",
        allow,
        security=None if token is None else BEARER,
        needs_length=True,
    )
    api = Api(rules, LIMITS)
    api.describe_at("/openapi.json")
    api.add("POST", "/{path:path}", score, Call)
    api.add("GET", "/{path:path}", lambda incoming: {"reward": rewards.spec})
    return api


def _seconds(text: str) -> float | None:
    """Return the number of seconds in a header; None if the header is not a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if seconds > 0 else None


def _checked(request: Any) -> dict[str, Any]:
    """Return a copy of the request that has only the known keys. Raises ValueError if the request
    is invalid."""
    if not isinstance(request, dict):
        raise ValueError("expected a JSON object")
    prompts, completions = request.get("prompts"), request.get("completions")
    columns = request.get("columns", {})
    if not isinstance(completions, list) or any(not isinstance(c, str) for c in completions):
        raise ValueError("completions must be a list of strings")
    if not isinstance(columns, dict):
        raise ValueError("columns must be an object")
    for name in ("prompts", "completions"):
        if name in columns:
            raise ValueError(
                f"columns has {name}, which is an argument of its own; rename the column"
            )
    for name, values in {**columns, "prompts": prompts}.items():
        if not isinstance(values, list) or len(values) != len(completions):
            raise ValueError(f"{name} must be a list of {len(completions)}, one per completion")
    return {"prompts": prompts, "completions": completions, "columns": columns}
