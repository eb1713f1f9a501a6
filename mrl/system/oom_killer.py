"""Tells from the kernel's counters whether its OOM killer was at work.

A process that it ends gets SIGKILL, as from a user's kill -9; only the counters tell the two apart. No
torch is imported here, as `mrl.launch` reads them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.system.files import bytes_in_words

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class OomKills:
    """`OomKills` holds how many processes were ended for want of memory; None where nothing says it."""

    cgroup: int | None
    """Those of this job's cgroup, and below it."""
    host: int | None
    """Those of the whole machine."""
    limit: str = ""
    """The memory limit of the cgroup in words; empty without one."""

    def since(self, before: OomKills) -> tuple[str, bool]:
        """Return in words what was killed since `before`, and whether it was of this job; empty where
        nothing was, or nobody knows."""
        if (self.cgroup or 0) > (before.cgroup or 0):
            limit = f" of {self.limit}" if self.limit else ""
            return (
                f"the kernel's OOM killer: this job's cgroup reached its memory limit{limit}",
                True,
            )
        if (self.host or 0) > (before.host or 0):
            return (
                "a user, or more likely the kernel's OOM killer, which ended a process of this host "
                "since the run started (oom_kill in /proc/vmstat; dmesg names it)"
            ), False
        return "", False


def read_oom_kills(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> OomKills:
    """Read the counters of the cgroup that this process is in (version 2, or 1) and of the machine."""
    host = _count(proc / "vmstat")
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, events, limit = mount, "memory.events", "memory.max"
        elif "memory" in controllers.split(","):
            root, events, limit = mount / "memory", "memory.oom_control", "memory.limit_in_bytes"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if (count := _count(folder / events)) is not None:
                return OomKills(count, host, _limit(folder / limit))
            if folder == root:
                break
    return OomKills(None, host)


def _count(file: Path) -> int | None:
    found = _COUNT.search(_text(file))
    return None if found is None else int(found[1])


def _limit(file: Path) -> str:
    """Return a limit in words; empty for `max`, and for what version 1 writes where there is none."""
    text = _text(file).strip()
    return bytes_in_words(int(text)) if text.isdigit() and int(text) < 1 << 60 else ""


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""
