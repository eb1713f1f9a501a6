"""This module does one core's share of the study, as a child process of `studies.stability`.

Its arguments are FOLDER, PARENT_PID and CORES, such as 0 or 0+1. A request is a Job, the answer its
result (runs.py). One engine, started at the first job, serves all of them. It exits when this process
does, and this process exits when its parent does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from mrl.system.worker_connection import WorkerConnection
from studies.stability_study.arms import Job

Prepare = Callable[[Job], None]
"""Called before each run, while the engine is idle."""


def nothing(folder: Path, cores: str) -> Prepare:
    """Prepare nothing before a run."""
    return lambda job: None


def serve(study: str, preparation: Callable[[Path, str], Prepare] = nothing) -> None:
    """Answer all requests of the parent. `preparation` is called once, with FOLDER and CORES and before
    the engine starts, and returns what to do before each run."""
    folder, parent, cores = sys.argv[1:]
    connection = WorkerConnection(study, int(parent))
    log = os.open(
        Path(folder) / f"worker_{cores}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.sched_setaffinity(0, {int(core) for core in cores.split("+")})
    # After that: what these print on import must not end up among the answers, nor on the terminal.
    from parallel import prepare
    from studies.stability_study.runs import make_run, result_of, start_engine

    prepare()
    before = preparation(Path(folder), cores)
    connection.send({"ready": True})
    shared = None
    for request in connection.requests():
        job = Job(**{**request, "more": tuple(request["more"])})
        shared = shared or start_engine(job)
        engine, mesh = shared
        before(job)
        run = make_run(job, mesh)
        run.begin(engine)
        result = result_of(run, job)
        run.close()  # else each run would leave its weights and optimizer state in memory
        connection.send(result)


if __name__ == "__main__":
    serve("the stability study")
