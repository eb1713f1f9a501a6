"""Frames between the trainer and a worker: whole, bounded, and never from a stranger."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mrl.engine_pool.remote.wire import MAX_BODY, Wire, WireClosed, is_token

SIZES = struct.Struct("!IQ")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def test_messages_and_bodies_arrive_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(Wire, ends)
    body = bytes(range(256)) * 20_000
    sender = threading.Thread(target=lambda: (one.send({"n": 1}), one.send({"n": 2}, body)))
    sender.start()
    assert other.receive() == ({"n": 1}, b"")
    assert other.receive() == ({"n": 2}, body)
    sender.join()


def test_a_closed_wire_ends_the_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(Wire, ends)
    one.close()
    with pytest.raises(WireClosed):
        other.receive()
    assert one.is_closed
    assert other.is_closed
    with pytest.raises(WireClosed):
        one.send({})


@pytest.mark.parametrize(
    ("head", "num_body"), [(b"x" * 5000, 0), (b"{}", 1), (b"[]", 0), (b"{", 0), (b"[" * 4000, 0)]
)
def test_a_stranger_may_send_one_short_message_only(
    head: bytes, num_body: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    stranger, other = ends[0], Wire(ends[1], is_trusted=False)
    stranger.sendall(SIZES.pack(len(head), num_body) + head)
    with pytest.raises(WireClosed):
        other.receive()
    assert other.is_closed


def test_sizes_that_lie_take_no_memory(ends: tuple[socket.socket, socket.socket]) -> None:
    other = Wire(ends[1])
    ends[0].sendall(SIZES.pack(2, MAX_BODY) + b"{}" + b"a few bytes")
    ends[0].close()
    with pytest.raises(WireClosed):
        other.receive()


def test_frames_beyond_the_limits_are_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    other = Wire(ends[1])
    ends[0].sendall(SIZES.pack(2, MAX_BODY + 1) + b"{}")
    with pytest.raises(WireClosed, match="a frame of 2 and"):
        other.receive()
    with pytest.raises(ValueError, match="expected at most"):
        Wire(ends[0]).send({"text": "x" * (1 << 20)})


def test_tokens() -> None:
    assert is_token("secret", "secret")
    assert not is_token("secreT", "secret")
    assert not is_token(None, "secret")
    assert not is_token(json.loads('"\\ud800"'), "secret")
