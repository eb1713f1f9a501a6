"""Functions with which a rank notifies its launcher, `mrl.launch`: they create files in its folder.

They do nothing if `mrl.launch` did not start the rank.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LAUNCH_FOLDER = "MRL_LAUNCH_FOLDER"
"""Environment variable with the path of the launcher's folder. If it is set, the ranks print no
reports of failures, because the launcher prints them."""
WATCHED_FILE = "watched"
"""File in the launcher's folder. It is created when the watchdog begins to watch the launcher's
ranks, or if the recipe turns the watchdog off."""


def signal_watchdog_running() -> None:
    """Tell the launcher that it no longer needs to watch the start of its ranks."""
    _touch(WATCHED_FILE)


def signal_arrived(rank: int) -> None:
    """Tell the launcher that rank `rank` has started and is waiting for the other ranks."""
    _touch(arrived_file(rank))


def arrived_file(rank: int | str) -> str:
    """Return the name of the file that `signal_arrived` creates."""
    return f"arrived_{rank}"


def _touch(name: str) -> None:
    if folder := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            (Path(folder) / name).touch()
