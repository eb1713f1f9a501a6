"""Opens the control socket of a job: a UNIX socket in the folder of a service or of a run.

The path of a UNIX socket may have at most 107 bytes, but paths of folders can be longer. So the
socket is addressed through a file descriptor of the folder: /proc/self/fd/7/control.sock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SOCKET = "control.sock"


def open_unix(folder: Path) -> socket.socket:
    """Return a socket bound to `folder/control.sock`, to which only the owner of that file can
    connect.

    A file that a killed job left is replaced. This is safe, because the caller holds the lock
    of the folder.
    """
    with ExitStack() as undo, _short(folder) as path:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        os.fchmod(listener.fileno(), 0o600)  # `bind` creates the file with this mode
        (folder / SOCKET).unlink(missing_ok=True)
        listener.bind(path)
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
def _short(folder: Path) -> Iterator[str]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
