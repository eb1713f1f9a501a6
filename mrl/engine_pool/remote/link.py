"""The link between one policy and the engines of rollout ranks: the coordinator, which the workers
join, and the sender of weights.

Only rank 0 has connections to the workers. The other trainer ranks take part in collectives and
send weights to the workers that are assigned to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.config import Recipe
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.rendezvous import Rendezvous
from mrl.system.heartbeat import phase
from mrl.system.shared_memory import SharedMemory
from mrl.types import Prompt
from mrl.weight_sync.base import WeightSender
from mrl.weight_sync.delta import Traffic
from mrl.weight_sync.load import CanaryMaker
from mrl.weight_sync.quantize import quantized_buckets
from mrl.weight_sync.transports import make_sender, transfer_device
from parallel.implementation import choose_dtype
from parallel.mesh import Mesh
from parallel.policy import Policy

T = TypeVar("T")


class EngineLink:
    """Sends the weights of one policy to the workers, and asks the coordinator. All methods but
    `close` are collectives of the trainer ranks."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        canary_prompts: Sequence[Prompt],
        rendezvous: Rendezvous,
        make_coordinator: Callable[[Sequence[str]], Coordinator[Any]],
        *,
        sends_adapter: bool,
    ) -> None:
        """`canary_prompts`: prompts on which the log-probs of trainer and engine are compared.
        `make_coordinator` is called on rank 0 with the hosts of the rollout ranks. `rendezvous`
        tells the workers the coordinator's address. `sends_adapter`: whether the engines serve the
        policy's adapter, rather than complete weights."""
        self._recipe, self._mesh, self.rendezvous = recipe, mesh, rendezvous
        self._make_coordinator, self._sends_adapter = make_coordinator, sends_adapter
        self.coordinator: Coordinator[Any] | None = None
        """The object to which the workers connect; None on ranks other than 0."""
        self.traffic = Traffic()
        """Counts of what the weight syncs have sent since the caller has replaced it, summed over
        all ranks. They stay 0 unless `rollout.weight_encoding` is `delta`."""
        self._dtype = choose_dtype(recipe.rollout.engine_dtype(recipe.model))
        self._canaries = CanaryMaker(recipe.rollout, recipe.model, canary_prompts)
        self._sender: WeightSender | None = None
        self._quantized = SharedMemory()
        """On CPUs, the memory for the buckets with quantised weights."""

    def open(self) -> None:
        """Invite the workers, without waiting for them."""
        recipe = self._recipe
        if self._mesh.rank == 0:
            self.coordinator = self._make_coordinator(self.rendezvous.hosts())
            self.rendezvous.invite(self.coordinator.address, self.coordinator.token)
        address = self.ask_coordinator(lambda coordinator: coordinator.store_address)
        rollout, timeout_s = recipe.rollout, recipe.asynchronous.worker_timeout_s
        device = transfer_device(sends_adapter=self._sends_adapter)
        self._sender = make_sender(
            rollout.weight_sync, address, timeout_s, device, rollout.max_deltas
        )

    def ask_coordinator(self, ask: Callable[[Coordinator[Any]], T]) -> T:
        """Call `ask` with rank 0's coordinator, and return the result on every rank. If `ask`
        raises an exception, it is raised on every rank."""
        answer: list[Any] = [None, None]
        if self.coordinator is not None:
            try:
                answer[0] = ask(self.coordinator)
            except Exception as error:
                answer[1] = error
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    @phase("sync")
    def sync(self, policy: Policy, version: int) -> bool:
        """Send the policy's weights, as `version`, to the workers that lack them, once the
        coordinator's schedule allows it. Return whether there were such workers."""
        policy.onload()
        assert self._sender is not None
        canaries = self._canaries.make(policy)
        pairs, present = self.ask_coordinator(lambda coordinator: coordinator.next_update(version))
        if not pairs:
            return False  # all workers have these weights already
        self._sender.keep(present)
        world, rollout = self._mesh.dims.world, self._recipe.rollout
        own = [pair for engine, pair in pairs if engine % world == self._mesh.rank]
        bucket_bytes = rollout.weight_bucket_bytes(policy.export_bytes(self._dtype))
        buckets = quantized_buckets(
            policy.export(version, bucket_bytes, self._dtype), rollout.quantization, self._quantized
        )
        failed = self._sender.send(buckets, version, own, canaries)
        sends_deltas = rollout.max_deltas > 0
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (failed, self._sender.traffic if sends_deltas else None))
        if self.coordinator is not None:
            self.coordinator.end_update([name for names, _ in everywhere for name in names])
        if sends_deltas:
            for _, traffic in everywhere:
                self.traffic.add(traffic)
        return True

    def close(self) -> None:
        """End the workers' part. Harmless when repeated."""
        if self._sender is not None:
            self._sender.close()
        if self.coordinator is not None:
            self.rendezvous.end()
            self.coordinator.close()
