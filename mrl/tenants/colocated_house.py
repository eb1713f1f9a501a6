"""A house whose engines are on the trainer's devices: all tenants generate, then each is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from mrl.collect.engine_nodes import EngineNodes
from mrl.collect.engine_slot import EngineSlot
from mrl.collect.live import LiveCollector
from mrl.config.adapter import Adapter
from mrl.preflight import Plan
from mrl.rollout.engine_group import EngineGroup
from mrl.rollout.gate import UNLIMITED
from mrl.rollout.sglang.tenants import TenantEngine, TenantEngines
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.worker_user import worker_user
from mrl.tenants.house import House
from parallel.policy import Policy


@dataclass
class ColocatedHouse(House):
    """Holds an engine's place beside the base, which takes turns with it."""

    slot: EngineSlot
    """This rank's place for the engine, which serves all tenants."""
    group: EngineGroup
    """The ranks that the engine spans."""
    engines: TenantEngines | None
    """The engine in the slot, on the rank that leads it."""

    def make_collector(
        self, plan: Plan, folder: RunFolder, name: str, weight: float
    ) -> TenantCollector:
        return TenantCollector(plan, folder, self, name, weight)

    @phase("start")
    def start(self) -> None:
        self.base.offload()
        dist.barrier()
        self.slot.start()
        dist.barrier()

    def close(self) -> None:
        self.slot.stop()

    def take_times(self) -> dict[str, float]:
        """Return what passed the gate of this rank's engine since the last time: see `GateTimes`."""
        return {} if self.engines is None else self.engines.gate.take_times()

    def tenant_slot(self, name: str, adapter: Adapter, weight: float) -> TenantSlot:
        """Return the place of a tenant's part of the engine.

        Raises InputError for an adapter that the engine has no room for.
        """
        part = None
        if self.engines is not None:
            limit = self.limits.max_tokens_in_flight or UNLIMITED
            part = self.engines.tenant(name, adapter, weight=weight, max_tokens_in_flight=limit)
        return TenantSlot(self.slot, self.engines, part)


class TenantSlot(EngineSlot):
    """This is a tenant's part of a service's engine.

    The service starts the engine, wakes it and puts it to sleep for all tenants at once: here that does
    nothing. A loss is one of the whole engine.
    """

    def __init__(
        self, shared: EngineSlot, engines: TenantEngines | None, part: TenantEngine | None
    ) -> None:
        super().__init__(EngineNodes(part, None, None), 0, 0, shared.watch, keeps_weights=True)
        self._shared, self._engines, self._part = shared, engines, part

    @property
    def is_active(self) -> bool:
        return self.engine is not None and self.is_needed and not self._shared.is_lost

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        with self._shared.noting_loss():
            yield

    def start(self) -> None:
        """The service has started it."""

    def wake_weights(self) -> None:
        """The service wakes it."""

    def wake_cache(self) -> None:
        """The service wakes it."""

    def sleep(self) -> None:
        """The service puts it to sleep."""

    def replace_lost(self, clock: Clock) -> bool:
        """Leave it to the service to start another engine."""
        return False

    def metrics(self) -> dict[str, float]:
        return self._shared.metrics()

    def stop(self) -> None:
        """Let the engine forget this tenant, and go on for the others."""
        part, self._part = self._part, None
        if self._engines is not None and part is not None:
            self._engines.drop(part.name)


class TenantCollector(LiveCollector):
    """Collects the groups of one tenant, beside those of the others: the service calls its parts."""

    def __init__(
        self, plan: Plan, folder: RunFolder, house: ColocatedHouse, name: str, weight: float
    ) -> None:
        assert plan.adapter is not None
        slot = house.tenant_slot(name, plan.adapter, weight)
        user = worker_user(house.limits.reward_user)
        super().__init__(plan, house.mesh, folder, (slot, house.group), user)
        self.budget.limit_s = house.limits.max_reward_s

    start_text = "the tenant begins"

    def start(self, policy: Policy) -> None:
        """Start nothing, as the service's engine runs already."""

    @property
    def num_remaining(self) -> int:
        """The tasks of this rank's engine that are not over."""
        return 0 if self._round is None else len(self._round.remaining)

    def prepare_sync(self, policy: Policy) -> None:
        """Compute what the engine must answer to the canaries. A collective; the policy is mounted."""
        self.weight_sync.expect_canaries(policy)

    def send(self, policy: Policy, version: int) -> None:
        """Send the adapter to the engine, which is awake. A collective; the policy is mounted."""
        with self.weight_sync.export(policy, version) as buckets:
            self.weight_sync.update(buckets, version)
        self.weight_sync.raise_failures()

    def check_sync(self) -> None:
        """Compare the engine's canaries, once its cache is awake. Raises RunFailed."""
        self.weight_sync.check_canaries()
