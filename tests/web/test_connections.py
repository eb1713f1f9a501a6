"""Callers that are slow, half-closed, or ahead of their answers, at a server with short time limits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from starlette.responses import Response, StreamingResponse

from mrl.web.app import Api, Incoming, Rules
from mrl.web.limits import Limits
from mrl.web.server import HttpServer

LIMITS = Limits(answer_s=1.5, head_s=30.0, request_s=30.0, idle_s=30.0, stop_s=1)
SIZE = 24 << 20
"""Bytes of an answer: more than the buffers of the system hold."""


def stream(incoming: Incoming) -> Response:
    return StreamingResponse(b"x" * (1 << 20) for _ in range(SIZE >> 20))


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    api = Api(Rules("a test", "no page", lambda headers, path: "someone"), LIMITS)
    api.add("GET", "/small", lambda incoming: {})
    api.add("GET", "/large", lambda incoming: {"text": "x" * SIZE})
    api.add("GET", "/stream", stream)
    api.add("POST", "/length", lambda incoming: {"length": len(incoming.content)})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        with HttpServer(api.asgi, listener, LIMITS, name="a test"):
            yield place


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 20)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def rest(connection: socket.socket) -> bytes:
    """Return what is still received until the end of the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def test_an_answer_that_nobody_takes_is_given_up(address) -> None:
    """Also if the application sends it in parts, and if further requests follow, before or after the
    answer has begun."""
    ahead = get("/large") + get("/large") + get("/small")
    with ExitStack() as held:
        connections = [held.enter_context(connect(address)) for _ in range(4)]
        for connection, given in zip(
            connections, [get("/large"), get("/stream"), ahead, get("/large")], strict=True
        ):
            connection.sendall(given)
        assert connections[3].recv(1) == b"H"
        connections[3].sendall(get("/small"))
        time.sleep(2 * LIMITS.answer_s)
        for connection in connections:
            assert len(rest(connection)) < SIZE


def test_a_stream_that_is_read_slowly_but_steadily_is_sent_whole(address) -> None:
    with connect(address) as connection:
        connection.sendall(get("/stream"))
        start, size = time.monotonic(), 0
        while part := connection.recv(1 << 19):
            size += len(part)
            if part.endswith(b"\r\n0\r\n\r\n"):
                break
            time.sleep(0.05)
    assert size > SIZE
    assert time.monotonic() > start + LIMITS.answer_s


def test_the_end_of_requests_does_not_add_an_error_to_an_answer(address) -> None:
    """The caller closes its sending side while its answer is being sent."""
    with connect(address) as connection:
        connection.sendall(get("/large"))
        assert connection.recv(1) == b"H"
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        answer = rest(connection)
    assert answer.endswith(b'xxx"}\n')
    assert answer.count(b"HTTP/1.1") == 0


def test_who_sends_several_requests_and_no_more_gets_all_answers(address) -> None:
    with connect(address) as connection:
        chunked = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        posted = b"POST /length HTTP/1.1\r\nHost: localhost\r\n" + chunked
        head = b"HEAD /small HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(get("/none") + posted + head + get("/small"))
        connection.shutdown(socket.SHUT_WR)
        answers = rest(connection).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [404, 200, 405, 200]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers[1:]] == [
        b'{"length": 3}\n',
        b"",
        b"{}\n",
    ]
