"""Three policies that differ in all but their base, and what each of their steps gives, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe.routes import Replay
from mrl.config import LoraConfig, ModelConfig, MoeConfig, OptimizerConfig
from mrl.types import Sample
from parallel.base import BaseSetup
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter
from parallel.lora.shared_base import SharedBase
from parallel.lora.weights import LoraSetup
from parallel.mesh import Mesh
from parallel.optimizer.state import get_step, optimizer_shards
from parallel.policy import Policy
from parallel.reduce import reduce_statistics
from tests.parallel.layouts import exported, loss, ready_batch


@dataclass(frozen=True)
class Tenant:
    lora: LoraConfig
    optimizer: OptimizerConfig
    seed: int
    temperature: float
    replay: Replay
    samples: slice
    moe: MoeConfig = field(default_factory=MoeConfig)
    megatron: Mapping[str, Any] = field(default_factory=dict)


def adam(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-3, "adam_eps": 1e-6, **changes})


TENANTS = {
    "a": Tenant(
        LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj")),
        adam(weight_decay=0.01, clip_grad=0.05),
        1, 0.8, Replay.rollout, slice(0, 3),
    ),
    "b": Tenant(
        LoraConfig(rank=3, alpha=6, experts="shared_outer", init="gaussian"),
        adam(lr=3e-3, lr_warmup_steps=2, clip_grad=0.0),
        2, 1.0, Replay.off, slice(2, 5),
        MoeConfig(aux_loss_coeff=0.01, z_loss_coeff=0.001),
    ),
    "c": Tenant(
        LoraConfig(rank=8, alpha=4, targets=("o_proj",), experts="per_expert"),
        adam(adam_beta2=0.9, use_distributed_optimizer=True),
        3, 0.6, Replay.rollout, slice(3, 7),
        megatron={"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}  # fmt: skip


def model_config(path: Path, dtype: Any) -> ModelConfig:
    return ModelConfig(path=str(path), dtype=dtype)


def make_base(path: Path, mesh: Mesh, dtype: Any = "float32") -> SharedBase:
    config = model_config(path, dtype)
    setup = BaseSetup(
        HfModel.read(path), config, logprob_chunk_tokens=24, recompute=True, is_adapted=True
    )
    return SharedBase(setup, mesh)


def make(
    name: str, path: Path, mesh: Mesh, base: SharedBase | None = None, dtype: Any = "float32"
) -> Policy:
    """Policy NAME over a base, or without one as a run of its own makes it."""
    model, tenant = HfModel.read(path), TENANTS[name[0]]
    lora = tenant.lora
    if model.architecture.model_type == "deepseek_v3" and lora.targets != ("o_proj",):
        lora = lora.model_copy(update={"targets": "attention"})  # it has other projections
    return Policy(
        model,
        mesh,
        model_config(path, dtype),
        tenant.optimizer,
        recompute=True,
        temperature=tenant.temperature,
        reference=model,
        moe=tenant.moe,
        megatron=tenant.megatron,
        logprob_chunk_tokens=24,
        lora=LoraSetup(read_adapter(lora, model), lora.init, tenant.seed),
        base=base,
        name="" if base is None else name,
    )


def step(name: str, policy: Policy, mesh: Mesh, samples: list[Sample]) -> dict[str, Any]:
    """One step of a tenant on its own samples: everything that it reports, and gave before it."""
    tenant = TENANTS[name[0]]
    batch, _ = ready_batch(policy, mesh, samples[tenant.samples])
    with policy.reference():
        reference = policy.forward_only(batch.micro_batches, tenant.replay)
    out = policy.train_step(batch, loss, tenant.replay)
    return {
        "old": [b.old_logprobs for b in batch.micro_batches],
        "reference": reference.logprobs,
        "grad_norm": out.grad_norm,
        "lr": out.lr,
        "stats": reduce_statistics(out.stats),
        "logprobs": out.output.logprobs,
    }


def state(policy: Policy) -> dict[str, Any]:
    """All that the next step depends on."""
    shards = optimizer_shards(policy.optimizer)
    names = {id(entry.parameter): entry for entry in policy.trained.entries}
    return {
        "adapter": exported(policy),
        "optimizer": {
            f"{names[key].hf_names()[0]} {kind}": tensor.clone()
            for key, shard in shards.items()
            for kind, tensor in shard.tensors.items()
        },
        "step": get_step(policy.optimizer),
        "schedule": policy.scheduler.state_dict(),
    }


def differences(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """The places where two results do not have the same bits."""
    if isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if same else [place]
    if isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{place}: keys"]
        return [d for key in theirs for d in differences(ours[key], theirs[key], f"{place}.{key}")]
    if isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{place}: length"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, f"{place}[{n}]")]
    return [] if ours == theirs else [f"{place}: {ours} and {theirs}"]
