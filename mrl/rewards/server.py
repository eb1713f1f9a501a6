"""Serves a reward function over HTTP, in killable workers: the other end of `mrl/rewards/remote.py`.

GET answers `{"reward": SPEC}` when it is up. A POST goes to the first of the workers that is free; a
function that hangs is killed after the time limit and the answer is status 500. Standard library only.
"""

from __future__ import annotations

import ipaddress
import json
import queue
import socket
import socketserver
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from mrl.errors import InputError
from mrl.processes import Closing
from mrl.rewards.base import call_worker, reward_worker

MAX_BODY_BYTES = 1 << 30


class _Lane:
    """One worker and the thread it lives with: it dies with the thread that started it."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._worker = reward_worker(spec, timeout_s)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._worker.start).result()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the worker says, or `error` with why there is nothing."""
        return self._thread.submit(call_worker, self._worker, request, self._timeout_s).result()

    def close(self) -> None:
        self._worker.close()
        self._thread.shutdown()


class RewardServer(Closing):
    """Listens from the start; `serve()` answers until another thread calls `stop()`.

    Raises InputError where the reward cannot be loaded or the address is taken.
    """

    def __init__(
        self, spec: str, host: str, port: int, *, num_workers: int, timeout_s: float
    ) -> None:
        self._stack = ExitStack()
        self._free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self.spec = spec
        try:
            self._http = _Server((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {host}:{port}: {error}; choose another") from None
        self._http.rewards = self
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
        """With the port that was found, where 0 was asked for; of all addresses, the machine's name."""
        host, port = str(self._http.server_address[0]), self._http.server_port
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{host}:{port}"

    def serve(self) -> None:
        """Until `stop()`, or an exception in this thread such as KeyboardInterrupt."""
        self._http.serve_forever()

    def stop(self) -> None:
        """End `serve()`, which runs in another thread."""
        self._http.shutdown()

    def close(self) -> None:
        """Kill the workers, free the port. Harmless when repeated."""
        self._stack.close()

    def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and message for one POST."""
        try:
            request = _checked(json.loads(body))
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"not a request for rewards: {error}"}
        lane = self._free.get()
        try:
            reply = lane.call(request)
        finally:
            self._free.put(lane)
        return (500 if "error" in reply else 200), reply


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    rewards: RewardServer

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps the connection open
    wbufsize = -1  # head and body in one packet: the second would wait 40 ms for the first

    def do_GET(self) -> None:
        self._send(200, {"reward": self._rewards().spec})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # the body is still in the pipe
            self._send(411, {"error": f"expected a Content-Length of at most {MAX_BODY_BYTES}"})
            return
        self._send(*self._rewards().answer(self.rfile.read(int(length))))

    def _rewards(self) -> RewardServer:
        assert isinstance(self.server, _Server)
        return self.server.rewards

    def _send(self, status: int, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """One line a call would bury what the function prints."""


def _checked(request: Any) -> dict[str, Any]:
    """The request as the worker takes it. Raises ValueError."""
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
