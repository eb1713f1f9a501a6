"""Kills parts of a run at any moment, and waits for what comes of it."""

from __future__ import annotations

import time
from pathlib import Path

from mrl.drill import Drill
from mrl.drill.job import Job, Unexpected, kill, num_rows

VICTIMS = ("rank", "engine", "launcher", "tree")


def strike(victim: str, job: Job) -> None:
    """Send SIGKILL to one rank, to all processes of the engines, to mrl.launch, or to everything."""
    job.look()
    if victim == "rank":
        kill(job.ranks()[-1:])
    elif victim == "engine":
        kill(job.engines())
    elif victim == "launcher":
        kill([job.process])
    else:
        kill(job.known())


def outcome(drill: Drill, victim: str, job: Job) -> int | None:
    """Wait until the start has ended, and return its exit code; None where it goes on.

    A start whose engine was killed may replace it, or end. Raises Unexpected where neither comes.
    """
    if victim != "engine":
        return job.end()
    there, deadline = num_rows(job.run), time.monotonic() + drill.limit_s
    while job.process.poll() is None:
        if job.has_begun() and num_rows(job.run) >= min(there + 2, drill.num_steps):
            return None
        if time.monotonic() > deadline:
            raise Unexpected(f"{drill.limit_s:.0f} s passed after the kill of an engine; {job.log}")
        time.sleep(0.1)
    return job.end()


def left_of(victim: str, job: Job) -> tuple[list[str], list[Path]]:
    """Return (what is left of a start that has ended, files that the next start must remove).

    Where the launcher or everything was killed, nobody was there to remove its files.
    """
    found = job.left()
    files = job.files() if victim in ("launcher", "tree") else []
    return [text for text in found if text not in {f"{file} is left" for file in files}], files
