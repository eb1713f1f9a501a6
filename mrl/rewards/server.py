"""Serves a reward function over HTTP, in killable workers; `mrl/rewards/remote.py` is its client.

GET answers `{"reward": SPEC}` when it is up. A POST goes to the first of the workers that is free; a
function that hangs is killed after the time limit and the answer is status 500. Where no worker becomes
free in a quarter of the seconds that the header `X-Timeout-S` gives, or in the time limit if that is
less, it is 503. Off loopback a token is required; where there is one, a request without it gets 401.
Without one a request that a web page makes gets 403.
Standard library only.
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
"""The share of its client's time that a call may wait for a worker: the rest is the function's."""


class _Lane:
    """Keeps one worker together with its thread: a worker dies with the thread that started it."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._worker = reward_worker(spec, timeout_s)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._worker.start).result()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer, or `error` with the reason why there is none."""
        return self._thread.submit(call_worker, self._worker, request, self._timeout_s).result()

    def close(self) -> None:
        self._worker.close()
        self._thread.shutdown()


class RewardServer(Closing):
    """Listens from the start; `serve()` answers until another thread calls `stop()`.

    Raises InputError where the reward cannot be loaded, the address is taken, or others than this
    machine can reach it and there is no `token`.
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
        self._free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
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
                lane = _Lane(spec, timeout_s)
                self._stack.callback(lane.close)
                self._free.put(lane)
            undo.pop_all()

    @property
    def url(self) -> str:
        """The address for clients: with the port that was found where 0 was asked for, and with the
        machine's name where the server listens on all addresses."""
        host, port = str(self._http.server_address[0]), self._http.server_port
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{host}:{port}"

    def serve(self) -> None:
        """Serve until `stop()`, or until an exception in this thread such as KeyboardInterrupt."""
        self._http.serve_forever()

    def stop(self) -> None:
        """End `serve()`, which runs in another thread."""
        self._http.shutdown()

    def close(self) -> None:
        """Kill the workers and free the port. Harmless when repeated."""
        self._stack.close()

    def answer(self, body: bytes, wait_until: float = math.inf) -> tuple[int, dict[str, Any]]:
        """Return status and message for one POST; `wait_until` (for a worker) is on the monotonic
        clock."""
        try:
            request = _checked(json.loads(body))
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"not a request for rewards: {error}"}
        wait_s = min(wait_until - time.monotonic(), self._timeout_s)
        try:
            lane = self._free.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return 503, {
                "error": f"all {self._num_workers} workers are busy; "
                "start the server with more --workers"
            }
        try:
            reply = lane.call(request)
        finally:
            self._free.put(lane)
        return (500 if "error" in reply else 200), reply


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, rewards: RewardServer) -> None:
        self.rewards = rewards
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Raises InputError where it would need a token; it does not listen yet."""
        given = self.server_address[0]
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        if self.rewards.token is None and not ipaddress.ip_address(self.server_name).is_loopback:
            raise InputError(
                f"address {given!r} is open to other machines, so callers need a token: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) here, and the same value for the run"
            )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps the connection open
    wbufsize = -1  # head and body in one packet: the second would wait 40 ms for the first

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
        """Accept a request with the token, or of this machine where none is set; refuse the others."""
        token = self._rewards().token
        headers = self.headers
        if token is None and not is_of_this_machine(headers.get("Host"), headers.get("Origin")):
            self._refuse(403, f"not for web pages: set {TOKEN_VARIABLE} for callers elsewhere")
            return False
        if token is None or has_token(headers.get("Authorization"), token):
            return True
        self._refuse(401, f"expected the token of {TOKEN_VARIABLE}: Authorization: Bearer TOKEN")
        return False

    def _refuse(self, status: int, why: str) -> None:
        """Answer and close the connection: the body is still in the pipe."""
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
        """Log nothing: one line for each call would bury what the function prints."""


def _seconds(text: str) -> float | None:
    """Read the seconds of a header; None where that is no number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if seconds > 0 else None


def _checked(request: Any) -> dict[str, Any]:
    """Return the request as the worker takes it. Raises ValueError."""
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
            raise ValueError(f"{name} must be a list of {len(completions)}, one a completion")
    return {"prompts": prompts, "completions": completions, "columns": columns}
