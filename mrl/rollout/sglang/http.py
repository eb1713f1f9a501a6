"""This client speaks JSON over HTTP on loopback, with the API key on every request."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any


class ServerError(RuntimeError):
    """The server has answered with a refusal, whose status and message this error holds."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """One connection a request: the server closes idle ones, and they are few and long."""

    def __init__(self, port: int, api_key: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body, whatever the status. Raises OSError without a server."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        """Post a JSON body and return the decoded answer.

        Raises ServerError for a status other than 200 or a `success` that is not true, TimeoutError
        past the time limit, ConnectionError where the server goes away.
        """
        status, answer = self._request("POST", path, json.dumps(body).encode(), timeout_s)
        text = answer[:2000].decode(errors="replace")
        if status != 200:
            raise ServerError(f"POST {path}: status {status}, expected 200: {text}", status)
        try:
            decoded = json.loads(answer) if answer.strip() else None
        except json.JSONDecodeError:
            return text  # flush_cache and a few others answer in prose.
        if isinstance(decoded, dict) and decoded.get("success", True) is not True:
            raise ServerError(f"POST {path}: the server reports no success: {text}", status)
        return decoded

    def stream(self, path: str, body: dict[str, Any], *, timeout_s: float) -> EventStream:
        """Post within `timeout_s`, and read the answer event by event, without a limit. Raises as
        post() does, later too."""
        data = json.dumps(body).encode()
        return EventStream(self._port, path, data, self._headers, timeout_s)

    def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()


class EventStream:
    """A stream yields the server-sent events of one answer. One thread iterates, another may
    close it."""

    def __init__(
        self, port: int, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> None:
        self._what = f"POST {path}"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self._connection.request("POST", path, body, headers)
        self._socket.settimeout(None)  # the caller checks whether the server is alive

    def __iter__(self) -> Iterator[Any]:
        """Decoded events. Raises ServerError where the server refuses, ConnectionError where it
        goes away before the last one."""
        try:
            response = self._connection.getresponse()
            if response.status != 200:
                text = response.read(2000).decode(errors="replace")
                raise ServerError(
                    f"{self._what}: status {response.status}, expected 200: {text}", response.status
                )
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        status = event["error"].get("code", 500)
                        raise ServerError(f"{self._what}: {event['error']}", status)
                    yield event
            raise ConnectionError(f"{self._what}: the stream ended before [DONE]")
        except (http.client.HTTPException, json.JSONDecodeError, ValueError) as error:
            raise ConnectionError(f"{self._what}: {type(error).__name__} {error}") from error
        finally:
            self._connection.close()

    def close(self) -> None:
        """Hang up: the server aborts what it was working on, and a thread that reads wakes up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
