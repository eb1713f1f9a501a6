"""Detects from the kernel's counters whether its OOM killer has killed a process.

The OOM killer sends SIGKILL, as a user's `kill -9` does; only the counters distinguish the two. This
module does not import torch, because `mrl.launch` uses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrl.system.files import bytes_in_words, text_or_empty

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class OomKills:
    """Numbers of processes that the OOM killer has killed; a number that is unknown is None."""

    cgroup: int | None
    """The number of processes killed in this job's cgroup and in the cgroups below it."""
    host: int | None
    """The number of processes killed on the whole machine."""
    limit: str = ""
    """The memory limit of the cgroup in words; empty if the cgroup has no limit."""

    def since(self, before: OomKills) -> tuple[str, bool]:
        """Return a text about the kills since `before`, and whether they were in this job's cgroup.

        The text is empty if no process was killed, or if the numbers are unknown.
        """
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
    """Read the kernel's counters for the machine and for this process's cgroup (version 2 or 1).

    If the cgroup has no counter, the counter of the nearest parent that has one is read.
    """
    host = _count(proc / "vmstat")
    for line in text_or_empty(proc / "self/cgroup").splitlines():
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
    found = _COUNT.search(text_or_empty(file))
    return None if found is None else int(found[1])


def _limit(file: Path) -> str:
    """Return the memory limit in a cgroup's file in words; empty if the cgroup has no limit.

    Without a limit, the file has `max` in cgroup version 2, and a huge number in version 1.
    """
    text = text_or_empty(file).strip()
    return bytes_in_words(int(text)) if text.isdigit() and int(text) < 1 << 60 else ""
