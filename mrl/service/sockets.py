"""Opens the TCP sockets of a service on loopback, and reads the token of their callers."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from pathlib import Path

from mrl.errors import InputError

TOKEN = "token"
TOKEN_BYTES = 32


def open_tcp(port: int, key: str = "control.tcp") -> socket.socket:
    """Return a socket bound to a port of loopback. Raises InputError if the port is not
    available; the message names the configuration's `key` that gave it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(f"{key}={port}: {error.strerror}; choose another port") from None
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
