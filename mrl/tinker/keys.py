"""The keys of the API's users. SERVICE_DIR/tinker/keys.json holds the user and the SHA-256 of each key,
so a key cannot be read back; only its owner has it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.files import replaced
from mrl.system.json_text import parse_json

FOLDER, FILE, LOCK = "tinker", "keys.json", ".keys.lock"
PREFIX = "tml-"
"""The SDK accepts only keys with this prefix."""
USER = re.compile("[a-z0-9][a-z0-9_-]{0,62}")
MAX_KEY_CHARS = 200


class Keys:
    """The users of a service and the digests of their keys. The file is read again when another
    process has changed it, so that `mrl tenants key` works while the service runs."""

    def __init__(self, service: Path) -> None:
        self._folder = service / FOLDER
        self._file = self._folder / FILE
        self._read_at: tuple[int, int] | None = None
        self._users: dict[str, str] = {}
        """The user of each digest."""

    def add(self, user: str) -> str:
        """Make a new key for a user, and return it; it is not stored. A user may have several keys.
        Raises InputError for an invalid name."""
        if not USER.fullmatch(user):
            raise InputError(
                f"the name of a user is {user[:80]!r}; expected 1 to 63 small letters, digits, _ and -"
            )
        key = PREFIX + secrets.token_urlsafe(32)
        with self._changing() as rows:
            rows.append({"user": user, "sha256": digest(key), "made": int(time.time())})
        return key

    def remove(self, user: str) -> int:
        """Remove all keys of a user; return how many there were. Raises InputError if there are
        none."""
        with self._changing() as rows:
            own = [row for row in rows if row["user"] == user]
            if not own:
                known = ", ".join(sorted({row["user"] for row in rows})) or "none"
                raise InputError(f"the user {user[:80]!r} has no key; users with keys: {known}")
            for row in own:
                rows.remove(row)
        return len(own)

    def list(self) -> list[dict[str, Any]]:
        """Return user, time (`made`, in seconds since 1970) and first 8 letters of the digest of each
        key, in the order in which they were made."""
        return [{**row, "sha256": row["sha256"][:8]} for row in self._rows()]

    def owner(self, key: str | None) -> str | None:
        """Return the user to whom a key belongs; None if the key is unknown."""
        if not key or len(key) > MAX_KEY_CHARS:
            return None
        self._refresh()
        return self._users.get(digest(key))

    def _refresh(self) -> None:
        try:
            status = self._file.stat()
            at = (status.st_mtime_ns, status.st_ino)
        except OSError:
            self._users, self._read_at = {}, None
            return
        if at != self._read_at:
            self._users = {row["sha256"]: row["user"] for row in self._rows()}
            self._read_at = at

    def _rows(self) -> list[dict[str, Any]]:
        try:
            rows = parse_json(self._file.read_bytes(), str(self._file))
            if not all(isinstance(row["user"] + row["sha256"], str) for row in rows):
                raise ValueError("it is not a list of users and digests")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = " ".join(str(error).split())
            raise InputError(
                f"{self._file} is damaged: {what}; remove it, and make new keys"
            ) from None
        return rows

    @contextmanager
    def _changing(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows, and write them after the block. Other processes that change them wait: a key
        would be lost otherwise, or one that was removed would be back."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with (self._folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = self._rows()
            yield rows
            with replaced(self._file, durable=True) as partial:
                partial.unlink(missing_ok=True)
                partial.touch(0o600)
                partial.write_text(json.dumps(rows, indent=1) + "\n")


def digest(key: str) -> str:
    """Return the SHA-256 of a key, which has 256 random bits and so needs no salt."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
