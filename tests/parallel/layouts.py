"""Layouts and what is asked of each: the same training steps as one process.

`make layouts` runs all of them (benchmarks/layouts.py), `make test` a part (test_layouts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.config import AlgorithmConfig, ModelConfig, MoeConfig, OptimizerConfig, ParallelConfig
from mrl.config.adapter import Experts
from mrl.kernels.digest import add_digests, digests_of
from mrl.learn.batching import make_train_batch
from mrl.learn.packs import shared_tokens
from mrl.types import LossOutput, MicroBatch, Sample, TrainBatch, WeightBucket
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.dims import ParallelDims
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.layers.experts import compute_one_by_one
from parallel.lora.weights import LoraSetup
from parallel.mesh import Mesh, init_mesh, world_size
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics
from tests.parallel.adapters import adapter_of, lora_folder, with_updates

CONFIG_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "dispatcher": "moe_token_dispatcher_type",
}
NUM_STEPS = 3
CHUNK = 24
"""Tokens whose logits are held at a time; micro-batches have 64."""
TOLERANCE = 1e-5
"""Relative, for float32."""

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "TP2xEP2": (2, {"tensor": 2, "expert": 2}),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}),
    "PP2xEP2": (4, {"pipeline": 2, "expert": 2}),
    "TP2xPP2xEP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}),
}
"""Ranks and sizes that tests of single features choose from."""


@dataclass(frozen=True)
class Layout:
    """Sizes by the keys of CONFIG_KEYS; what is left of `world` is data parallel."""

    world: int
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    distributed_optimizer: bool = False
    recompute: bool = True
    true_on_policy: bool = False
    replay: Literal["ids", "ids_order_weights"] = "ids"
    optimizer: Literal["adam", "muon"] = "adam"
    lora: Experts | None = None
    """Train an adapter of all projections, with these matrices of the experts."""
    loops: bool = False
    """Let Megatron compute one expert after the other, with its SequentialMLP."""
    share_prefixes: bool = False
    """Let samples share the rows of their prefixes where that pays."""

    @property
    def name(self) -> str:
        short = {"tensor": "TP", "context": "CP", "pipeline": "PP", "virtual_pipeline": "VPP",
                 "expert": "EP", "expert_tensor": "ETP"}  # fmt: skip
        used = {key: self.sizes.get(key, 1) for key in short}
        parts = [f"{short[key]}{size}" for key, size in used.items() if size > 1]
        dp = self.world // (used["tensor"] * used["context"] * used["pipeline"])
        parts += [f"DP{dp}"] if dp > 1 or not parts else []
        text = "x".join(parts)
        if ends := [f"{n} {key}" for key in ("first", "last") if (n := self.sizes.get(key))]:
            text += f" ({', '.join(ends)})"
        more = [
            ("dispatcher" in self.sizes, f" {self.sizes.get('dispatcher')}"),
            (self.optimizer == "muon", " Muon"),
            (self.distributed_optimizer, " distributed optimizer"),
            (not self.recompute, " no recompute"),
            (self.true_on_policy, " true on-policy"),
            (self.replay != "ids", f" {self.replay}"),
            (self.lora is not None, f" LoRA, experts {self.lora}"),
            (self.loops, " one by one"),
            (self.share_prefixes, " shared prefixes"),
            (self.dtype == "bfloat16", " bf16"),
        ]
        return text + "".join(words for is_on, words in more if is_on)


def parallel_config(sizes: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig(**{CONFIG_KEYS[key]: value for key, value in sizes.items()})


def join_mesh(model_path: Path, sizes: dict[str, Any]) -> Mesh:
    dims = ParallelDims.create(parallel_config(sizes), world_size())
    dims.check_model(HfModel.read(model_path).sizes)
    return init_mesh(dims, seed=0)


def build(
    model_path: Path,
    mesh: Mesh,
    recompute: bool = False,
    *,
    dtype: Any = "float32",
    distributed_optimizer: bool = False,
    optimizer: Literal["adam", "muon"] = "adam",
    true_on_policy: bool = False,
    replay: Literal["ids", "ids_weights", "ids_order_weights"] = "ids",
    megatron: Mapping[str, Any] = MappingProxyType({}),
    logprob_chunk_tokens: int = 1024,
    lora: LoraSetup | None = None,
    mtp: float = 0.0,
) -> Policy:
    model = HfModel.read(model_path)
    return Policy(
        model.training_mtp() if mtp else model,
        mesh,
        ModelConfig(path=str(model_path), dtype=dtype),
        # A larger epsilon than Adam's usual one: its first step would otherwise be the sign of the
        # gradient, and rounding noise around 0 would come out as a full step.
        OptimizerConfig(
            name=optimizer,
            lr=1e-3,
            weight_decay=0.01,
            clip_grad=0.05,
            adam_eps=1e-6,
            use_distributed_optimizer=distributed_optimizer,
        ),
        recompute=recompute,
        temperature=0.8,
        true_on_policy=true_on_policy,
        moe=MoeConfig(replay=replay),
        megatron=megatron,
        logprob_chunk_tokens=logprob_chunk_tokens,
        lora=lora,
        mtp_loss_scaling_factor=mtp,
    )


def exported(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What an engine is sent under HF names: the whole model, or an adapter."""
    return drained(policy.export(0, 4096, dtype))


