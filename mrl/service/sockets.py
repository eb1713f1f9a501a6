"""Opens the sockets of a service: a UNIX socket in its folder and, if configured, a TCP socket on
loopback.

The path of a UNIX socket may have at most 107 bytes, but paths of service folders can be longer. So
the socket is addressed through a file descriptor of the folder: /proc/self/fd/7/control.sock.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mrl.errors import InputError

SOCKET, TOKEN = "control.sock", "token"
TOKEN_BYTES = 32


def open_unix(folder: Path) -> socket.socket:
    """Return a socket bound to `folder/control.sock`, to which only the owner of that file can
    connect.

    A file that a killed service left is replaced. This is safe, because the caller holds the lock
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
    """Return a connection to the service of `folder`. Sends and receives on it time out after
    `timeout_s` seconds. Raises OSError if no service listens there."""
    with ExitStack() as undo, _short(folder) as path:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(timeout_s)
        connection.connect(path)
        undo.pop_all()
        return connection


def open_tcp(port: int) -> socket.socket:
    """Return a socket bound to a port of loopback. Raises InputError if the port is not
    available."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(f"control.tcp={port}: {error.strerror}; choose another port") from None
    return listener


def read_token(folder: Path) -> str:
    """Return the token that callers over TCP must send; if the folder has no token yet, create one.
    Raises InputError if other users own or can read the token's file, or if the file is damaged."""
    file = folder / TOKEN
    if not os.path.lexists(file):
        _write_token(file)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}; remove it, and the service makes one"
        ) from None
    with os.fdopen(descriptor) as stream:
        status = os.fstat(descriptor)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o077:
            raise InputError(
                f"{file} belongs to another user, or others can read it; remove it, and the service "
                "makes one"
            )
        token = stream.read(2 * TOKEN_BYTES + 2).strip()
    if not re.fullmatch(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}", token):
        raise InputError(f"{file} holds no token; remove it, and the service makes one")
    return token


def _write_token(file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(TOKEN_BYTES) + "\n")
    partial.rename(file)


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
