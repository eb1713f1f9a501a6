"""A house whose engines are on ranks of their own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.disaggregated.collector import DisaggregatedCollector
from mrl.disaggregated.free_collector import FreeCollector
from mrl.disaggregated.meeting import publish_address
from mrl.disaggregated.server import Server
from mrl.disaggregated.supervisor import PREFIX, Job, read_hosts
from mrl.preflight import Plan
from mrl.preflight.roles import Roles
from mrl.run.folder import RunFolder
from mrl.system.heartbeat import phase
from mrl.tenants.house import House
from mrl.tenants.hub import Hub
from parallel.mesh import join_store

START_S = 600.0
"""How long the ranks of a service may take to find each other, beside the start of the engines."""


@dataclass
class DisaggregatedHouse(House):
    """Holds the base, and on rank 0 the hub of the workers."""

    config: ServiceConfig
    roles: Roles
    hub: Hub | None

    def make_collector(
        self, plan: Plan, folder: RunFolder, name: str, weight: float
    ) -> DisaggregatedCollector:
        kind = FreeCollector if plan.recipe.asynchronous.is_free else DisaggregatedCollector
        meeting = TenantMeeting(self.hub, name, weight, plan.recipe)
        return kind(plan, self.mesh, folder, meeting)

    @phase("start")
    def start(self) -> None:
        self.base.onload()
        if self.hub is not None:
            self.hub.wait_until_started(self.config.rollout.start_timeout_s)
        dist.barrier()

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()


class TenantMeeting:
    """The workers of a service join the server of a tenant when the hub says so. See
    `mrl.disaggregated.meeting.Meeting`."""

    is_shared = True

    def __init__(self, hub: Hub | None, name: str, weight: float, recipe: Recipe) -> None:
        """`hub`: None on all ranks but the first."""
        self._hub, self._name, self._weight, self._recipe = hub, name, weight, recipe

    def hosts(self) -> list[str]:
        return list(self._rank_0s_hub.hosts)

    def invite(self, server: Server) -> None:
        message = {
            "server": server.address,
            "token": server.token,
            "weight": self._weight,
            "recipe": self._recipe.model_dump(mode="json"),
        }
        self._rank_0s_hub.open(self._name, message)

    def end(self) -> None:
        self._rank_0s_hub.end(self._name)

    @property
    def _rank_0s_hub(self) -> Hub:
        assert self._hub is not None
        return self._hub


def open_hub(config: ServiceConfig, roles: Roles) -> Hub:
    """Return the hub, which the rollout ranks find by the launcher's store.

    Raises InputError for what one of them has found wrong.
    """
    store = dist.PrefixStore(PREFIX, join_store()[0])
    store.set_timeout(timedelta(seconds=START_S))
    hosts = read_hosts(store, roles.num_rollout)
    hub = Hub(roles.num_engines(config.rollout_config()), hosts)
    publish_address(store, hub.address, hub.token)
    return hub


def job_of_service(config: ServiceConfig) -> Job:
    """Return what the workers of a service's rollout ranks are."""
    settings = {"service": config.model_dump(mode="json")}
    wait_s = START_S + config.rollout.start_timeout_s
    timeout_s = config.asynchronous.worker_timeout_s
    return Job("mrl.tenants.rollout_worker", settings, config.rollout_config(), wait_s, timeout_s)
