"""Lists the placements of the table, and makes the job of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.process_strikes.service import Tenants
from benchmarks.process_strikes.subjects import Run, Subject

APART = (
    *("rollout.placement=disaggregated", "rollout.num_ranks=1", "algorithm.importance=tis"),
    *("async.worker_timeout_s=60", "async.max_worker_restarts=100"),
)
FIXED = {
    "async": {"max_staleness": 1, "deterministic": True},
    "algorithm": {"name": "grpo", "old_logprobs": "rollout"},
}
"""The keys of a tenant whose engines run a step ahead."""
SUBJECTS: dict[str, Callable[[Path, Path], Subject]] = {
    "colocated run": lambda folder, model: Run(
        folder, model, ("parallel.expert_model_parallel_size=2",)
    ),
    "disaggregated run, fixed schedule": lambda folder, model: Run(
        folder, model, (*APART, "async.max_staleness=1", "async.deterministic=true")
    ),
    "disaggregated run, free": lambda folder, model: Run(
        folder, model, (*APART, "async.max_staleness=2")
    ),
    "colocated service": lambda folder, model: Tenants(folder, model, {}, {}, {}),
    "disaggregated service": lambda folder, model: Tenants(
        folder, model, {"placement": "disaggregated", "num_ranks": 1}, {"bob": FIXED},
        {"async": {"worker_timeout_s": 60, "max_worker_restarts": 100}},
    ),
}  # fmt: skip
"""How to make the job of each placement, from a folder and a model."""
