"""Connections between the monitors of several nodes: known messages arrive, all others are refused."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from mrl.system.heartbeat import LEFT, Collective, Pulse
from mrl.watch import connection as connections
from mrl.watch.connection import Connection, MonitorServer, Node, connect, report_of
from mrl.watch.monitor import lost_node
from mrl.watch.verdict import Limits, Observation, Watch

LAST = Collective("all_reduce", "EXPERT_MODEL_PARALLEL_GROUP of 2 ranks", 77, False)
SEEN = {
    2: Observation(Pulse("train", 3, 9, 40), "R", LAST),
    3: Observation(Pulse("rollout", 3, 8, 20), "T"),
}


@pytest.fixture
def head() -> Iterator[MonitorServer]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield MonitorServer(server, "secret", [Node("there", [2, 3])])


def address_of(head: MonitorServer) -> tuple[str, int]:
    host, port = head._server.getsockname()
    return host, port


def joined(head: MonitorServer, token: str = "secret", number: int = 0) -> Connection:
    line = connect(address_of(head), token, number)
    assert line is not None
    return line


def until(condition: Callable[[], object], head: MonitorServer) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        head.poll(0.0)
        assert time.monotonic() < deadline


def test_what_the_ranks_of_a_node_show_reaches_the_head(head: MonitorServer) -> None:
    node = head.nodes[0]
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: node.seen == SEEN, head)
    head.ask_for_stacks(12)
    got: list[dict[str, object]] = []
    until(lambda: got.extend(there.receive()) or got, head)
    assert got == [{"write_stacks": 12}]
    there.send({"stacks": {"2": "x" * 100_000, "3": "y", "9": "of no rank here"}})
    assert head.stacks(30) == {2: "x" * 100_000, 3: "y"}
    head.ask_for_stacks(40)
    assert head.stacks(0.1) == {}  # until they come again
    assert not head.nodes[0].has_left
    there.send({"bye": True})
    there.finish()
    until(lambda: head.nodes[0].has_left, head)


def test_a_silent_node_is_lost_and_one_that_said_bye_is_not(head: MonitorServer) -> None:
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: head.nodes[0].seen == SEEN, head)
    head.poll(connections.SILENT_S)
    assert head.lost() is None
    head.poll(0.5)
    found = lost_node(head)
    assert found is not None
    assert found.text() == (
        "node there (ranks 2, 3) sends nothing: 60.5 s, at most 60 s; before, rank 2 was in phase "
        "train of step 3"
    )
    there.send({"bye": True})
    until(lambda: head.nodes[0].has_left, head)
    assert {each.pulse.phase for each in head.nodes[0].seen.values()} == {LEFT}
    head.poll(100.0)
    assert head.lost() is None
    assert not head.is_behind


def test_what_a_quiet_node_said_last_is_too_old(head: MonitorServer) -> None:
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: head.nodes[0].was_heard, head)
    head.poll(connections.QUIET_S)
    assert not head.is_behind
    head.poll(0.5)
    assert head.is_behind
    there.send(report_of(SEEN))
    until(lambda: not head.is_behind, head)


def test_a_node_that_never_reaches_the_head_is_named_once_and_is_not_lost(
    head: MonitorServer,
) -> None:
    head.poll(connections.SILENT_S + 1)
    assert not head.is_behind
    assert head.lost() is None
    assert head.unreached() == head.nodes
    assert head.unreached() == []
    follower = Watch(Limits({"start": 1.0}, {}, 1.0))
    shown = [Observation(Pulse("start", -1, 1, 1), "S"), *head.nodes[0].seen.values()]
    assert follower.tick(1.0, shown) is None
    found = follower.tick(1.0, shown) or follower.tick(1.0, shown)
    assert found is not None
    assert found.rank == 0  # and not one of which nothing is known


@pytest.mark.parametrize(
    "data",
    [
        b'{"token": "wrong", "node": 0}\n',
        b'{"token": "secret", "node": 1}\n',
        b'{"token": "secret", "node": -1}\n',
        b'{"token": "secret", "node": "0"}\n',
        b'{"token": 7}\n',
        b"[]\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95" + bytes(range(256)) + b"\n",
        b"[" * 100_000 + b"\n",
        b"x" * (connections.MAX_BYTES + 1),
    ],
)
def test_strangers_are_turned_away(head: MonitorServer, data: bytes) -> None:
    good = joined(head)
    good.send(report_of(SEEN))
    until(lambda: head.nodes[0].seen == SEEN, head)
    with closing(socket.create_connection(address_of(head))) as stranger:
        stranger.setblocking(False)
        left, deadline, is_closed = data, time.monotonic() + 30, False
        while not is_closed:
            assert time.monotonic() < deadline
            try:
                left = left[stranger.send(left) :] if left else left
            except BlockingIOError:
                pass
            except OSError:
                break
            head.poll(0.0)
            try:
                is_closed = stranger.recv(1) == b""
            except BlockingIOError:
                continue
            except OSError:
                break
    assert head.nodes[0].seen == SEEN
    good.send(report_of(SEEN))
    head.nodes[0].silent_s = 9.0
    until(lambda: head.nodes[0].silent_s == 0.0, head)  # the good connection is still open


@pytest.mark.parametrize(
    "message",
    [
        {"ranks": {"2": [*SEEN[2]]}},
        {"ranks": {"2": [*SEEN[2]], "3": [["train", "3", 9, 40], "R", LAST]}},
        {"ranks": {"2": [*SEEN[2]], "3": [["train", 3, 9, 40], "R", ["x", "y", 3, "z"]]}},
        {"ranks": {"2": [{"phase": 7}, "R"], "3": []}},
        {"ranks": 7},
        {"stacks": {"a": "b"}},
        {},
    ],
)
def test_a_bad_message_of_a_node_closes_its_connection(
    head: MonitorServer, message: dict[str, object]
) -> None:
    before = dict(head.nodes[0].seen)
    there = joined(head)
    there.send(message)
    node = head.nodes[0]
    until(lambda: node.connection is not None and not node.connection.is_open, head)
    assert node.seen == before
    joined(head).send(report_of(SEEN))
    until(lambda: node.seen == SEEN, head)  # it may connect anew


def test_many_connections_that_say_nothing_keep_no_node_out(head: MonitorServer) -> None:
    mute = [
        socket.create_connection(address_of(head))
        for _ in range(2 * connections.MAX_UNAUTHENTICATED)
    ]
    joined(head).send(report_of(SEEN))
    until(lambda: head.nodes[0].seen == SEEN, head)
    for each in mute:
        each.close()


def test_random_bytes_never_raise(head: MonitorServer) -> None:
    for size in (1, 10, 1000):
        with closing(socket.create_connection(address_of(head))) as stranger:
            stranger.sendall(os.urandom(size) + b"\n")
            stranger.sendall(json.dumps({"token": "secret"}).encode() + b"\n")
            for _ in range(20):
                head.poll(0.0)
    assert head.nodes[0].connection is None
