"""Configuration of asynchronous training, in which rollout engines run on ranks of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class WorkerConfig(Branch):
    """Configuration of the processes on rollout ranks. All tenants of a service have the same
    values."""

    worker_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which the process of a rollout rank is considered lost
    and is restarted."""
    max_worker_restarts: int = Field(default=3, ge=0)
    """How many times in a row the process of a rollout rank may be lost before the run ends. A
    finished batch sets the count back to 0, and so does a finished group if engines run freely (see
    `async.groups_in_flight`)."""


class AsyncConfig(WorkerConfig):
    """How far the rollout may run ahead of training; only for `rollout.placement: disaggregated`."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum staleness of a token when it is trained on: the number of updates by which the
    weights that sampled it may be older than the current weights. With 0, engines generate a step's
    samples with exactly the weights that the step updates, and wait while the trainer trains. With
    n, they generate up to n steps ahead."""
    deterministic: bool = False
    """Generate the samples of step s entirely with weights of version `max(0, s - max_staleness)`,
    so that two runs, or a resumed run, produce the same bits on CPUs. Saving a checkpoint waits for
    the samples in progress."""
    at_bound: Literal["wait", "drop"] = "wait"
    """What happens to groups that would be older than max_staleness when they are trained on.
    `wait`: engines start no group that might become too old, and the trainer waits for slow groups.
    `drop`: the trainer never waits for a straggler; a group that is too old when it finishes is
    dropped and counted."""
    in_flight_updates: Literal["finish", "interrupt"] = "finish"
    """The moment at which an engine loads newer weights. `finish`: after the groups in progress are
    complete. `interrupt`: immediately; the groups in progress continue with the newer weights, so
    their tokens come from several versions."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of interrupted requests. `keep`: later tokens attend to keys and
    values of older weights. `recompute`: the cache is computed again with the newer weights. With
    `moe.routing_replay: r3`, tokens sampled before the update are then excluded from the loss,
    because their routes are unknown."""
    stale_prefixes: bool = False
    """Let requests reuse cached prefixes whose keys and values were computed with older weights. This
    is faster, but the routes of these prefixes are not replayed."""
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Number of groups that an engine works on at a time, if engines run freely (max_staleness
    above 0, not deterministic). Null takes twice the number of groups of a step, divided by the
    number of engines."""

    @property
    def is_free(self) -> bool:
        """Whether engines run freely: ahead of the trainer, without a fixed schedule."""
        return self.max_staleness > 0 and not self.deterministic

    @property
    def staged_versions(self) -> int:
        """Number of weight versions for which a worker reserves host memory. It is 2 if engines run
        freely (the engine's version and the next version), and otherwise the larger of 1 and
        max_staleness."""
        return 2 if self.is_free else max(1, self.max_staleness)
