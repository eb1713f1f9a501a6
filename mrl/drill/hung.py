"""Faults of processes that stop without an end: SIGSTOP of an engine, and of a rank."""

from __future__ import annotations

from mrl.config import Recipe
from mrl.drill.chain import Drill
from mrl.drill.faults import Row, fault
from mrl.drill.running import engine_replaced

LONGEST_STALL_S = 300.0
"""The longest `rollout.stall_timeout_s` that a drill waits for."""


def _no_short_stall(recipe: Recipe) -> str:
    if recipe.debug.load_rollouts is not None:
        return "the recipe has no engine"
    limit_s = recipe.rollout.stall_timeout_s
    if limit_s > LONGEST_STALL_S:
        return f"rollout.stall_timeout_s={limit_s:g} s is longer than a drill waits"
    return ""


@fault("stop-engine", "SIGSTOP of all processes of an engine in the rollout", _no_short_stall)
def stop_engine(drill: Drill) -> Row:
    """An engine hangs: after rollout.stall_timeout_s another one takes its place."""
    job = drill.running()
    job.wait_for_phase("rollout")
    return engine_replaced(
        drill, "stop-engine", lambda: [each.suspend() for each in job.engines()], job
    )
