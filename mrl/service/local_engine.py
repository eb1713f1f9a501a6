"""The engine on the trainer's devices that all tenants of a service share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from mrl.collect.collector import Collector
from mrl.config import Recipe
from mrl.config.adapter import Adapter
from mrl.config.service import TenantLimits
from mrl.engine_pool.local import LocalPool, collector_on
from mrl.engine_pool.local_engine import LocalEngine
from mrl.engine_pool.part import EnginePart
from mrl.engines.admission import UNLIMITED
from mrl.engines.sglang.server import SGLangServer
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
from mrl.service.sessions.local_sampling import LocalSampling
from mrl.service.sessions.sampling import SessionModel
from mrl.system.heartbeat import phase
from mrl.system.worker_user import worker_user
from mrl.types import Prompt
from mrl.weight_sync.engine_group import EngineGroup
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh


@dataclass
class SharedLocalEngine:
    """An engine that takes turns with the base model on the device. It implements
    `mrl.service.shared.SharedEngines`."""

    engine: LocalEngine
    group: EngineGroup
    """The ranks that the engine spans."""
    server: SGLangServer | None
    """The engine's server, which only the first rank of `group` has; None on the other ranks."""
    limits: TenantLimits
    world: int

    @phase("start")
    def start(self, base: SharedBase) -> None:
        base.offload()
        dist.barrier()
        self.engine.start()
        dist.barrier()

    def make_collector(
        self, plan: Plan, mesh: Mesh, folder: RunFolder, name: str, weight: float
    ) -> Collector:
        assert plan.adapter is not None
        part = self.make_part(name, weight, plan.recipe, plan.adapter, plan.prompts)
        user = worker_user(self.limits.reward_user)
        pool = LocalPool(plan, mesh, folder, part, is_shared=True, user=user)
        pool.budget.limit_s = self.limits.max_reward_s
        return collector_on(pool, plan, mesh, folder)

    def make_sampling(self, session: SessionModel) -> LocalSampling:
        part = self.make_part(
            session.name, session.weight, session.recipe, session.adapter, session.canaries
        )
        tp = session.recipe.rollout.tensor_parallel_size
        number, num_engines = session.policy.mesh.rank // tp, self.world // tp
        return LocalSampling(part, session.policy, session.in_place, number, num_engines)

    def make_part(
        self, name: str, weight: float, recipe: Recipe, adapter: Adapter, canaries: Sequence[Prompt]
    ) -> EnginePart:
        """Register a tenant with the engine, and return the object through which the tenant uses
        the engine. `name`: the tenant's name in the engine (`mrl.service.record.engine_name`).
        `canaries`: prompts on which the log-probs of trainer and engine are compared.

        Raises InputError if the engine has no room for the adapter.
        """
        server, endpoint = self.server, None
        if server is not None:
            limit = self.limits.max_tokens_in_flight or UNLIMITED
            endpoint = server.add_endpoint(name, adapter, weight=weight, max_tokens_in_flight=limit)

        def release() -> None:
            if server is not None:
                with suppress(ValueError):  # it was removed before
                    server.remove_endpoint(name)

        return EnginePart(
            self.engine,
            endpoint,
            self.group,
            recipe.rollout,
            recipe.model,
            canaries,
            sends_adapter=True,
            release=release,
        )

    def take_times(self) -> dict[str, float]:
        """Return statistics that say how full this rank's engine was since the last call, and whose
        requests filled it (see `GateTimes`). The result is empty if this rank is not the first one
        of its `group`."""
        gate = None if self.server is None else self.server.gate
        return {} if gate is None else gate.take_times()

    def close(self) -> None:
        self.engine.stop()
