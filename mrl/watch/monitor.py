"""The monitor: the process that reads the ranks' pages, and ends a run that hangs.

It is a child of rank 0, without torch, and exits with it or when its standard input ends. It reads one
line, a JSON object (`mrl.watch.start`). A rank that hangs cannot hinder it: it only reads memory and
/proc, and sends signals.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import ExitCode
from mrl.run.failure import (
    LAUNCH_FOLDER,
    TAIL_LINES,
    Failure,
    newest_step,
    print_failure,
    write_failure,
)
from mrl.system.files import write_whole
from mrl.system.heartbeat import SIZE, read_page
from mrl.system.processes import die_with_parent
from mrl.watch.verdict import GONE, Limits, Seen, Verdict, Watch

TICK_S = 0.2
STACKS_S = 2.0
"""How long the ranks have to write their stacks."""


@dataclass
class Process:
    """A `Process` is a rank on this node."""

    rank: int
    pid: int
    page: mmap.mmap
    stacks: int
    """The descriptor of the file that faulthandler writes to."""
    started: str
    """When it was started, by which it is told from a later process with its number."""

    @classmethod
    def open(cls, rank: int, pid: int, page: str, stacks: str) -> Process:
        descriptor = os.open(page, os.O_RDONLY)
        try:
            memory = mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        found = os.open(stacks, os.O_RDONLY | os.O_CLOEXEC)
        return cls(rank, pid, memory, found, _stat(pid)[1])

    def see(self) -> Seen:
        state, started = _stat(self.pid)
        return Seen(read_page(self.page), state if started == self.started else "")

    def send(self, number: int) -> None:
        """Send it a signal, where it is still there."""
        with suppress(ProcessLookupError):
            if _stat(self.pid)[1] == self.started:
                os.kill(self.pid, number)

    def read_stacks(self) -> str:
        with suppress(OSError):
            size = os.fstat(self.stacks).st_size
            return os.pread(self.stacks, size, 0).decode(errors="replace")
        return ""


def main() -> None:
    """Watch until the ranks are done, or one hangs."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # rank 0 is gone already
        return
    job = json.loads(line)
    die_with_parent(job["parent"])
    ranks = [Process.open(**rank) for rank in job["ranks"]]
    watch = Watch(Limits(**job["limits"]))
    last = time.monotonic()
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poll.poll(TICK_S * 1000):
        now = time.monotonic()
        found = watch.tick(now - last, [rank.see() for rank in ranks])
        last = now
        if found is not None:
            end(job, ranks, found)
            return
        if late := watch.late():
            print(f"mrl: {late.text()}; the others wait", file=sys.stderr, flush=True)


def end(job: dict[str, Any], ranks: list[Process], found: Verdict) -> None:
    """Write the stacks and the report, print it, and kill all ranks; rank 0 last, as this process dies
    with it. Engines and workers die with their rank."""
    folder = Path(job["folder"])
    files = write_stacks(folder, ranks)
    culprit = next(rank for rank in ranks if rank.rank == found.rank)
    failure = Failure(
        what=found.text(),
        exit_code=int(ExitCode.LOST_RANK if found.how == "gone" else ExitCode.HUNG_RANK),
        rank=found.rank,
        phase=found.pulse.phase,
        step=max(found.pulse.step, 0),
        since_s=found.since_s,
        cause="" if found.how == "stuck" else "a user, a debugger or the scheduler",
        log=files.get(found.rank, ""),
        log_tail=innermost(culprit.read_stacks()),
        saved_step=newest_step(folder),
        command=job["command"],
    )
    with suppress(OSError):  # the disk may be what hangs
        failure = write_failure(folder, failure)
    if LAUNCH_FOLDER not in os.environ:
        print_failure(failure)
    for rank in sorted(ranks, key=lambda rank: rank.pid == job["parent"]):
        rank.send(signal.SIGKILL)


def write_stacks(folder: Path, ranks: list[Process]) -> dict[int, str]:
    """Let every rank write the stacks of its threads, also a stopped one, and copy them to
    RUN/logs/stacks_rank_N.txt; return the files by rank."""
    waiting = {rank.rank: rank for rank in ranks if rank.see().state not in GONE}
    for rank in waiting.values():
        rank.send(signal.SIGUSR2)
        rank.send(signal.SIGCONT)  # the handler runs before anything else
    deadline = time.monotonic() + STACKS_S
    while waiting and time.monotonic() < deadline:
        time.sleep(TICK_S)
        waiting = {n: r for n, r in waiting.items() if not r.read_stacks()}
    files = {}
    for rank in ranks:
        file = folder / "logs" / f"stacks_rank_{rank.rank}.txt"
        if text := rank.read_stacks():
            with suppress(OSError):
                file.parent.mkdir(exist_ok=True)
                write_whole(file, text.encode())
                files[rank.rank] = str(file)
    return files


def innermost(stacks: str) -> list[str]:
    """Return the innermost calls of the main thread, which faulthandler writes last."""
    lines = stacks.splitlines()
    heads = [i for i, line in enumerate(lines) if "hread 0x" in line]
    return [line for line in lines[heads[-1] :] if line.strip()][:TAIL_LINES] if heads else []


def _stat(pid: int) -> tuple[str, str]:
    """Return (state, start time) of a process; empty where it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""


if __name__ == "__main__":
    main()
