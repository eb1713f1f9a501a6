"""Connections between the monitors of a job's nodes: JSON over TCP, authenticated by a token.

The monitor of rank 0 listens, and the monitors of the other nodes connect to it. Five times a
second, a node sends the state of its ranks to rank 0's monitor. In return, it receives requests to
send stacks or to kill ranks. Sockets do not block, and an unexpected message closes the connection.
This module uses neither torch nor pickle.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mrl.system.heartbeat import LEFT, Collective, Pulse, Samples
from mrl.watch.verdict import GONE, UNKNOWN, Observation

SILENT_S = 60.0
"""Seconds without a message after which rank 0's monitor counts another node as lost. The monitors
of other nodes count rank 0's node as lost after the same time."""
QUIET_S = 2.0
"""If the last message of a node is older than this number of seconds, it does not show whether the
node's ranks hang now."""
CONNECT_S = 1.0
"""The time limit in seconds for an attempt to connect."""
MAX_BYTES = 4 << 20
"""The largest size of a message in bytes, and the largest number of bytes that may wait to be sent."""
MAX_UNAUTHENTICATED = 16
"""The largest number of open connections that have not sent the token."""
MAX_STACKS = 1 << 18
"""The largest number of characters that a node sends of the stack traces of one rank."""


class Connection:
    """One end of a non-blocking connection. Messages are JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._read, self._unsent = bytearray(), bytearray()
        self.is_open = True

    def send(self, message: Mapping[str, Any]) -> None:
        """Send as many bytes of the message as can be sent now. Later calls send the remaining bytes.

        Does nothing if the connection is closed. Closes the connection if the socket cannot take
        more bytes and more than MAX_BYTES remain to be sent.
        """
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
        """Send the remaining bytes, for at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self.is_open and self._unsent and time.monotonic() < deadline:
            time.sleep(0.01)
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived.

        Closes the connection if a message is not a JSON object or is longer than MAX_BYTES.
        """
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
    """What the monitor of rank 0 knows about another node."""

    def __init__(self, host: str, ranks: Sequence[int]) -> None:
        self.host, self.ranks = host, tuple(ranks)
        self.connection: Connection | None = None
        self.seen = {rank: Observation(UNKNOWN, "S") for rank in ranks}
        self.stacks: dict[int, str] | None = None
        self.silent_s = 0.0
        self.was_heard = False
        self.has_left = False
        """Whether the ranks of this node have finished the run."""

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the node.

        Raises KeyError, TypeError or ValueError if the message is invalid.
        """
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

    def present(self) -> list[Observation]:
        """Return an `Observation` for each rank of this node that is still running.

        Returns [] before the first message of the node, and after the node has finished the run.
        """
        others = self.seen.values() if self.was_heard and not self.has_left else ()
        return [seen for seen in others if seen.pulse.phase != LEFT and seen.state not in GONE]


def report_of(seen: Mapping[int, Observation]) -> dict[str, Any]:
    """Return the message in which a node sends the observations of its ranks to rank 0's monitor."""
    return {"ranks": {str(rank): [*each] for rank, each in seen.items()}}


def _left(seen: Observation) -> Observation:
    return seen._replace(pulse=seen.pulse._replace(phase=LEFT))


def _seen(values: Any) -> Observation:
    fields, state, last, counts = values
    pulse, collective, samples = Pulse(*fields), Collective(*last), Samples(*counts)
    texts = (state, pulse.phase, pulse.tenant, collective.name, collective.group)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a phase, a state, a tenant or a collective is no text")
    numbers = (pulse.step, pulse.position, pulse.beats)
    numbers += (collective.number, collective.is_over, collective.is_queued, *samples)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("a step, a position, the beats, a collective or the samples are no number")
    return Observation(pulse, state, collective, samples)


