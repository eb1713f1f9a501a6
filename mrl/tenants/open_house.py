"""Builds what the tenants of a service share: the base model on all ranks, and an engine beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.collect.engine_nodes import EngineNodes, gpu_ids
from mrl.collect.engine_slot import EngineSlot
from mrl.config import LoraConfig, ServiceConfig
from mrl.config.adapter import AdapterLimits
from mrl.errors import InputError
from mrl.preflight.engine_layout import check_engine_sizes, engine_layout
from mrl.rollout.base import engine_seed
from mrl.rollout.engine_group import EngineGroup
from mrl.rollout.sglang.tenants import TenantEngines
from mrl.run import console
from mrl.system.memory_watch import MemoryWatch
from mrl.tenants.colocated_house import ColocatedHouse
from mrl.tenants.schedule import Admission
from parallel.base import BaseSetup
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.options.read import read_options


def service_dims(config: ServiceConfig, world: int) -> ParallelDims:
    """Return the layout of a service on `world` ranks. Raises InputError where they do not fit it."""
    dims = ParallelDims.create(config.parallel, world)
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
    if engine_layout(rollout, world).num_nodes > 1:
        raise InputError(
            "rollout.tensor_parallel_size: an engine of adapters stays on one node; lower it to the "
            "ranks of a node"
        )
    return dims


def open_house(config: ServiceConfig, mesh: Mesh, logs: Path) -> ColocatedHouse:
    """Load the base and make this rank's place for an engine, which is not started. A collective.

    Raises InputError for a model that cannot be served so.
    """
    model = HfModel.read(config.model.path, config.model.architecture)
    native = config.model.model_copy(update={"transformer_impl": "local"})
    setup = BaseSetup(
        model,
        native,
        config.train.recompute,
        config.moe_config(),
        options=read_options(config.megatron),
        logprob_chunk_tokens=config.train.logprob_chunk_tokens,
        is_adapted=True,
    )
    limits = engine_limits(config, model)
    base = SharedBase(setup, mesh)
    rollout, world = config.rollout_config(), dist.get_world_size()
    layout = engine_layout(rollout, world)
    number, leads = mesh.rank // layout.ranks, mesh.rank % layout.ranks == 0
    engines = None
    if leads:
        engines = TenantEngines(
            model=native,
            config=rollout,
            log_path=logs / f"engine_{number:02d}.log",
            limits=limits,
            return_routes=config.moe.capture_routes,
            gpu_ids=gpu_ids(mesh.device, layout.ranks),
            seed=engine_seed(0, number, 0),
            policy=Admission(),
        )
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


def engine_limits(config: ServiceConfig, model: HfModel) -> AdapterLimits:
    """Return what the engine is made for: the largest adapters that tenants may bring."""
    allowed = config.lora
    adapters = [
        read_adapter(
            LoraConfig(rank=allowed.max_rank, targets=allowed.targets, experts=experts), model
        )
        for experts in allowed.experts
    ]
    return AdapterLimits.around(adapters, allowed.slots + 1)  # the base has one, too
