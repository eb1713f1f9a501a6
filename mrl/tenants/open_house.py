"""Builds what the tenants of a service share: the base model on all ranks, and a way to engines."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mrl.collect.engine_nodes import EngineNodes
from mrl.collect.engine_slot import EngineSlot
from mrl.config import ServiceConfig
from mrl.errors import InputError
from mrl.preflight.engine_layout import check_engine_sizes, engine_layout
from mrl.preflight.roles import Roles, roles_of_engines
from mrl.rollout.engine_group import EngineGroup
from mrl.run import console
from mrl.system.memory_watch import MemoryWatch
from mrl.tenants.colocated import ColocatedService
from mrl.tenants.colocated_house import ColocatedHouse
from mrl.tenants.disaggregated import DisaggregatedService
from mrl.tenants.disaggregated_house import DisaggregatedHouse, open_hub
from mrl.tenants.engines import engine_limits, make_engines, own_layers
from mrl.tenants.registry import Registry
from mrl.tenants.service import Publish, Service
from parallel.base import BaseSetup
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.options.read import read_options


def service_roles(config: ServiceConfig, world: int) -> Roles:
    """Return which of `world` ranks train. Raises InputError where they do not fit the service."""
    return roles_of_engines(config.rollout_config(), world)


def service_dims(config: ServiceConfig, roles: Roles) -> ParallelDims:
    """Return the layout of the ranks that train. Raises InputError where they do not fit it."""
    dims = ParallelDims.create(config.parallel, roles.num_trainers)
    model = HfModel.read(config.model.path, config.model.architecture)
    dims.check_model(model.sizes)
    rollout = config.rollout_config()
    check_engine_sizes(rollout, model.sizes)
    if rollout.batch_invariant and rollout.tensor_parallel_size > 1:
        raise InputError(
            "rollout.batch_invariant: an engine of several ranks adds up in another order than that of "
            f"one, and rollout.tensor_parallel_size is {rollout.tensor_parallel_size}; set it to 1, or "
            "leave batch_invariant out"
        )
    if roles.engine_layout(rollout).num_nodes > 1:
        raise InputError(
            "rollout.tensor_parallel_size: an engine of adapters stays on one node; lower it to the "
            "ranks of a node"
        )
    return dims


def open_service(
    config: ServiceConfig,
    roles: Roles,
    mesh: Mesh,
    registry: Registry | None,
    publish: Publish = lambda metrics: None,
) -> Service[Any]:
    """Return the service of this rank, which trains; its engines are not started. A collective.

    `registry` and `publish` as for `Service`. Raises InputError for a model that cannot be served so.
    """
    if roles.num_rollout:
        house = open_disaggregated(config, roles, mesh)
        return DisaggregatedService(config, house, registry, publish)
    return ColocatedService(config, open_colocated(config, mesh), registry, publish)


def open_colocated(config: ServiceConfig, mesh: Mesh) -> ColocatedHouse:
    """Load the base and make this rank's place for an engine, which is not started. A collective."""
    base = _load_base(config, mesh)
    rollout, world = config.rollout_config(), dist.get_world_size()
    layout = engine_layout(rollout, world)
    number, leads = mesh.rank // layout.ranks, mesh.rank % layout.ranks == 0
    engines = make_engines(config, number, mesh.device) if leads else None
    group = EngineGroup.create(mesh.rank, world, layout.ranks, timeout_s=config.longest_wait_s)
    whole: Any = engines  # the slot starts, wakes and stops it, and asks nothing else of it
    slot = EngineSlot(
        EngineNodes(whole, None, None),
        number,
        rollout.max_restarts,
        MemoryWatch(mesh.device, console.warning),
        keeps_weights=True,
    )
    return ColocatedHouse(mesh, base, config.tenants, slot, group, engines)


def open_disaggregated(config: ServiceConfig, roles: Roles, mesh: Mesh) -> DisaggregatedHouse:
    """Load the base, and let the rollout ranks find this one. A collective of the ranks that train."""
    hub = open_hub(config, roles) if mesh.rank == 0 else None
    base = _load_base(config, mesh)
    return DisaggregatedHouse(mesh, base, config.tenants, config, roles, hub)


def _load_base(config: ServiceConfig, mesh: Mesh) -> SharedBase:
    model = HfModel.read(config.model.path, config.model.architecture)
    engine_limits(
        config, model
    )  # raises for a model without adapters before its weights are loaded
    setup = BaseSetup(
        model,
        own_layers(config),
        config.train.recompute,
        config.moe_config(),
        options=read_options(config.megatron),
        logprob_chunk_tokens=config.train.logprob_chunk_tokens,
        is_adapted=True,
    )
    return SharedBase(setup, mesh)
