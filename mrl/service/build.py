"""Builds what the tenants of a service share: the base model on all trainer ranks, and the
engines."""

from __future__ import annotations

import torch.distributed as dist

from mrl.config import ServiceConfig
from mrl.engine_pool.engine_nodes import EngineNodes
from mrl.engine_pool.local_engine import LocalEngine
from mrl.errors import InputError
from mrl.preflight.engine_layout import check_engine_sizes, engine_layout
from mrl.preflight.moe import check_balancing
from mrl.preflight.roles import Roles
from mrl.run import console
from mrl.service.colocated import ColocatedService
from mrl.service.disaggregated import DisaggregatedService
from mrl.service.engines import engine_limits, make_engines, own_layers
from mrl.service.local_engine import SharedLocalEngine
from mrl.service.registry import Registry
from mrl.service.remote_engines import SharedRemoteEngines, open_coordinator
from mrl.service.service import Publish, Service
from mrl.service.shared import SharedResources
from mrl.system.memory_watch import MemoryWatch
from mrl.weight_sync.engine_group import EngineGroup
from parallel.base import BaseSetup
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.options.read import read_options


def service_dims(config: ServiceConfig, roles: Roles) -> ParallelDims:
    """Return the layout of the trainer ranks. Raises InputError if the model, the ranks and the
    engines do not fit together, or if `moe` asks for what the model does not have."""
    dims = ParallelDims.create(config.parallel, roles.num_trainers)
    model = HfModel.read(config.model.path, config.model.architecture)
    dims.check_model(model.sizes)
    if config.moe.capture_routes and not model.moe_layer_numbers:
        raise InputError(
            f"moe.capture_routes is true, but {model.path} has no MoE layers; set it to false"
        )
    check_balancing(config.moe_config(), model)
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


def build_service(
    config: ServiceConfig,
    roles: Roles,
    mesh: Mesh,
    registry: Registry | None,
    publish: Publish = lambda metrics: None,
) -> Service:
    """Return the service on this trainer rank. Its engines are not started yet. A collective of the
    trainer ranks.

    `registry`: the tenants of the service; None on all ranks except rank 0. `publish`: rank 0 calls
    it with each row of the service's metrics. Raises InputError if the model cannot be served with
    this configuration.
    """
    if roles.num_rollout:
        return DisaggregatedService(_share_remote(config, roles, mesh), registry, publish)
    return ColocatedService(share_local(config, mesh), registry, publish)


def share_local(config: ServiceConfig, mesh: Mesh) -> SharedResources[SharedLocalEngine]:
    """Load the base model, and prepare, but do not start, the engine to which this rank belongs. A
    collective."""
    base = _load_base(config, mesh)
    rollout, world = config.rollout_config(), dist.get_world_size()
    layout = engine_layout(rollout, world)
    number, leads = mesh.rank // layout.ranks, mesh.rank % layout.ranks == 0
    server = make_engines(config, number, mesh.device) if leads else None
    group = EngineGroup.create(mesh.rank, world, layout.ranks, timeout_s=config.longest_wait_s)
    engine = LocalEngine(
        EngineNodes(server, None, None),
        number,
        rollout.max_restarts,
        MemoryWatch(mesh.device, console.warning),
        keeps_weights=True,
    )
    engines = SharedLocalEngine(engine, group, server, config.tenants, world)
    return SharedResources(config, mesh, base, engines)


def _share_remote(
    config: ServiceConfig, roles: Roles, mesh: Mesh
) -> SharedResources[SharedRemoteEngines]:
    """Load the base model. On rank 0, also open the coordinator, which the rollout ranks join and
    which tells these ranks about the tenants. A collective of the trainer ranks."""
    coordinator = open_coordinator(config, roles) if mesh.rank == 0 else None
    base = _load_base(config, mesh)
    rollout = config.rollout_config()
    engines = SharedRemoteEngines(coordinator, rollout.start_timeout_s, roles.world)
    return SharedResources(config, mesh, base, engines)


def _load_base(config: ServiceConfig, mesh: Mesh) -> SharedBase:
    model = HfModel.read(config.model.path, config.model.architecture)
    # A model without adapters is refused before its weights are loaded.
    engine_limits(config, model)
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
