"""Answers JSON over HTTP on listening sockets: one request a connection, everything of it bounded.

Whatever comes that is no request gets one line of JSON, `{"error": ...}`, with a status of 400 to 499.
The parser is small and strict on purpose: it knows the few forms that clients of ours send, and no
other. Standard library only.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from mrl.errors import InputError
from mrl.system.http_callers import drain, has_token, is_of_this_machine
from mrl.system.json_text import each_key_once
from mrl.system.processes import Closing
from mrl.tenants.callers import TOO_MANY, Callers, Limits, Refused

REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([ -~\t]*?)[ \t]*")
OPERATIONS = re.compile(r"/tenants/[a-z0-9_-]{1,63}/operations")
PLAIN = re.compile(rb"[\t\r\n -~]*")
MAX_ERROR_CHARS = 2000
LARGEST = {bool: 2, int: 1 << 63, float: float("inf")}
"""Numbers of these types are smaller: seeds and sizes have 64 bits."""
BACKLOG = 1024
"""The backlog of listen(): connections that the kernel holds until they are accepted, which is at
once."""
ANSWER_S = 5.0
"""Seconds in which a caller has to take its answer."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """The path as it was sent, with a query if there is one; nothing is decoded."""
    body: dict[str, Any] | None
    """The JSON object of the body; None where there is no body."""


class JsonServer(Closing):
    """Gives each request of its listeners to `answer`, in a thread of its own, and sends what that
    returns: a status and a JSON object. What `answer` raises is status 500, and is printed."""

    def __init__(
        self, answer: Callable[[Request], tuple[int, dict[str, Any]]], limits: Limits | None = None
    ) -> None:
        self._answer, self._limits = answer, limits or Limits()
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def listen(self, listener: socket.socket, token: str | None = None) -> None:
        """Answer callers of a bound socket from now on; `token` is what they must send."""
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        thread = threading.Thread(target=self._accept, args=(listener, token), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Accept nobody any more. Harmless when repeated."""
        self._is_closed = True
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket, token: str | None) -> None:
        callers = Callers(self._limits)
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.05)  # of too many open files, say: nothing that ends the service
                continue
            callers.enter(connection)
            arguments = (connection, token, callers)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, connection: socket.socket, token: str | None, callers: Callers) -> None:
        with connection, suppress(OSError):  # the caller may be gone
            try:
                self._read_and_answer(connection, token, callers)
            except Refused as refusal:
                _send(connection, refusal.status, {"error": str(refusal)})
                drain(connection)

    def _read_and_answer(
        self, connection: socket.socket, token: str | None, callers: Callers
    ) -> None:
        """Answer one caller. Raises Refused."""
        source = _Source(connection)
        try:
            head = read_head(source, self._limits, token)
        except Refused:
            if callers.leave(connection):
                raise Refused(503, TOO_MANY) from None
            raise
        except OSError:
            callers.leave(connection)
            raise
        callers.leave(connection)
        callers.check_room()  # refuse before the body is sent
        with callers.awaiting(connection, "body"):
            request = read_body(connection, source, self._limits, head)
        with callers.answering():
            answer = self._answered(request)
        with callers.awaiting(connection, "answer"):
            _send(connection, *answer)

    def _answered(self, request: Request) -> tuple[int, dict[str, Any]]:
        try:
            return self._answer(request)
        except Refused as refusal:
            return refusal.status, {"error": str(refusal)}
        except Exception as error:
            traceback.print_exception(error)
            return 500, {
                "error": f"{type(error).__name__}, which mrl does not foresee; see its log"
            }


class Head(NamedTuple):
    """The head of a request, whose caller is authorized."""

    method: str
    path: str
    headers: dict[str, str]
    rest: bytes
    """The part of the body that arrived with it."""


def read_head(source: _Source, limits: Limits, token: str | None) -> Head:
    """Read the head of a request. Raises Refused, and OSError if the caller is gone."""
    head, rest = source.head(limits.head_bytes, limits.head_s)
    first, *lines = head.split(b"\r\n")
    if (asked := REQUEST.fullmatch(first)) is None:
        raise Refused(400, "the first line is not METHOD /PATH HTTP/1.1")
    headers = _headers(lines, limits.num_headers)
    if not is_of_this_machine(headers.get("host"), headers.get("origin")):
        raise Refused(403, "not for web pages: leave Origin out and call localhost")
    if token is not None and not has_token(headers.get("authorization"), token):
        raise Refused(401, "expected the header Authorization: Bearer TOKEN")
    method, path = (part.decode() for part in asked.groups())
    return Head(method, path, headers, rest)


