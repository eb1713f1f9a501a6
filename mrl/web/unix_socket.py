"""Opens the control socket of a job, and sends requests to it.

It is a UNIX socket in the folder of a service or of a run. The path of a UNIX socket may have at most
107 bytes, but paths of folders can be longer. So the socket is addressed through a file descriptor of
the folder: /proc/self/fd/7/control.sock.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

SOCKET = "control.sock"


def open_unix(folder: Path) -> socket.socket:
    """Return a socket that listens at `folder/control.sock`, and to which only the owner of that file
    can connect. Where the file is there, so is the listener.

    A file that a killed job left is replaced. This is safe, because the caller holds the lock
    of the folder.
    """
    new = f"{SOCKET}.new"
    with ExitStack() as undo, _short(folder, new) as path:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        os.fchmod(listener.fileno(), 0o600)  # `bind` creates the file with this mode
        (folder / new).unlink(missing_ok=True)
        listener.bind(path)
        undo.callback((folder / new).unlink, missing_ok=True)
        listener.listen()
        (folder / new).rename(folder / SOCKET)
        undo.pop_all()
        return listener


def connect_unix(folder: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the job of `folder`. Sends and receives on it time out after
    `timeout_s` seconds. Raises OSError if no job listens there."""
    with ExitStack() as undo, _short(folder) as path:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(timeout_s)
        connection.connect(path)
        undo.pop_all()
        return connection


@contextmanager
def _short(folder: Path, name: str = SOCKET) -> Iterator[str]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class NoAnswer(Exception):
    """A server took the connection, but its answer was lost."""


def ask_unix(
    folder: Path, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> tuple[int, dict[str, Any]]:
    """Send a request to the server of a folder's socket, and return the HTTP status and the JSON object
    of its answer.

    Raises OSError if nobody listens there, and NoAnswer if no whole answer comes.
    """
    connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
    connection.sock = connect_unix(folder, timeout_s)
    try:
        with suppress(BrokenPipeError):  # the body was refused; the answer can be read
            connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None
    finally:
        connection.close()
