"""Names every process of a job by what it does, from the process tree alone.

The tree is the list: a process that no rule knows is named by its module or its program, so that a new
kind of process gets rows of its own without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LAUNCHER = "launcher"
MODULES = {
    "mrl.engines.sglang.child": "engine server",
    "mrl.rewards.worker": "reward worker",
    "mrl.environments.worker": "environment worker",
    "mrl.system.worker_guard": "guard of a worker",
    "mrl.engine_pool.remote": "rollout worker",
    "mrl.service.rollout_worker": "rollout worker",
}
"""Names of `python -m MODULE`; others are named by the module."""
WORDS = {
    "mrl.watch.monitor": "watchdog",
    "multiprocessing.resource_tracker": "resource tracker",
    "multiprocessing.spawn": "spawned process",
}
"""Names of processes whose command line contains something."""
PART = "sglang::"
"""How SGLang names its own processes."""
FORK = "fork of "


@dataclass(frozen=True)
class Look:
    """What /proc says of one process."""

    pid: int
    parent: int
    title: str
    """The name of the process, which it may have given itself."""
    words: tuple[str, ...]
    """Its command line; empty for a moment while it starts or ends."""
    rank: str | None = None
    """RANK in the environment of a child of the launcher; None elsewhere."""


def role_of(look: Look, parent: Look | None, parent_role: str, num_trainers: int) -> str:
    """Return what a process is, below a parent whose role is known.

    `num_trainers`: the ranks that train; those from there on supervise a rollout worker.
    """
    if parent is None:
        return LAUNCHER
    words = look.words
    if parent_role == LAUNCHER and look.rank is not None:
        kind = "rank" if int(look.rank) < num_trainers else "supervisor, rank"
        return f"{kind} {look.rank}"
    if (words and words[0].startswith(PART)) or look.title.startswith(PART):
        title = words[0] if words else look.title
        return title.strip().removeprefix(PART)
    if words and words == parent.words:
        return FORK + parent_role.partition(" ")[0] if "rank" in parent_role else FORK + parent_role
    text = " ".join(words)
    for part, name in WORDS.items():
        if part in text:
            return f"{name} of {parent_role}" if name == "resource tracker" else name
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        return MODULES.get(module, f"python -m {module}")
    return Path(words[0]).name if words else f"{look.title}, ending"


def roles(looks: Sequence[Look], root: int, num_trainers: int) -> dict[int, str]:
    """Return the role of each process below `root`, and of itself, by its number.

    Processes whose parents are not among `looks` are left out.
    """
    by_pid = {look.pid: look for look in looks}
    found: dict[int, str] = {}
    below: dict[int, list[Look]] = {}
    for look in looks:
        below.setdefault(look.parent, []).append(look)
    open_ = [(by_pid[root], None)] if root in by_pid else []
    while open_:
        look, parent = open_.pop()
        role = role_of(look, parent, found[parent.pid] if parent else "", num_trainers)
        found[look.pid] = role
        open_ += [(child, look) for child in below.get(look.pid, ())]
    return found


def looks_of(root: int) -> list[Look]:
    """Return a look at each process of a tree that lives now."""
    found = []
    for pid, parent in descendants(root):
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            rank = process.environ().get("RANK") if parent == root else None
            found.append(Look(pid, parent, process.name(), tuple(process.cmdline()), rank))
    return found


def descendants(root: int) -> Iterator[tuple[int, int]]:
    """Yield (process, its parent) for a tree, the root first. Faster than a look at all of /proc."""
    open_ = [(root, 0)]
    while open_:
        pid, parent = open_.pop()
        yield pid, parent
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                open_ += [(int(child), pid) for child in file.read_text().split()]


def last_of_each(found: Mapping[int, str]) -> dict[str, int]:
    """Return one process of each role: where several are alike, the one that was started last."""
    return {role: pid for pid, role in sorted(found.items())}
