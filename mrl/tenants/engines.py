"""Makes the engine that the tenants of a service share. It imports no Megatron."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.collect.engine_nodes import gpu_ids
from mrl.config import LoraConfig, ModelConfig, ServiceConfig
from mrl.config.adapter import AdapterLimits
from mrl.rollout.base import engine_seed
from mrl.rollout.sglang.tenants import TenantEngines
from mrl.tenants.schedule import Admission
from parallel.hf_config import HfModel
from parallel.lora.rules import check_rank, read_adapter


def make_engines(config: ServiceConfig, number: int, device: torch.device) -> TenantEngines:
    """Return engine `number` of a service, not started, whose first rank has `device`."""
    rollout = config.rollout_config()
    model = HfModel.read(config.model.path, config.model.architecture)
    return TenantEngines(
        model=own_layers(config),
        config=rollout,
        log_path=Path(config.output_dir) / "logs" / f"engine_{number:02d}.log",
        limits=engine_limits(config, model),
        return_routes=config.moe.capture_routes,
        gpu_ids=gpu_ids(device, rollout.tensor_parallel_size),
        seed=engine_seed(0, number, 0),
        policy=Admission(),
    )


def own_layers(config: ServiceConfig) -> ModelConfig:
    """Return the `model` branch with mrl's own layers, which adapters are built into."""
    return config.model.model_copy(update={"transformer_impl": "local"})


def engine_limits(config: ServiceConfig, model: HfModel) -> AdapterLimits:
    """Return what the engine is made for: the largest adapters that tenants may bring."""
    allowed = config.lora
    adapters = [
        read_adapter(
            LoraConfig(rank=allowed.max_rank, targets=allowed.targets, experts=experts), model
        )
        for experts in allowed.experts
    ]
    for adapter in adapters:
        check_rank(adapter, model, "lora.max_rank")
    return AdapterLimits.around(adapters, allowed.slots + 1)  # the base has one, too
