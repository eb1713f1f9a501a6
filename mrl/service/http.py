"""Serves JSON over HTTP on listening sockets.

Each connection carries one request, and each part of the request has a size limit. Input that is
not a valid request is answered with one line of JSON, `{"error": ...}`, and a status from 400 to
499. The parser is deliberately small and strict: it accepts only the forms that mrl's own clients
send. It uses only the standard library.
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
from typing import Any

from mrl.errors import InputError
from mrl.service.callers import Callers, Limits, Refused
from mrl.system.http_callers import drain, has_token, is_of_this_machine
from mrl.system.json_text import each_key_once
from mrl.system.processes import Closing

REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([ -~\t]*?)[ \t]*")
OPERATIONS = re.compile(r"/tenants/[a-z0-9_-]{1,63}/operations")
PLAIN = re.compile(rb"[\t\r\n -~]*")
MAX_ERROR_CHARS = 2000
LARGEST = {bool: 2, int: 1 << 63, float: float("inf")}
"""Exclusive upper bound on the absolute value of a number, by type. Integers such as seeds and
sizes have 64 bits."""
BACKLOG = 1024
"""The backlog of listen(): how many connections the kernel holds until the server accepts them."""
ANSWER_S = 5.0
"""Seconds within which a caller must receive its answer."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """The path as it was sent, including any query string; percent-encoding is not decoded."""
    body: dict[str, Any] | None
    """The JSON object of the body; None if the request has no body."""


class JsonServer(Closing):
    """Calls `answer` for each request, in a thread of its own, and sends the status and the JSON
    object that `answer` returns.

    If `answer` raises Refused, the status and message of Refused are sent. Any other exception is
    printed and answered with status 500.
    """

    def __init__(
        self, answer: Callable[[Request], tuple[int, dict[str, Any]]], limits: Limits | None = None
    ) -> None:
        self._answer, self._limits = answer, limits or Limits()
        self._listening: list[tuple[socket.socket, threading.Thread]] = []
        self._is_closed = False

    def listen(self, listener: socket.socket, token: str | None = None) -> None:
        """Answer callers of a bound socket from now on. If `token` is given, callers must send
        it."""
        listener.listen(BACKLOG)
        thread = threading.Thread(target=self._accept, args=(listener, token), daemon=True)
        self._listening.append((listener, thread))
        thread.start()

    def close(self) -> None:
        """Accept no more connections. Harmless when repeated."""
        self._is_closed = True
        for listener, thread in self._listening:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            thread.join()
            listener.close()

    def _accept(self, listener: socket.socket, token: str | None) -> None:
        callers = Callers(self._limits)
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.05)  # such as too many open files, which must not end the service
                continue
            arguments = (connection, token, callers)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, connection: socket.socket, token: str | None, callers: Callers) -> None:
        with connection, suppress(OSError):  # the caller may be gone
            try:
                reader = RequestReader(connection, self._limits)
                with callers.awaiting(connection, "head"):
                    reader.read_head(token)
                callers.check_room()  # refuse before the body is sent
                with callers.awaiting(connection, "body"):
                    request = reader.read_body()
                with callers.answering():
                    answer = self._answered(request)
                with callers.awaiting(connection, "answer"):
                    _send(connection, *answer)
            except Refused as refusal:
                _send(connection, refusal.status, {"error": str(refusal)})
                drain(connection)

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


class RequestReader:
    """Reads one request. Time limits are in seconds since the connection was accepted.

    `read_head` and `read_body` raise Refused for a bad request, and OSError if the caller is gone.
    """

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._connection, self._limits, self._start = connection, limits, time.monotonic()
        self._data = bytearray()
        """The bytes that have arrived and are not parsed yet. They belong to the head of the
        request at first, and later to its body."""
        self._method = self._path = ""
        self._headers: dict[str, str] = {}

    def read_head(self, token: str | None) -> None:
        """Read the request line and the headers, and check the token. The caller is authorized once
        this returns."""
        most = self._limits.head_bytes
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            if len(self._data) > most:
                break
            if not PLAIN.fullmatch(self._data):
                raise Refused(400, "the head of the request is no printable ASCII text")
            self._receive(self._limits.head_s)
        if not 0 <= end <= most:
            raise Refused(431, f"the head of the request has more than {most} bytes")
        first, *lines = bytes(self._data[:end]).split(b"\r\n")
        del self._data[: end + 4]
        if (asked := REQUEST.fullmatch(first)) is None:
            raise Refused(400, "the first line is not METHOD /PATH HTTP/1.1")
        self._headers = headers = _headers(lines, self._limits.num_headers)
        if not is_of_this_machine(headers.get("host"), headers.get("origin")):
            raise Refused(403, "not for web pages: leave Origin out and call localhost")
        if token is not None and not has_token(headers.get("authorization"), token):
            raise Refused(401, "expected the header Authorization: Bearer TOKEN")
        self._method, self._path = (part.decode() for part in asked.groups())

    def read_body(self) -> Request:
        """Read the body and return the request. Call `read_head` first."""
        limits, headers = self._limits, self._headers
        if "transfer-encoding" in headers:
            raise Refused(411, "send the body with a Content-Length, and not in chunks")
        length = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,15}", length):
            raise Refused(400, "Content-Length is not a number of bytes")
        most = limits.operation_bytes if OPERATIONS.fullmatch(self._path) else limits.body_bytes
        if int(length) > most:
            raise Refused(413, f"the body has {length} bytes; at most {most} are read")
        if headers.get("expect", "").lower() == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._data) < int(length):
            self._receive(limits.request_s)
        if len(self._data) > int(length):
            raise Refused(400, f"more bytes follow than the Content-Length of {int(length)}")
        body = read_object(self._data, limits.depth) if self._data else None
        return Request(self._method, self._path, body)

    def _receive(self, limit_s: float) -> None:
        try:
            left_s = self._start + limit_s - time.monotonic()
            self._connection.settimeout(max(1e-3, left_s))
            part = self._connection.recv(1 << 16)
        except TimeoutError:
            raise Refused(408, "the request did not arrive in time; send it at once") from None
        if not part:
            raise Refused(400, "the connection ended before the request did")
        self._data += part


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


def read_object(body: bytes | bytearray, depth: int) -> dict[str, Any]:
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
    """Raise ValueError if a value is nested too deeply, or contains a number that is too large, the
    character NUL, or text that cannot be encoded in UTF-8."""
    if depth < 0:
        raise ValueError("objects and lists lie too deep in each other")
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError
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
    """Send an answer whose body is a JSON object in one line. Raises OSError if the caller does not
    receive it."""
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
