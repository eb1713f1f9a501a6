"""Reads and writes start.json: the process of a service, and the command that started it.

SERVICE_DIR/start.json   {"pid": 17, "began": "123456", "command": "mrl serve ..."}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mrl.system.files import write_whole
from mrl.system.proc import stat_of

FILE = "start.json"


def note_start(service: Path, command: str) -> None:
    """Record that this process, which holds the folder's lock, serves the folder. Raises OSError."""
    pid = os.getpid()
    said = {"pid": pid, "began": _began(pid), "command": command}
    write_whole(service / FILE, json.dumps(said) + "\n")


def start_command(service: Path) -> str:
    """Return the command that last started the service of a folder; empty if none is known."""
    return str(_read(service).get("command", ""))


def is_alive(service: Path) -> bool:
    """Whether the process that serves the folder is alive: it may be starting, listening or
    stopping."""
    said = _read(service)
    pid = said.get("pid")
    return isinstance(pid, int) and pid > 0 and _began(pid) == said.get("began")


def _read(service: Path) -> dict[str, Any]:
    try:
        found = json.loads((service / FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _began(pid: int) -> str | None:
    """Return the start time of a process in the kernel's clock ticks, which distinguishes it from a
    later process with the same pid. None if there is no such process, or it has ended."""
    stat = stat_of(pid)
    return None if stat is None or stat.has_ended else stat.started
