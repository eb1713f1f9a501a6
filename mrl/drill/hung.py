"""Faults in which a process hangs: an engine or a rank receives SIGSTOP."""

from __future__ import annotations

import dataclasses
import json

import psutil

from mrl.config import Recipe
from mrl.drill.chain import Drill
from mrl.drill.faults import Row, fault
from mrl.drill.job import num_rows
from mrl.drill.running import ended, engine_replaced
from mrl.drill.stopped import stop
from mrl.errors import ExitCode
from mrl.run.failure import Failure
from mrl.run.folder import RunFolder

LONGEST_STALL_S = 300.0
"""A drill waits at most this many seconds until a hung engine or worker is replaced. If the
recipe's timeout for a hung engine or worker is longer, the fault is not provoked."""
SHORTEST_LIMIT_S = 20.0
"""The lowest watchdog limit that a drill sets, in seconds. The limit is five times the longest
step's time, but at least this."""
WATCHED = ("sync", "rollout", "score", "logprobs", "train", "save", "log")
GRACE_S = 15.0
"""Seconds that a job may take, in addition to twice the watchdog's limit, to write the stacks and
end its processes. A job that takes longer is reported as a problem."""


def _no_short_stall(recipe: Recipe) -> str:
    if recipe.debug.load_rollouts is not None:
        return "the recipe has no engine"
    limit_s = recipe.rollout.stall_timeout_s
    if limit_s > LONGEST_STALL_S:
        return f"rollout.stall_timeout_s={limit_s:g} s is longer than a drill waits"
    return ""


def _unwatched(recipe: Recipe) -> str:
    watch = getattr(recipe, "watch", None)
    return "" if getattr(watch, "enabled", False) else "no watchdog watches the ranks"


@fault("stop-engine", "SIGSTOP of all processes of an engine in the rollout", _no_short_stall)
def stop_engine(drill: Drill) -> Row:
    """Suspend all processes of an engine while it generates; return the fault's `Row`.

    After rollout.stall_timeout_s, another engine must replace the suspended one.
    """
    job = drill.running()
    job.wait_for_phase("rollout")
    return engine_replaced(drill, "stop-engine", job, psutil.Process.suspend)


def _stop_rank(drill: Drill, name: str, phase: str) -> Row:
    """When the run is in `phase`, suspend the last trainer rank; return the fault's `Row`.

    The limits of the watchdog are derived from the longest step of the run without faults.
    """
    if drill.job is not None and drill.job.process.poll() is None:
        stop(drill)
    longest = max(row["time/step_s"] for row in RunFolder(drill.reference).read_metrics())
    limit_s = max(SHORTEST_LIMIT_S, 5 * longest)
    limits = json.dumps(dict.fromkeys(WATCHED, limit_s))
    done = num_rows(drill.run)
    drill.job = job = drill.start(*drill.words(f"watch.limits={limits}"))
    job.wait_for_rows(done + 1)
    job.look(closely=True)  # remembers the ports and files that must be gone at the end
    job.wait_for_phase(phase)
    last = drill.last_trainer
    found: list[Failure] = []

    def strike() -> None:
        job.ranks()[last].suspend()

    row = ended(drill, name, job, strike, (ExitCode.HUNG_RANK,), found=found.append)
    problems = list(row.problems)
    if row.seconds > 2 * limit_s + GRACE_S:
        problems.append(f"found after {row.seconds:.0f} s, expected {2 * limit_s:.0f} s")
    if not found or found[0].rank != last:
        problems.append(f"the report does not name rank {last}")
    return dataclasses.replace(row, problems=tuple(problems))


@fault("stop-rank-rollout", "SIGSTOP of the last rank that trains in the rollout", _unwatched)
def stop_rank_rollout(drill: Drill) -> Row:
    """Suspend the last trainer rank during a rollout; return the fault's `Row`."""
    return _stop_rank(drill, "stop-rank-rollout", "rollout")


@fault("stop-rank-train", "SIGSTOP of the last rank that trains in the training pass", _unwatched)
def stop_rank_train(drill: Drill) -> Row:
    """Suspend the last trainer rank during a training pass; return the fault's `Row`.

    The other ranks then wait for the suspended rank in a collective.
    """
    return _stop_rank(drill, "stop-rank-train", "train")


@fault(
    "stop-rank-save",
    "SIGSTOP of the last rank that trains in a save",
    _unwatched,
)
def stop_rank_save(drill: Drill) -> Row:
    """Suspend the last trainer rank during a checkpoint save; return the fault's `Row`."""
    return _stop_rank(drill, "stop-rank-save", "save")
