"""Configures training beside engines that have ranks of their own."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class AsyncConfig(Branch):
    """How far rollout may run ahead of training; only for `rollout.placement: disaggregated`."""

    max_staleness: int = Field(default=0, ge=0)
    """Updates that a token may be older than the weights that are updated with it, the time in the
    queue included. 0: engines generate a step's samples with the very weights that it updates, and
    wait while the trainer trains. n: they generate up to n steps ahead."""
    deterministic: bool = False
    """Batch s is generated whole by the weights of version max(0, s - max_staleness), so that two runs,
    and a resumed one, give the same bits on CPUs. A save waits for the batches in flight."""
    worker_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign from the process of a rollout rank after which it is lost: another one is
    started in its place."""
    max_worker_restarts: int = Field(default=3, ge=0)
    """Losses of a rollout rank's process, without a finished batch between them, before the run
    gives up."""
