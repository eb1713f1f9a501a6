"""A small real HTTP server that records what it is asked, and answers as SGLang does."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.http import HttpClient


class Recorder(ThreadingHTTPServer):
    """Knows `offered` paths beside the update's own, and fails `failing` ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.offered: tuple[str, ...] = ()
        self.failing = ""
        self.held: dict[str, str] = {}
        self.calls: list[tuple[str, dict]] = []
        self.on_update: Callable[[dict], None] = lambda body: None
        """What loads a bucket, before the answer."""


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._answer(405 if self.path in self.server.offered else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, body))
        if self.path == "/update_weights_from_tensor":
            self.server.on_update(body)
        if self.path == self.server.failing:
            self._answer(400, {"success": False, "message": "not today"})
        elif self.path == "/weights_checker":
            self._answer(200, {"success": True, "ranks": [{"checksums": self.server.held}]})
        else:
            self._answer(200, {"success": True})

    def _answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args) -> None:
        pass


class Client(ServerConnection):
    """The part of a connection that an update uses."""

    def __init__(self, port: int) -> None:
        self._http = HttpClient(port, "key")

    def post(self, path, body, *, timeout_s=10):
        return self._http.post(path, body, timeout_s=10)

    def offers(self, path):
        return self._http.get(path, timeout_s=10)[0] != 404