def drained(buckets: Iterable[WeightBucket]) -> dict[str, Tensor]:
    """The tensors of an export, every name exactly once, each bucket with its own digest."""
    pairs, is_first = [], True
    for bucket in buckets:
        pairs += [(name, tensor.clone()) for name, tensor in bucket.tensors]
        assert (bucket.digest_s > 0) == is_first  # taken before it, for all
        assert bucket.digest == add_digests(digests_of(bucket.tensors))
        is_first = False
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def buffer_names(model: HfModel) -> set[str]:
    """HF names of what Megatron keeps as buffers, which are exported in their own dtype."""
    return {
        name.format(layer=layer)
        for rule in model.architecture.rules(model.config)
        if rule.is_buffer
        for name in rule.hf
        for layer in range(model.sizes.num_layers)
    }


def check_cast(
    cast: dict[str, Tensor], loaded: dict[str, Tensor], dtype: torch.dtype, buffers: set[str]
) -> None:
    """What was exported in `dtype` is the loaded weights rounded to it; buffers keep their own."""
    assert cast.keys() == loaded.keys()
    for name, full in loaded.items():
        expected = full if name in buffers else full.to(dtype)
        assert cast[name].dtype == expected.dtype, name
        assert torch.equal(cast[name], expected), name


def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
    return gspo.loss(logprobs, batch, AlgorithmConfig(clip_low=0.9, clip_high=10.0))


def replay_of(samples: list[Sample]) -> Replay:
    """Samples of a dense model carry no routes."""
    return Replay.off if samples[0].routing is None else Replay.rollout


def ready_batch(
    policy: Policy, mesh: Mesh, samples: list[Sample], share_prefixes: bool = False
) -> tuple[TrainBatch, dict]:
    """The batch with the log-probs before the update, and the statistics of that pass."""
    advantages = [(-1.0) ** i * (1 + i / 10) for i in range(len(samples))]
    batch = make_train_batch(
        samples, advantages, gspo, mesh, micro_batch_tokens=64, share_prefixes=share_prefixes
    )
    before = policy.forward_only(batch.micro_batches, replay_of(samples))
    micro = with_old_logprobs(batch.micro_batches, before)
    return TrainBatch(micro, batch.num_loss_tokens, batch.num_samples), dict(before.routing)


def train(
    policy: Policy, mesh: Mesh, samples: list[Sample], steps: int, share_prefixes: bool = False
) -> list[dict]:
    batch, _ = ready_batch(policy, mesh, samples, share_prefixes)
    results = []
    for _ in range(steps):
        out = policy.train_step(batch, loss, replay_of(samples))
        results.append({**reduce_statistics(out.stats), "grad_norm": out.grad_norm})
    return results


