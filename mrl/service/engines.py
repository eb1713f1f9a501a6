"""Creates the engine that the tenants of a service share. This module imports no Megatron."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.config import LoraConfig, ModelConfig, ServiceConfig
from mrl.config.adapter import AdapterLimits
from mrl.engine_pool.engine_nodes import gpu_ids
from mrl.engines.base import EngineConfig, engine_seed
from mrl.engines.gate import Gate
from mrl.engines.sglang.server import SGLangServer
from mrl.service.schedule import Admission
from parallel.hf_config import HfModel
from parallel.lora.rules import check_rank, read_adapter


def make_engines(config: ServiceConfig, number: int, device: torch.device) -> SGLangServer:
    """Return engine `number` of a service, not started yet. `device` is the device of the engine's
    first rank."""
    rollout = config.rollout_config()
    model = HfModel.read(config.model.path, config.model.architecture)
    engine = EngineConfig(
        model=own_layers(config),
        rollout=rollout,
        log_path=Path(config.output_dir) / "logs" / f"engine_{number:02d}.log",
        return_routes=config.moe.capture_routes,
        gpu_ids=gpu_ids(device, rollout.tensor_parallel_size),
        seed=engine_seed(0, number, 0),
    )
    return SGLangServer(engine, adapters=engine_limits(config, model), gate=Gate(Admission()))


def own_layers(config: ServiceConfig) -> ModelConfig:
    """Return the configuration's section `model`, with `transformer_impl` set to mrl's own layers
    (`local`), because only these layers support adapters."""
    return config.model.model_copy(update={"transformer_impl": "local"})


def engine_limits(config: ServiceConfig, model: HfModel) -> AdapterLimits:
    """Return the limits for which the engine is built: the sizes of the largest adapters that
    tenants may have, and the number of adapters."""
    allowed = config.lora
    adapters = [
        read_adapter(
            LoraConfig(rank=allowed.max_rank, targets=allowed.targets, experts=experts), model
        )
        for experts in allowed.experts
    ]
    for adapter in adapters:
        check_rank(adapter, model, "lora.max_rank")
    return AdapterLimits.around(adapters, allowed.slots + 1)  # the base model takes a slot too
