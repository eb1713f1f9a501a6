"""Runs of `make async` beside the long ones: an engine that comes late, and engines that are wrong.

A wrong engine must end its run with one line that names the fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.planted_versions import VARIABLE
from mrl.drill.job import Job, Unexpected, num_rows
from mrl.drill.rollout_ranks import WORKER
from mrl.errors import ExitCode
from mrl.run.folder import RunFolder

Start = Callable[..., Job]
"""Starts a run: `start(folder, output, *keys, ranks=...)`."""
ENDS_S = 600.0
LATE = ("rollout.num_ranks=2", "async.groups_in_flight=1", "async.worker_timeout_s=600")
STEPS_ALONE, STEPS_TOGETHER = 3, 10
PLANTED = {
    "stale_prefix": "tokens came from the prefix cache, and no request has computed them under",
    "stamp_of_server": "what was pushed",
    "stamp_of_engine": "the stamps of its tokens are wrong",
}
"""Faults of `benchmarks.planted_versions`, and what the line says that ends the run."""


def workers_of(job: Job) -> list[psutil.Process]:
    """Return the workers of a run's rollout ranks that are there now."""
    return [each for each in job.look() if _words(each)[-2:] == WORKER]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def late(start: Start, folder: Path, keys: list[str]) -> dict[str, Any]:
    """Train with two engines, one of which comes after some steps; return what came of it.

    The worker of the late one is stopped (SIGSTOP) before it has joined. Each engine may hold one group
    at a time, so that two leases at a time show that both have one.
    """
    run = folder / "late"
    job = start(folder, run, *keys, *LATE, f"output_dir={run}", "train.num_steps=100000", ranks=3)
    problems: list[str] = []
    alone: list[dict[str, Any]] = []
    try:
        job.wait(lambda: len(workers_of(job)) == 2, "two workers ran")
        stopped = workers_of(job)[-1]
        stopped.suspend()
        job.wait(lambda: num_rows(run) >= STEPS_ALONE, "an engine trained alone")
        alone = RunFolder(run).read_metrics()
        stopped.resume()
        job.wait(lambda: _engines(run) == 2, "the late engine got weights")
        done = num_rows(run)
        job.wait(lambda: num_rows(run) >= done + STEPS_TOGETHER, "both engines worked")
        job.send(signal.SIGUSR1)
        if (code := job.end(ENDS_S)) != ExitCode.SAVED:
            problems.append(f"the run ended with code {code}")
    except Unexpected as error:
        problems.append(str(error))
    finally:
        problems += job.left()
        job.kill()
    rows = RunFolder(run).read_metrics()
    leased = max((row["async/leased_groups"] for row in rows[len(alone) :]), default=0)
    if any(row["async/engines"] != 1 or row["async/leased_groups"] > 1 for row in alone):
        problems.append("two engines were there before the late one had come")
    if leased < 2:
        problems.append("the late engine got no lease")
    if any(row["staleness/max"] > 2 for row in rows):
        problems.append("tokens are beyond the bound")
    return {"steps_alone": len(alone), "steps": len(rows), "problems": problems}


def _engines(run: Path) -> int:
    return int(RunFolder(run).read_metrics()[-1]["async/engines"])


def planted(start: Start, folder: Path, keys: list[str], fault: str) -> dict[str, Any]:
    """Train with an engine that is wrong in one way; return what came of it."""
    run = folder / f"planted_{fault}"
    interrupt = (
        *("async.in_flight_updates=interrupt", "rollout.engine=benchmarks.planted_versions"),
        "async.worker_timeout_s=60",  # a worker on a busy machine starts more slowly than it is struck
    )
    os.environ[VARIABLE] = fault
    try:
        job = start(folder, run, *keys, *interrupt, f"output_dir={run}", "train.num_steps=60")
    finally:
        del os.environ[VARIABLE]
    try:
        code = job.end(ENDS_S)
    finally:
        left = job.left()
        job.kill()
    lines = [line for line in job.log.read_text().splitlines() if PLANTED[fault] in line]
    problems = [] if code == ExitCode.FAILED else [f"the run ended with code {code}"]
    if not lines:
        problems.append(f"no line of {job.log} says {PLANTED[fault]!r}")
    rows = RunFolder(run).read_metrics()
    steps = len(rows)
    return {"fault": fault, "steps": steps, "line": lines[:1], "problems": problems + left}