def saved_and_resumed(policy: Policy, build: Callable[[], Policy], store: Checkpoints) -> Policy:
    """Another policy that loaded what this one saved; this one went to the host and came back."""
    store.save(2, policy, {})
    policy.ledger.free("gradients")
    policy.ledger.to_host("optimizer")
    policy.ledger.to_host("parameters")
    policy.onload()
    resumed = build()
    store.load(2, resumed)
    return resumed


def train_layout(model_path: Path, layout: Layout, samples: list[Sample]) -> dict[str, Any]:
    """Runs on every rank; rank 0's answer counts: steps, weights before and after, routing."""
    mesh = join_mesh(model_path, layout.sizes)
    adapter = None
    if layout.lora is not None:
        adapter = adapter_of(HfModel.read(model_path), layout.lora)
    policy = build(
        model_path,
        mesh,
        layout.recompute,
        dtype=layout.dtype,
        distributed_optimizer=layout.distributed_optimizer,
        optimizer=layout.optimizer,
        true_on_policy=layout.true_on_policy,
        replay=layout.replay,
        # One process is what the others are held against: with all logits.
        logprob_chunk_tokens=0 if layout.world == 1 else CHUNK,
        lora=None if adapter is None else LoraSetup(adapter, path=lora_folder(model_path, adapter)),
    )
    if layout.loops:
        for chunk in policy.chunks:
            compute_one_by_one(chunk)
    loaded = exported(policy)
    for dtype in (torch.bfloat16, torch.float32):  # for an engine of another precision
        check_cast(exported(policy, dtype), loaded, dtype, buffer_names(policy.weights.model))
    batch, routing = ready_batch(policy, mesh, samples, layout.share_prefixes)
    found = {
        "loaded": loaded,
        "routing": reduce_statistics(routing),
        "shared": shared_tokens([batch], mesh)["train/shared_tokens"],
        "steps": train(policy, mesh, samples, NUM_STEPS, layout.share_prefixes),
        "weights": exported(policy),
    }
    if adapter is not None:
        found["base"] = drained(export_buckets(policy.weights, 0, 4096))
        found["merged"] = drained(export_buckets(policy.weights, 0, 4096, merged=True))
    return found


@dataclass(frozen=True)
class Agreement:
    """Largest relative differences from one process over all steps."""

    loss: float
    grad_norm: float
    weights: float
    """The largest difference of a weight matrix in the Frobenius norm, after the last step."""
    replay_coverage: float
    """Smallest of all steps: 1 when every row was routed as captured."""
    loaded_bitwise: bool
    """HF -> Megatron -> HF gives the bits of the folder."""
    base_bitwise: bool = True
    """The base of an adapter still has the bits of the folder after the last step."""
    merged: float = 0.0
    """The largest difference of a merged weight, after the last step, from the base plus the update
    that one process trained; 0 without an adapter."""

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm, self.weights, self.merged)


def agreement(
    ours: dict[str, Any],
    one: dict[str, Any],
    hf: dict[str, Tensor],
    base: dict[str, Tensor] | None = None,
) -> Agreement:
    """Compare a layout with one process. `hf`: what both were loaded with, the model or the adapter of
    the model `base`."""

    def worst(key: str) -> float:
        return max(
            abs(a[key] - b[key]) / abs(b[key])
            for a, b in zip(ours["steps"], one["steps"], strict=True)
        )

    loaded = ours["loaded"]
    assert loaded.keys() == hf.keys()
    expected = None if base is None else with_updates(base, one["weights"])
    return Agreement(
        loss=worst("loss/policy"),
        grad_norm=worst("grad_norm"),
        weights=distance(ours["weights"], one["weights"]),
        replay_coverage=min(step.get("routing/replay_coverage", 1.0) for step in ours["steps"]),
        loaded_bitwise=same_bits(loaded, hf),
        base_bitwise=base is None or same_bits(ours["base"], base),
        merged=0.0 if expected is None else distance(ours["merged"], expected),
    )


def same_bits(ours: dict[str, Tensor], folder: dict[str, Tensor]) -> bool:
    """Whether tensors are those of a folder, rounded to their own dtype."""
    assert ours.keys() == folder.keys()
    return all(torch.equal(v, folder[k].to(v.dtype)) for k, v in ours.items())


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of a weight matrix."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in b)
