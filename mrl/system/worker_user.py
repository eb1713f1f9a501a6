"""The user that owns a service's worker processes, which run the code of its tenants.

Only a service that runs as root can choose a user other than its own.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import InputError


@dataclass(frozen=True)
class WorkerUser:
    """A user of this machine other than this process's user."""

    name: str
    home: str

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that name the user."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def worker_user(name: str | None) -> WorkerUser | None:
    """Return the user `name`; None if `name` is None or names this process's user.

    Raises InputError if there is no such user, or if this process may not start processes as
    another user.
    """
    if name is None:
        return None
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise InputError(
            f"tenants.reward_user is {name!r}, but this machine has no such user; give one of "
            "/etc/passwd, such as nobody"
        ) from None
    if found.pw_uid == os.geteuid():
        return None
    if os.geteuid():
        raise InputError(
            f"tenants.reward_user is {name!r}, but only root can start workers as another user, and "
            f"this process belongs to {user_name()}; leave the key out, or start the service as root"
        )
    return WorkerUser(name, found.pw_dir)


def user_name() -> str:
    """Return the name of this process's user, or the user id if the user has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def check_open(path: Path, what: str) -> None:
    """Raise InputError if this process's user may not read `path`, or may not enter a folder above it.

    The message begins with `what` and names the file or folder. A path that does not exist is
    accepted.
    """
    for place in (path.absolute(), path.resolve()):
        for folder in reversed(place.parents):
            # Path.exists() would raise for a link into a folder without permission.
            if os.path.exists(folder) and not os.access(folder, os.X_OK):
                raise InputError(_closed(what, place, folder, "x"))
        rights = os.R_OK | (os.X_OK if os.path.isdir(place) else 0)
        if os.path.exists(place) and not os.access(place, rights):
            raise InputError(_closed(what, place, place, "rX"))


def _closed(what: str, place: Path, closed: Path, right: str) -> str:
    through = "" if closed == place else f", because it has no access to {closed}"
    return (
        f"{what}: user {user_name()} may not read {place}{through}; open it "
        f"(chmod o+{right} {closed}), or put the file where that user may read it"
    )
