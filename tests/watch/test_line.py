"""The lines between the monitors of several nodes: what is known comes through, all else is refused."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from mrl.system.heartbeat import LEFT, Collective, Pulse
from mrl.watch import line as lines
from mrl.watch.line import Head, Line, Node, connect, report_of
from mrl.watch.monitor import lost_node
from mrl.watch.verdict import Limits, Seen, Watch

LAST = Collective("all_reduce", "EXPERT_MODEL_PARALLEL_GROUP of 2 ranks", 77, False)
SEEN = {2: Seen(Pulse("train", 3, 9, 40), "R", LAST), 3: Seen(Pulse("rollout", 3, 8, 20), "T")}


@pytest.fixture
def head() -> Iterator[Head]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Head(server, "secret", [Node("there", [2, 3])])


def address_of(head: Head) -> tuple[str, int]:
    host, port = head._server.getsockname()
    return host, port


def joined(head: Head, token: str = "secret", number: int = 0) -> Line:
    line = connect(address_of(head), token, number)
    assert line is not None
    return line


def until(condition: Callable[[], object], head: Head) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        head.poll(0.0)
        assert time.monotonic() < deadline


def test_what_the_ranks_of_a_node_show_reaches_the_head(head: Head) -> None:
    node = head.nodes[0]
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: node.seen == SEEN, head)
    head.tell({"write_stacks": True})
    got: list[dict[str, object]] = []
    until(lambda: got.extend(there.receive()) or got, head)
    assert got == [{"write_stacks": True}]
    there.send({"stacks": {"2": "x" * 100_000, "3": "y", "9": "of no rank here"}})
    assert head.stacks(30) == {2: "x" * 100_000, 3: "y"}
    assert not head.nodes[0].has_left
    there.send({"bye": True})
    there.finish()
    until(lambda: head.nodes[0].has_left, head)


def test_a_silent_node_is_lost_and_one_that_said_bye_is_not(head: Head) -> None:
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: head.nodes[0].seen == SEEN, head)
    head.poll(lines.SILENT_S)
    assert head.lost() is None
    head.poll(0.5)
    found = lost_node(head)
    assert found is not None
    assert found.text() == (
        "node there (ranks 2, 3) is not heard from: 60.5 s, at most 60 s; before, rank 2 was in phase "
        "train of step 3"
    )
    there.send({"bye": True})
    until(lambda: head.nodes[0].has_left, head)
    assert {each.pulse.phase for each in head.nodes[0].seen.values()} == {LEFT}
    head.poll(100.0)
    assert head.lost() is None
    assert not head.is_behind


def test_what_a_quiet_node_said_last_is_too_old(head: Head) -> None:
    there = joined(head)
    there.send(report_of(SEEN))
    until(lambda: head.nodes[0].was_heard, head)
    head.poll(lines.QUIET_S)
    assert not head.is_behind
    head.poll(0.5)
    assert head.is_behind
    there.send(report_of(SEEN))
    until(lambda: not head.is_behind, head)


def test_a_node_that_never_reaches_the_head_is_named_once_and_is_not_lost(head: Head) -> None:
    head.poll(lines.SILENT_S + 1)
    assert not head.is_behind
    assert head.lost() is None
    assert head.unreached() == head.nodes
    assert head.unreached() == []
    follower = Watch(Limits({"start": 1.0}, {}, 1.0))
    shown = [Seen(Pulse("start", -1, 1, 1), "S"), *head.nodes[0].seen.values()]
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
        b"x" * (lines.MAX_BYTES + 1),
    ],
)
def test_strangers_are_turned_away(head: Head, data: bytes) -> None:
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
    until(lambda: head.nodes[0].silent_s == 0.0, head)  # the good line still stands


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
def test_a_bad_message_of_a_node_closes_its_line(head: Head, message: dict[str, object]) -> None:
    before = dict(head.nodes[0].seen)
    there = joined(head)
    there.send(message)
    node = head.nodes[0]
    until(lambda: node.line is not None and not node.line.is_open, head)
    assert node.seen == before
    joined(head).send(report_of(SEEN))
    until(lambda: node.seen == SEEN, head)  # it may connect anew


def test_many_connections_that_say_nothing_keep_no_node_out(head: Head) -> None:
    mute = [socket.create_connection(address_of(head)) for _ in range(2 * lines.MAX_STRANGERS)]
    joined(head).send(report_of(SEEN))
    until(lambda: head.nodes[0].seen == SEEN, head)
    for each in mute:
        each.close()


def test_random_bytes_never_raise(head: Head) -> None:
    for size in (1, 10, 1000):
        with closing(socket.create_connection(address_of(head))) as stranger:
            stranger.sendall(os.urandom(size) + b"\n")
            stranger.sendall(json.dumps({"token": "secret"}).encode() + b"\n")
            for _ in range(20):
                head.poll(0.0)
    assert head.nodes[0].line is None
