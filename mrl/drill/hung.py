"""Faults of processes that stop without an end: SIGSTOP of an engine, and of a rank."""

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
"""The longest `rollout.stall_timeout_s` that a drill waits for."""
SHORTEST_LIMIT_S = 20.0
"""The limit of the watchdog in a drill, or five times the longest step where that is longer."""
WATCHED = ("sync", "rollout", "score", "logprobs", "train", "save", "log")
GRACE_S = 15.0
"""Seconds beyond twice the limit in which stacks are written and processes end."""


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
    """An engine hangs: after rollout.stall_timeout_s another one takes its place."""
    job = drill.running()
    job.wait_for_phase("rollout")
    return engine_replaced(drill, "stop-engine", job, psutil.Process.suspend)


def _stop_rank(drill: Drill, name: str, phase: str) -> Row:
    """Stop the last rank that trains in a phase, under limits that fit the steps of the reference."""
    if drill.job is not None and drill.job.process.poll() is None:
        stop(drill)
    longest = max(row["time/step_s"] for row in RunFolder(drill.reference).read_metrics())
    limit_s = max(SHORTEST_LIMIT_S, 5 * longest)
    limits = json.dumps(dict.fromkeys(WATCHED, limit_s))
    done = num_rows(drill.run)
    drill.job = job = drill.start(*drill.words(f"watch.limits={limits}"))
    job.wait_for_rows(done + 1)
    job.look(closely=True)  # what it holds now must be gone at its end
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
    """A rank hangs while engines generate."""
    return _stop_rank(drill, "stop-rank-rollout", "rollout")


@fault("stop-rank-train", "SIGSTOP of the last rank that trains in the training pass", _unwatched)
def stop_rank_train(drill: Drill) -> Row:
    """A rank hangs while the others wait for it in a collective."""
    return _stop_rank(drill, "stop-rank-train", "train")


@fault(
    "stop-rank-save",
    "SIGSTOP of the last rank that trains in a save",
    _unwatched,
)
def stop_rank_save(drill: Drill) -> Row:
    """A rank stops while it writes its share of a checkpoint."""
    return _stop_rank(drill, "stop-rank-save", "save")
