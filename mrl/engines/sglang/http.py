"""A client for JSON over HTTP on loopback, and the time limits of control calls.

The client sends the API key with every request. A control call has one answer; a weight
update consists of such calls. generate() reads a stream of answers instead.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

TIMES_LONGEST = 5
"""The time limit of a control call, as a multiple of the longest time that a call to the same path
took."""


class ServerError(RuntimeError):
    """The server refused a request. The error has the server's message and the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Opens a connection for each request, because requests are few and long, and the server closes
    idle connections."""

    def __init__(self, port: int, api_key: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Send a GET and return (status, body) for any status. Raises OSError if there is no server."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        """Post a JSON body and return the decoded answer.

        Raises ServerError for a status other than 200 or a `success` that is not true, TimeoutError
        after `timeout_s`, ConnectionError if the server closes the connection.
        """
        status, answer = self._request("POST", path, json.dumps(body).encode(), timeout_s)
        text = answer[:2000].decode(errors="replace")
        if status != 200:
            raise ServerError(f"POST {path}: status {status}, expected 200: {text}", status)
        try:
            decoded = json.loads(answer) if answer.strip() else None
        except json.JSONDecodeError:
            return text  # flush_cache and a few others answer with plain text.
        if isinstance(decoded, dict) and decoded.get("success", True) is not True:
            raise ServerError(f"POST {path}: the server reports no success: {text}", status)
        return decoded

    def stream(self, path: str, body: dict[str, Any], *, timeout_s: float) -> EventStream:
        """Post a JSON body, and return the answer as a stream of events. `timeout_s` limits connecting
        and sending, but not the answer. Raises the errors of post(), some of them only while the stream
        is read."""
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
    """The server-sent events of one answer. One thread iterates, and another may close the stream."""

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
        """Yield decoded events. Raises ServerError if the server refuses, ConnectionError if it closes
        the connection before the last event."""
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
        """Close the connection. The server then aborts the requests, and an iteration that waits for an
        event ends with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class CallTimeouts:
    """Time limits of control calls, learned from earlier calls. They are kept when the engine is
    started again.

    Until a control call is done, the scheduler sends nothing, so only the time that the call takes
    distinguishes a slow engine from one that hangs.
    """

    def __init__(self, first_s: float, least_s: float) -> None:
        """`first_s` is the time limit in seconds of the first call to each path. No limit is shorter
        than `least_s`."""
        self._first_s = max(first_s, least_s)
        self.least_s = least_s
        self._longest_s: dict[str, float] = {}

    def limit_s(self, path: str) -> float:
        """Return the time limit in seconds of a call to `path`. The query string is ignored."""
        longest_s = self._longest_s.get(_without_query(path))
        if longest_s is None:
            return self._first_s
        return max(self.least_s, TIMES_LONGEST * longest_s)

    def note(self, path: str, seconds: float) -> None:
        """Record that a call to `path` was answered after `seconds`."""
        name = _without_query(path)
        self._longest_s[name] = max(seconds, self._longest_s.get(name, 0.0))


def _without_query(path: str) -> str:
    return path.partition("?")[0]
