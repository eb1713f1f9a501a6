"""Serves a reward function over HTTP; `mrl/rewards/remote.py` is the client.

The function runs in worker processes that can be killed. GET returns `{"reward": SPEC}`. A POST is
handled by the first free worker. A worker whose function hangs is killed after the time limit, and
the answer has status 500. If no worker becomes free within a quarter of the seconds in the header
`X-Timeout-S`, or within the time limit of a call if that is shorter, the answer has status 503.

A server on an address other than loopback must have a token. If the server has a token, a request
without the token gets status 401. If the server has no token, a request from a web page gets status
403. Only the standard library is needed.
"""

from __future__ import annotations

import ipaddress
import json
import math
import queue
import socket
import socketserver
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from mrl.errors import InputError
from mrl.rewards.remote import TIME_LEFT_HEADER, TOKEN_VARIABLE
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.system.http_callers import drain, has_token, is_of_this_machine
from mrl.system.processes import Closing

MAX_BODY_BYTES = 1 << 30
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
        try:
            self._http = _Server(host, port, self)
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {host}:{port}: {error}; choose another") from None
        self._stack.callback(self._http.server_close)
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
        host, port = str(self._http.server_address[0]), self._http.server_port
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{host}:{port}"

    def serve(self) -> None:
        """Answer requests until another thread calls `stop()`.

        An exception in this thread, such as KeyboardInterrupt, also ends the call.
        """
        self._http.serve_forever()

    def stop(self) -> None:
        """End `serve()`, which runs in another thread."""
        self._http.shutdown()

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


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, rewards: RewardServer) -> None:
        self.rewards = rewards
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the address. Raises InputError if the address is not loopback and there is no token."""
        given = self.server_address[0]
        socketserver.TCPServer.server_bind(self)  # HTTPServer's version does a DNS lookup
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        if self.rewards.token is None and not ipaddress.ip_address(self.server_name).is_loopback:
            raise InputError(
                f"address {given!r} is open to other machines, so callers need a token: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) here, and the same value for the run"
            )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep the connection open
    wbufsize = -1  # one packet for head and body avoids a 40 ms delay

    def do_GET(self) -> None:
        if self._is_allowed():
            self._send(200, {"reward": self._rewards().spec})

    def do_POST(self) -> None:
        start = time.monotonic()
        if not self._is_allowed():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._refuse(411, f"expected a Content-Length of at most {MAX_BODY_BYTES}")
            return
        left_s = _seconds(self.headers.get(TIME_LEFT_HEADER, "inf"))
        if left_s is None:
            self._refuse(400, f"{TIME_LEFT_HEADER}: expected seconds above 0")
            return
        body = self.rfile.read(int(length))
        self._send(*self._rewards().answer(body, start + WAIT_SHARE * left_s))

    def _is_allowed(self) -> bool:
        """Return whether the request may be answered; otherwise answer it with 401 or 403.

        A request must have the server's token or, if the server has none, must come from this machine
        and not from a web page.
        """
        token = self._rewards().token
        headers = self.headers
        if token is None and not is_of_this_machine(headers.get("Host"), headers.get("Origin")):
            self._refuse(
                403,
                f"requests from web pages are refused; set {TOKEN_VARIABLE} to allow other callers",
            )
            return False
        if token is None or has_token(headers.get("Authorization"), token):
            return True
        self._refuse(401, f"expected the token of {TOKEN_VARIABLE}: Authorization: Bearer TOKEN")
        return False

    def _refuse(self, status: int, why: str) -> None:
        """Answer with an error and close the connection, because the request's body was not read."""
        self.close_connection = True
        self._send(status, {"error": why})
        with suppress(OSError):
            self.wfile.flush()
        drain(self.connection)

    def _rewards(self) -> RewardServer:
        assert isinstance(self.server, _Server)
        return self.server.rewards

    def _send(self, status: int, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because one line per call would hide what the reward function prints."""


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
    for name, values in {**columns, "prompts": prompts}.items():
        if not isinstance(values, list) or len(values) != len(completions):
            raise ValueError(f"{name} must be a list of {len(completions)}, one per completion")
    return {"prompts": prompts, "completions": completions, "columns": columns}
