"""What the start of a service leaves in its folder: the process, and the command that started it.

SERVICE_DIR/start.json   {"pid": 17, "began": "123456", "command": "mrl serve ..."}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mrl.system.files import write_whole

FILE = "start.json"


def note_start(service: Path, command: str) -> None:
    """Note that this process serves the folder, whose lock it has. Raises OSError."""
    pid = os.getpid()
    said = {"pid": pid, "began": _began(pid), "command": command}
    write_whole(service / FILE, json.dumps(said) + "\n")


def start_command(service: Path) -> str:
    """Return the command that started the newest service of a folder; empty where none is known."""
    return str(_read(service).get("command", ""))


def is_alive(service: Path) -> bool:
    """Whether the process that serves the folder is there, listening or starting or stopping."""
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
    """Return when a process began, in the kernel's ticks; a later one of its number began at another
    time. None where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
