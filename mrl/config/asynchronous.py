"""Configures training beside engines that have ranks of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class WorkerConfig(Branch):
    """The keys of the processes of rollout ranks, which all tenants of a service have alike."""

    worker_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign from the process of a rollout rank after which it is lost: another one is
    started in its place."""
    max_worker_restarts: int = Field(default=3, ge=0)
    """Losses of a rollout rank's process, without a finished batch between them, before the run
    gives up."""


class AsyncConfig(WorkerConfig):
    """How far rollout may run ahead of training; only for `rollout.placement: disaggregated`."""

    max_staleness: int = Field(default=0, ge=0)
    """Updates that a token may be older than the weights that are updated with it, the time in the
    queue included. 0: engines generate a step's samples with the very weights that it updates, and
    wait while the trainer trains. n: they generate up to n steps ahead."""
    deterministic: bool = False
    """Batch s is generated whole by the weights of version max(0, s - max_staleness), so that two runs,
    and a resumed one, give the same bits on CPUs. A save waits for the batches in flight."""
    at_bound: Literal["wait", "drop"] = "wait"
    """What happens where groups would become older than max_staleness. `wait`: engines start no group
    that might, and the trainer waits for one that takes long. `drop`: the trainer never waits for a
    straggler; a group that is too old when it is done is dropped and counted."""
    in_flight_updates: Literal["finish", "interrupt"] = "finish"
    """When an engine takes newer weights. `finish`: after the groups that it works on. `interrupt`: at
    once; these groups continue under the newer weights, and their tokens have several versions."""
    kv: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of interrupted requests. `keep`: later tokens attend to keys and
    values of older weights. `recompute`: it is computed anew; under R3 the tokens that were sampled
    before the update then leave the loss, as nobody knows their routes."""
    stale_prefixes: bool = False
    """Requests may read prefixes that older weights have cached; faster, and the rows of routes that
    come from them are not replayed."""
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Groups that an engine works on at a time, where it runs freely; by default twice its share of a
    step."""

    @property
    def is_free(self) -> bool:
        """Whether engines run freely: ahead of the trainer, without a fixed schedule."""
        return self.max_staleness > 0 and not self.deterministic

    @property
    def staged_versions(self) -> int:
        """Versions of the weights that a worker has room for in the host's memory: where it runs
        freely, that of the engine and the next one."""
        return 2 if self.is_free else max(1, self.max_staleness)
