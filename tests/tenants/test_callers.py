"""Callers of a socket of a service: those beyond the limit get their answer, and strangers keep nobody
out."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from mrl.service.client import ControlClient
from mrl.service.sockets import open_tcp, read_token
from mrl.web.app import Incoming
from mrl.web.limits import Limits
from mrl.web.unix_socket import connect_unix, open_unix
from tests.tenants.answering import JsonServer
from tests.tenants.test_control import exchange
from tests.waiting import LIMIT_S

GET, POST = (f"{method} /x HTTP/1.1\r\nHost: localhost\r\n".encode() for method in ("GET", "POST"))


def test_a_caller_beyond_the_limit_gets_its_answer_whatever_it_sends(tmp_path: Path) -> None:
    go_on = threading.Event()

    def answer(request: Incoming) -> tuple[int, dict[str, Any]]:
        go_on.wait(LIMIT_S)
        return 200, {}

    with JsonServer(answer, Limits(connections=2)) as server, ThreadPoolExecutor(2) as pool:
        server.listen(open_unix(tmp_path))
        client = ControlClient(tmp_path)
        answered = [pool.submit(client.call, "GET", "/x") for _ in range(2)]
        refused = 0
        while not refused:  # until both are there
            body = json.dumps({"text": "x" * 100_000}).encode()
            head = POST + f"Content-Length: {len(body)}\r\n\r\n".encode()
            if not any(each.running() for each in answered):
                continue
            connection = connect_unix(tmp_path, 0.5)
            with suppress(TimeoutError):  # it has the place of one that is not there yet
                status, message, _ = exchange(connection, head + body, 0.5)
                assert (status, "try again" in message["error"]) == (503, True)
                refused += 1
        go_on.set()
        assert [each.result() for each in answered] == [{}, {}]


def test_strangers_keep_nobody_out(tmp_path: Path) -> None:
    listener, token = open_tcp(0), read_token(tmp_path)
    with JsonServer(lambda request: (200, {}), Limits(unread=8)) as server, ExitStack() as held:
        server.listen(open_unix(tmp_path))
        server.listen(listener, token)
        strangers = [
            held.enter_context(socket.create_connection(listener.getsockname())) for _ in range(40)
        ]
        assert ControlClient(tmp_path).call("GET", "/x") == {}
        head = GET + f"Authorization: Bearer {token}\r\n\r\n".encode()
        assert exchange(socket.create_connection(listener.getsockname()), head)[0] == 200
        status, message, _ = exchange(strangers[0], b"")
        assert (status, "try again" in message["error"]) == (503, True)


def test_who_sends_no_body_or_takes_no_answer_keeps_nobody_out(tmp_path: Path) -> None:
    large = {"text": "x" * (4 << 20)}
    limits = Limits(unread=4, connections=4, request_s=LIMIT_S)
    no_body, no_taker = (
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    with JsonServer(lambda request: (200, large), limits) as server, ExitStack() as held:
        server.listen(open_unix(tmp_path))
        slow: list[socket.socket] = []
        for head in [no_body] * 6 + [no_taker] * 6:
            slow.append(held.enter_context(connect_unix(tmp_path, LIMIT_S)))
            slow[-1].sendall(head)
            if head is no_taker:
                assert slow[-1].recv(1) == b"H"  # of a large answer, whose rest it leaves
        for _ in range(8):
            assert ControlClient(tmp_path).call("POST", "/x", {"a": 1}) == large
        status, message, _ = exchange(slow[0], b"")  # it had to go, and was told so
        assert (status, "try again" in message["error"]) == (503, True)


def test_a_head_has_a_limit_of_its_own(tmp_path: Path) -> None:
    with JsonServer(lambda request: (200, {}), Limits(head_s=0.1, request_s=LIMIT_S)) as server:
        server.listen(open_unix(tmp_path))
        assert exchange(connect_unix(tmp_path, LIMIT_S), b"GET")[0] == 408
