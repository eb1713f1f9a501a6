"""Engines on separate ranks that all tenants of a service share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from mrl.collect.collector import Collector
from mrl.config import Recipe, ServiceConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.link import EngineLink
from mrl.engine_pool.remote.rendezvous import Address, Rendezvous, launcher_rendezvous
from mrl.engine_pool.remote.steps import fixed_coordinator, make_remote_collector
from mrl.engine_pool.remote.supervisor import Job
from mrl.preflight import Plan
from mrl.preflight.roles import Roles
from mrl.run.folder import RunFolder
from mrl.service.record import Loop
from mrl.service.sessions.remote_sampling import RemoteSampling
from mrl.service.sessions.sampling import SessionModel
from mrl.service.tenant_coordinator import TenantCoordinator
from mrl.system.heartbeat import phase
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh

START_S = 600.0
"""Seconds within which the ranks of a service must find each other, in addition to the time that
the engines may take to start."""


@dataclass
class SharedRemoteEngines:
    """Engines on rollout ranks. Implements `mrl.service.shared.SharedEngines`."""

    coordinator: TenantCoordinator | None
    """Tells the rollout ranks which tenants the service has. None on all ranks except rank 0."""
    start_timeout_s: float
    """How many seconds the engines may take to start."""
    world: int

    @phase("start")
    def start(self, base: SharedBase) -> None:
        base.onload()
        if self.coordinator is not None:
            self.coordinator.wait_until_started(self.start_timeout_s)
        dist.barrier()

    def make_collector(
        self, plan: Plan, mesh: Mesh, folder: RunFolder, name: str, weight: float
    ) -> Collector:
        rendezvous = self._rendezvous(name, weight, plan.recipe, "recipe")
        return make_remote_collector(plan, mesh, folder, rendezvous)

    def make_sampling(self, session: SessionModel) -> RemoteSampling:
        recipe = session.recipe
        link = EngineLink(
            recipe,
            session.policy.mesh,
            session.canaries,
            self._rendezvous(session.name, session.weight, recipe, "client"),
            lambda hosts: fixed_coordinator(self._on_rank_0.membership, recipe.asynchronous, hosts),
            sends_adapter=True,
        )
        with ExitStack() as undo:
            undo.callback(link.close)
            link.open()
            undo.pop_all()
        return RemoteSampling(link, session.policy, session.in_place)

    def _rendezvous(self, name: str, weight: float, recipe: Recipe, loop: Loop) -> Rendezvous:
        """Return how the workers of a tenant find its coordinator."""

        def invite(address: Address, token: str) -> None:
            message = {
                "server": address,
                "token": token,
                "weight": weight,
                "loop": loop,
                "recipe": recipe.model_dump(mode="json"),
            }
            self._on_rank_0.open(name, message)

        return Rendezvous(
            hosts=lambda: self._on_rank_0.hosts,
            invite=invite,
            end=lambda: self._on_rank_0.end(name),
            membership=None if self.coordinator is None else self.coordinator.membership,
            is_shared=True,
        )

    @property
    def _on_rank_0(self) -> TenantCoordinator:
        assert self.coordinator is not None
        return self.coordinator

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()


def open_coordinator(config: ServiceConfig, roles: Roles) -> TenantCoordinator:
    """Open the coordinator, which tells the rollout ranks about the tenants, and publish its
    address in the launcher's store, where the rollout ranks find it.

    Raises InputError if a rollout rank has reported an error in the configuration.
    """
    rendezvous = launcher_rendezvous(roles.num_rollout, START_S)
    rollout = config.rollout_config()
    membership = Membership(roles.num_engines(rollout), rollout.tensor_parallel_size)
    coordinator = TenantCoordinator(membership, rendezvous.hosts())
    rendezvous.invite(coordinator.address, coordinator.token)
    return coordinator


def job_of_service(config: ServiceConfig) -> Job:
    """Return the description of the worker process that each rollout rank of a service runs."""
    settings = {"service": config.model_dump(mode="json")}
    wait_s = START_S + config.rollout.start_timeout_s
    timeout_s = config.asynchronous.worker_timeout_s
    return Job("mrl.service.rollout_worker", settings, config.rollout_config(), wait_s, timeout_s)
