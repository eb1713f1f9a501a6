"""Opens the sockets of a service: one in its folder, and on loopback where asked.

The path of a UNIX socket has at most 107 bytes, which folders exceed. So it is named through a
descriptor of its folder: /proc/self/fd/7/control.sock.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrl.errors import InputError

SOCKET, TOKEN = "control.sock", "token"
TOKEN_BYTES = 32


def open_unix(folder: Path) -> socket.socket:
    """Return a socket bound to `folder/control.sock`, which only its owner may call.

    One that a killed service left is replaced: the caller holds the lock of the folder.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the mode that the file gets as it is made
        (folder / SOCKET).unlink(missing_ok=True)
        with _short(folder) as path:
            listener.bind(path)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_unix(folder: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the service of `folder`. Raises OSError where none listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short(folder) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def open_tcp(port: int) -> socket.socket:
    """Return a socket bound to a port of loopback. Raises InputError where it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(f"control.tcp={port}: {error.strerror}; choose another port") from None
    return listener


def read_token(folder: Path) -> str:
    """Return the token of callers over TCP; the first start makes it. Raises InputError where others
    can read the file, or it is damaged."""
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
    with suppress(FileNotFoundError):
        partial.unlink()
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
