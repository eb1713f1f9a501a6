"""Tells `mrl.launch`, if it started this rank, what it needs to know: by files in its folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LAUNCH_FOLDER = "MRL_LAUNCH_FOLDER"
"""The variable by which `mrl.launch` gives its ranks the folder; if it is set, the launcher prints
their failure."""
WATCHED_FILE = "watched"
"""This file exists once the watchdog watches the ranks of this launcher, or if the recipe turns it
off."""


def signal_watchdog_running() -> None:
    """Tell the launcher that it need not watch the start of its ranks any more."""
    _touch(WATCHED_FILE)


def signal_arrived(rank: int) -> None:
    """Tell the launcher that a rank waits for the other ranks."""
    _touch(arrived_file(rank))


def arrived_file(rank: int | str) -> str:
    """Return the name of the file of `signal_arrived`."""
    return f"arrived_{rank}"


def _touch(name: str) -> None:
    if folder := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            (Path(folder) / name).touch()
