"""Faults of rollout ranks, in the worker that leads an engine or in the worker's supervisor."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import psutil

from mrl.config import Recipe
from mrl.drill.chain import Drill
from mrl.drill.faults import FAULTS, Row, fault
from mrl.drill.hung import LONGEST_STALL_S
from mrl.drill.job import Job, Unexpected, is_alive, kill, num_rows
from mrl.drill.running import ended
from mrl.errors import ExitCode
from mrl.run.folder import RunFolder

WORKER = ["-m", "mrl.engine_pool.remote"]
"""The last arguments of a worker's command line."""
LOST = "async/lost_workers"


def _no_rollout_ranks(recipe: Recipe) -> str:
    if recipe.rollout.placement == "colocated":
        return "no rank leads engines only (rollout.placement is colocated)"
    return ""


def _no_short_timeout(recipe: Recipe) -> str:
    limit_s = recipe.asynchronous.worker_timeout_s
    if why := _no_rollout_ranks(recipe):
        return why
    if limit_s > LONGEST_STALL_S:
        return f"async.worker_timeout_s={limit_s:g} s is longer than a drill waits"
    return ""


@fault("kill-worker", "kill -9 of the worker of the first rollout rank", _no_rollout_ranks)
def kill_worker(drill: Drill) -> Row:
    """Kill the worker that leads the first engine; return the fault's `Row`.

    The worker's supervisor must start another worker.
    """
    return _worker_replaced(drill, "kill-worker", psutil.Process.kill)


@fault("stop-worker", "SIGSTOP of the worker of the first rollout rank", _no_short_timeout)
def stop_worker(drill: Drill) -> Row:
    """Suspend the worker that leads the first engine; return the fault's `Row`.

    The suspended worker sends no messages, so it must be replaced after async.worker_timeout_s.
    """
    return _worker_replaced(drill, "stop-worker", psutil.Process.suspend)


@fault("kill-supervisor", "kill -9 of the last rollout rank", _no_rollout_ranks)
def kill_supervisor(drill: Drill) -> Row:
    """Kill the supervisor of the last rollout rank; return the fault's `Row`.

    A supervisor that is dead cannot replace a lost worker, so the launcher must end the run.
    """
    job = drill.running()
    job.wait_for_phase("rollout")
    return ended(
        drill, "kill-supervisor", job, lambda: kill(job.ranks()[-1:]), (ExitCode.LOST_RANK,)
    )


def _worker_replaced(drill: Drill, name: str, strike: Callable[[psutil.Process], object]) -> Row:
    """Call `strike` on the worker of the first engine, and return the fault's `Row`.

    The run must replace the worker and do two more steps.
    """
    job = drill.running()
    job.wait_for_phase("rollout")
    worker = worker_of(job, drill.engine_leader)
    before, done = _lost(job), num_rows(job.run)
    began = time.monotonic()
    strike(worker)
    job.wait(lambda: num_rows(job.run) >= done + 2, f"steps {done} and {done + 1} were done")
    seconds, lost = time.monotonic() - began, _lost(job)
    problems = []
    if drill.recipe.asynchronous.max_staleness:
        # Unfinished prompts may now be generated with newer weights, so the following bits differ.
        bits = "continued within the bound"
        drill.close()
        shutil.rmtree(drill.run)
    else:
        problems = drill.check_step_after(done + 1)
        bits = "the steps were done"
        bits += ", with the same bits as without the fault" if drill.judges_bits else ""
    if lost <= before:
        problems.append("no worker was replaced")
    if is_alive(worker):
        problems.append(f"worker {worker.pid} is left")
    text = f"{lost - before:g} worker replaced; {bits}"
    return Row(name, FAULTS[name].did, text, seconds, "recovered", None, tuple(problems))


def worker_of(job: Job, rank: int) -> psutil.Process:
    """Return the worker process that a rank has started. Raises Unexpected if there is none."""
    for child in job.ranks()[rank].children():
        if child.cmdline()[-2:] == WORKER:
            return child
    raise Unexpected(f"rank {rank} has no worker; see {job.log}")


def _lost(job: Job) -> float:
    """Return the number of workers that the job has lost so far, according to metrics.jsonl."""
    return RunFolder(job.run).read_metrics()[-1].get(LOST, 0.0)
