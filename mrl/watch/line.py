"""This module holds the lines between the monitors of a job's nodes: JSON over TCP, behind a token.

The monitor of rank 0 listens, and that of each other node connects. A node says five times a second
what its ranks show, and is told to send stacks or to kill. Nothing here blocks, and what is not a known
message of a known node closes the connection. There is no torch here, and no pickle.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mrl.system.heartbeat import LEFT, Collective, Pulse
from mrl.watch.verdict import GONE, UNKNOWN, Seen

SILENT_S = 60.0
"""A node that is not heard from for so long is lost; the node of rank 0 is, to the others."""
QUIET_S = 2.0
"""What a node said last is too old to judge by where it is not heard from for so long."""
CONNECT_S = 1.0
"""How long a try to connect may take."""
MAX_BYTES = 4 << 20
"""The most that one message, or all that waits to be sent, may take."""
MAX_STRANGERS = 16
"""Connections that may be open and have not shown the token."""
MAX_STACKS = 1 << 18
"""The characters of a rank's stacks that are sent."""


class Line:
    """A `Line` is one end of a connection. Messages are dicts that JSON can hold."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._read, self._unsent = bytearray(), bytearray()
        self.is_open = True

    def send(self, message: Mapping[str, Any]) -> None:
        """Send as much as goes out now; the rest goes with a later call, nothing where it is closed."""
        if not self.is_open:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self.is_open and self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_BYTES:
                self.close()
        except OSError:
            self.close()

    def finish(self, limit_s: float = 2.0) -> None:
        """Send what is left, for a few seconds at most."""
        deadline = time.monotonic() + limit_s
        while self.is_open and self._unsent and time.monotonic() < deadline:
            time.sleep(0.01)
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; closes where one is no JSON object or too long."""
        try:
            while self.is_open:
                part = self._socket.recv(1 << 16)
                if not part:
                    self.close()
                self._read += part
                if len(self._read) > MAX_BYTES:
                    self.close()
                    return []
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, rest = bytes(self._read).split(b"\n")
        self._read = bytearray(rest)
        messages: list[dict[str, Any]] = []
        with suppress(ValueError, RecursionError):
            messages = [each for line in lines if isinstance(each := json.loads(line), dict)]
        if len(messages) < len(lines):
            self.close()
            return []
        return messages

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


class Node:
    """A `Node` is what the monitor of rank 0 knows of another node."""

    def __init__(self, host: str, ranks: Sequence[int]) -> None:
        self.host, self.ranks = host, tuple(ranks)
        self.line: Line | None = None
        self.seen = {rank: Seen(UNKNOWN, "S") for rank in ranks}
        self.stacks: dict[int, str] | None = None
        self.silent_s = 0.0
        self.was_heard = False
        self.has_left = False
        """Whether its ranks are through with the run."""

    def take(self, message: Mapping[str, Any]) -> None:
        """Take in a message. Raises KeyError, TypeError or ValueError for one that is none."""
        if self.has_left:
            return
        if "ranks" in message:
            seen = {int(rank): _seen(values) for rank, values in message["ranks"].items()}
            if seen.keys() != self.seen.keys():
                raise ValueError(f"ranks {sorted(seen)}, expected {self.ranks}")
            self.seen = seen
        elif "stacks" in message:
            stacks = {int(rank): str(text) for rank, text in message["stacks"].items()}
            self.stacks = {rank: text for rank, text in stacks.items() if rank in self.seen}
        elif message["bye"]:
            self.has_left = True
            self.seen = {rank: _left(seen) for rank, seen in self.seen.items()}
        self.silent_s = 0.0
        self.was_heard = True

    def present(self) -> list[Seen]:
        """Return the states of its known ranks that have not finished the run."""
        others = self.seen.values() if self.was_heard and not self.has_left else ()
        return [seen for seen in others if seen.pulse.phase != LEFT and seen.state not in GONE]


def report_of(seen: Mapping[int, Seen]) -> dict[str, Any]:
    """Return the message that says what ranks show."""
    return {"ranks": {str(rank): [*each] for rank, each in seen.items()}}