def read_body(connection: socket.socket, source: _Source, limits: Limits, head: Head) -> Request:
    """Read the rest of a request. Raises as `read_head` does."""
    headers = head.headers
    if "transfer-encoding" in headers:
        raise Refused(411, "send the body with a Content-Length, and not in chunks")
    length = headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,15}", length):
        raise Refused(400, "Content-Length is not a number of bytes")
    most = limits.operation_bytes if OPERATIONS.fullmatch(head.path) else limits.body_bytes
    if int(length) > most:
        raise Refused(413, f"the body has {length} bytes; at most {most} are read")
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = source.body(head.rest, int(length), limits.request_s)
    return Request(head.method, head.path, _object(body, limits.depth) if body else None)


class _Source:
    """Reads from a connection; time limits are in seconds since the connection was accepted."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._start, self._limit_s = connection, time.monotonic(), 0.0

    def head(self, most: int, limit_s: float) -> tuple[bytes, bytes]:
        """Return the lines before the first empty one, and what came with them of the body."""
        data, self._limit_s = b"", limit_s
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > most:
                raise Refused(431, f"the head of the request has more than {most} bytes")
            if not PLAIN.fullmatch(data):
                raise Refused(400, "the head of the request is no printable ASCII text")
            data += self._more()
        if end > most:
            raise Refused(431, f"the head of the request has more than {most} bytes")
        return data[:end], data[end + 4 :]

    def body(self, data: bytes, length: int, limit_s: float) -> bytes:
        """Return `length` bytes, the first of which are `data`."""
        parts, num_bytes, self._limit_s = [data], len(data), limit_s
        while num_bytes < length:
            parts.append(self._more())
            num_bytes += len(parts[-1])
        if num_bytes > length:
            raise Refused(400, f"more bytes follow than the Content-Length of {length}")
        return b"".join(parts)

    def _more(self) -> bytes:
        try:
            left_s = self._start + self._limit_s - time.monotonic()
            self._connection.settimeout(max(1e-3, left_s))
            part = self._connection.recv(1 << 16)
        except TimeoutError:
            raise Refused(408, "the request did not arrive in time; send it at once") from None
        if not part:
            raise Refused(400, "the connection ended before the request did")
        return part


def _headers(lines: list[bytes], most: int) -> dict[str, str]:
    if len(lines) > most:
        raise Refused(431, f"the request has more than {most} headers")
    found: dict[str, str] = {}
    for line in lines:
        if (header := HEADER.fullmatch(line)) is None:
            raise Refused(400, "a header is not NAME: VALUE in one line")
        name, value = (part.decode() for part in header.groups())
        if name.lower() in found:
            raise Refused(400, f"the header {name} is there twice")
        found[name.lower()] = value
    return found


def _object(body: bytes, depth: int) -> dict[str, Any]:
    """Return the JSON object that `body` holds. Raises Refused."""
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=each_key_once, parse_constant=_no_constant
        )
        _check(value, depth)
    except RecursionError:
        raise Refused(400, f"the body has more than {depth} levels") from None
    except (InputError, ValueError) as error:
        raise Refused(400, f"the body is not JSON that is read here: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body is a {type(value).__name__}; expected a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check(value: Any, depth: int) -> None:
    """Raise ValueError for what lies too deep, and for text that is fit for no path or file."""
    if depth < 0:
        raise ValueError("objects and lists lie too deep in each other")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair raises UnicodeEncodeError
        if "\0" in value:
            raise ValueError("a text has the character NUL")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key, depth)
            _check(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) < LARGEST[type(value)]:
        raise ValueError("a number is too large")


def _send(connection: socket.socket, status: int, message: dict[str, Any]) -> None:
    """Send a JSON object as one line. Raises OSError where nobody takes it."""
    if "error" in message:
        message = {"error": " ".join(str(message["error"]).split())[:MAX_ERROR_CHARS]}
    body = json.dumps(message).encode() + b"\n"
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(["WWW-Authenticate: Bearer"] if status == 401 else []),
    ]
    connection.settimeout(ANSWER_S)
    connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