class MonitorServer:
    """The server in the monitor of rank 0, with the connections to all other nodes."""

    def __init__(self, server: socket.socket, token: str, nodes: Sequence[Node]) -> None:
        server.setblocking(False)
        self._server, self._token = server, token
        self.nodes = list(nodes)
        self._unauthenticated: list[Connection] = []
        self._reported: list[Node] = []
        """The nodes that `unreached` has already returned."""

    def poll(self, seconds: float) -> None:
        """Accept connections, and handle the messages that have arrived.

        `seconds` is the time that has passed since the last call.
        """
        self._accept()
        for connection in list(self._unauthenticated):
            self._authenticate(connection)
        for node in self.nodes:
            node.silent_s += seconds
            for message in node.connection.receive() if node.connection is not None else ():
                try:
                    node.take(message)
                except (KeyError, TypeError, ValueError, AttributeError):
                    assert node.connection is not None
                    node.connection.close()

    def lost(self) -> Node | None:
        """Return the lost node that has been silent the longest; None if no node is lost.

        A node is lost if it has sent messages, but none in the last SILENT_S seconds.
        """
        silent = [n for n in self._silent(SILENT_S) if n.was_heard]
        return max(silent, key=lambda node: node.silent_s, default=None)

    def unreached(self) -> list[Node]:
        """Return the nodes that have sent no message in the first SILENT_S seconds.

        Each node is returned only once.
        """
        found = [n for n in self._silent(SILENT_S) if not n.was_heard and n not in self._reported]
        self._reported += found
        return found

    def leave_out(self, rank: int) -> None:
        """Record that the node of `rank` has finished the run."""
        for node in self.nodes:
            node.has_left |= rank in node.ranks

    @property
    def is_behind(self) -> bool:
        """Whether some node's last message is too old to show whether the ranks of that node hang."""
        return any(node.was_heard for node in self._silent(QUIET_S))

    def _silent(self, seconds: float) -> list[Node]:
        return [node for node in self.nodes if node.silent_s > seconds and not node.has_left]

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send a message to every node."""
        for node in self.nodes:
            if node.connection is not None:
                node.connection.send(message)

    def ask_for_stacks(self, asks: int) -> None:
        """Ask every node for stack traces; `asks` is MAIN_STACK or ALL_STACKS."""
        for node in self.nodes:
            node.stacks = None
        self.broadcast({"write_stacks": int(asks)})

    def stacks(self, limit_s: float) -> dict[int, str]:
        """Wait at most `limit_s` seconds for the stack traces that the nodes were asked to send.

        Returns the stack traces that have arrived, by rank.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            node.stacks is None and node.connection is not None and node.connection.is_open
            for node in self.nodes
        ):
            time.sleep(0.02)
            self.poll(0.0)
        return {rank: text for node in self.nodes for rank, text in (node.stacks or {}).items()}

    def finish(self) -> None:
        for node in self.nodes:
            if node.connection is not None:
                node.connection.finish()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._unauthenticated.append(Connection(connection))
                if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                    self._unauthenticated.pop(0).close()

    def _authenticate(self, connection: Connection) -> None:
        """Assign a connection to its node if the first message has the token; otherwise close it.

        Does nothing if no message has arrived yet.
        """
        messages = connection.receive()
        if not messages and connection.is_open:
            return
        self._unauthenticated.remove(connection)
        with suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):
            first, *more = messages
            number = first["node"]
            token = str(first["token"]).encode(errors="replace")
            if hmac.compare_digest(token, self._token.encode()) and number >= 0:
                node = self.nodes[number]
                if node.connection is not None:  # the node has reconnected
                    node.connection.close()
                node.connection = connection
                for message in more:
                    node.take(message)
                return
        connection.close()


def connect(address: tuple[str, int], token: str, number: int) -> Connection | None:
    """Connect to the monitor of rank 0 as node `number`; return None if it cannot be reached now."""
    try:
        connection = Connection(socket.create_connection(address, timeout=CONNECT_S))
    except OSError:
        return None
    connection.send({"token": token, "node": number})
    return connection
