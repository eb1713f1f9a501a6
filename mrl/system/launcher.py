"""What a rank tells `mrl.launch`, where that started it: by files in a folder of the launcher."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LAUNCH_FOLDER = "MRL_LAUNCH_FOLDER"
"""The variable by which `mrl.launch` gives its ranks the folder; then it prints their failure."""
WATCHED_FILE = "watched"
"""The file that says that the watchdog watches the ranks of this launcher, or that the recipe wants
none."""


def tell_watched() -> None:
    """Tell the launcher that it need not watch the start of its ranks any more."""
    _touch(WATCHED_FILE)


def tell_arrived(rank: int) -> None:
    """Tell the launcher that a rank has come to where it waits for the others."""
    _touch(arrived_file(rank))


def arrived_file(rank: int | str) -> str:
    """Return the name of the file that says so."""
    return f"arrived_{rank}"


def _touch(name: str) -> None:
    if folder := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            (Path(folder) / name).touch()