def _left(seen: Seen) -> Seen:
    return seen._replace(pulse=seen.pulse._replace(phase=LEFT))


def _seen(values: Any) -> Seen:
    fields, state, last = values
    pulse, collective = Pulse(*fields), Collective(*last)
    texts = (state, pulse.phase, pulse.tenant, collective.name, collective.group)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a phase, a state, a tenant or a collective is no text")
    numbers = (pulse.step, pulse.position, pulse.beats)
    numbers += (collective.number, collective.is_over, collective.is_queued)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("a step, a position, the beats or a collective is no number")
    return Seen(pulse, state, collective)


class Head:
    """A `Head` is the end of rank 0's monitor: it holds the lines of all other nodes."""

    def __init__(self, server: socket.socket, token: str, nodes: Sequence[Node]) -> None:
        server.setblocking(False)
        self._server, self._token = server, token
        self.nodes = list(nodes)
        self._strangers: list[Line] = []
        self._named: list[Node] = []

    def poll(self, seconds: float) -> None:
        """Take in what has come; `seconds` passed since the last call."""
        self._accept()
        for stranger in list(self._strangers):
            self._greet(stranger)
        for node in self.nodes:
            node.silent_s += seconds
            for message in node.line.receive() if node.line is not None else ():
                try:
                    node.take(message)
                except (KeyError, TypeError, ValueError, AttributeError):
                    assert node.line is not None
                    node.line.close()

    def lost(self) -> Node | None:
        """Return a node that was heard from and is not any more."""
        silent = [n for n in self._silent(SILENT_S) if n.was_heard]
        return max(silent, key=lambda node: node.silent_s, default=None)

    def unreached(self) -> list[Node]:
        """Return the nodes that have never been heard from; each once."""
        found = [n for n in self._silent(SILENT_S) if not n.was_heard and n not in self._named]
        self._named += found
        return found

    def leave_out(self, rank: int) -> None:
        """Record that the node of a rank has finished."""
        for node in self.nodes:
            node.has_left |= rank in node.ranks

    @property
    def is_behind(self) -> bool:
        """Whether what a node said last is too old to judge its ranks by."""
        return any(node.was_heard for node in self._silent(QUIET_S))

    def _silent(self, seconds: float) -> list[Node]:
        return [node for node in self.nodes if node.silent_s > seconds and not node.has_left]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to every node."""
        for node in self.nodes:
            if node.line is not None:
                node.line.send(message)

    def stacks(self, limit_s: float) -> dict[int, str]:
        """Return the stacks that the nodes have sent once they were asked, by rank."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            node.stacks is None and node.line is not None and node.line.is_open
            for node in self.nodes
        ):
            time.sleep(0.02)
            self.poll(0.0)
        return {rank: text for node in self.nodes for rank, text in (node.stacks or {}).items()}

    def finish(self) -> None:
        for node in self.nodes:
            if node.line is not None:
                node.line.finish()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._strangers.append(Line(connection))
                if len(self._strangers) > MAX_STRANGERS:
                    self._strangers.pop(0).close()

    def _greet(self, stranger: Line) -> None:
        """Give a connection that shows the token to its node."""
        messages = stranger.receive()
        if not messages and stranger.is_open:
            return
        self._strangers.remove(stranger)
        with suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):
            first, *more = messages
            number = first["node"]
            token = str(first["token"]).encode(errors="replace")
            if hmac.compare_digest(token, self._token.encode()) and number >= 0:
                node = self.nodes[number]
                if node.line is not None:  # it has connected anew
                    node.line.close()
                node.line = stranger
                for message in more:
                    node.take(message)
                return
        stranger.close()


def connect(address: tuple[str, int], token: str, number: int) -> Line | None:
    """Connect to the monitor of rank 0 as node `number`; None where it cannot be reached now."""
    try:
        line = Line(socket.create_connection(address, timeout=CONNECT_S))
    except OSError:
        return None
    line.send({"token": token, "node": number})
    return line
