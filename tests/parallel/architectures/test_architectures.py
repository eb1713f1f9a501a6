"""Every architecture: weights in and out, parity with transformers, replay, and a parallel step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.align import local_routes
from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.config import ModelConfig, OptimizerConfig
from mrl.learn.batching import make_train_batch
from mrl.types import Sample, TrainBatch
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.model import unwrap
from parallel.packing import pack
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics
from parallel.stacked import stored_tensors
from tests.parallel.architectures.variants import RELEASED, VARIANTS
from tests.parallel.conftest import weighted
from tests.parallel.layouts import build, distance, exported, join_mesh, loss
from tests.parallel.models import (
    DENSE,
    SETTINGS,
    reference_logprobs,
    tiny_samples,
    write_tiny,
)
from tests.ranks import run_ranks
from tests.release import only_in_release, release

TEMPERATURE = 0.8  # of test_layouts.build
TOLERANCE = 1e-5
PARITY = 4e-6
ALIKE = (*DENSE[1:], "qwen3_moe", "mixtral", "olmoe", "glm4_moe")
INDEXER = tuple(
    f"indexer.{part}"
    for part in ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
)
"""The parts of an indexer, which no update changes."""
MOE_TYPES = [name for name in SETTINGS if name not in DENSE]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint, written once."""
    root = tmp_path_factory.mktemp("architectures")

    @cache
    def write(variant: str) -> Path:
        model_type, changes = VARIANTS[variant]
        return write_tiny(model_type, root / variant.replace(" ", "_"), **changes)

    return write


def packed(samples: list[Sample]) -> Any:
    """One micro-batch in which every token but the first counts, so that every log-prob shows."""
    seen = [dataclasses.replace(s, loss_mask=torch.arange(len(s.token_ids)) > 0) for s in samples]
    return pack([weighted(s) for s in seen], 1)


def train_step(policy: Policy, mesh: Mesh, samples: list[Sample]) -> dict[str, Any]:
    """One GSPO step on the samples' own routes, if they have any."""
    replay = Replay.off if samples[0].routing is None else Replay.rollout
    advantages = [(-1.0) ** i * (1 + i / 10) for i in range(len(samples))]
    batch = make_train_batch(samples, advantages, gspo, mesh, micro_batch_tokens=64)
    micro = with_old_logprobs(batch.micro_batches, policy.forward_only(batch.micro_batches, replay))
    ready = TrainBatch(micro, batch.num_loss_tokens, batch.num_samples)
    out = policy.train_step(ready, loss, replay)
    return {**reduce_statistics(out.stats), "grad_norm": out.grad_norm}


def exercise(
    path: Path, sizes: dict[str, int], samples: list[Sample], recompute: bool, trains: bool
) -> dict[str, Any]:
    """Runs on every rank: what was loaded; with samples, native log-probs on the last stage; a step."""
    mesh = join_mesh(path, sizes)
    policy = build(path, mesh, recompute)
    result: dict[str, Any] = {"loaded": exported(policy)}
    if samples:
        result["logprobs"] = policy.forward_only([packed(samples)], Replay.off).logprobs[0]
    if trains:
        result["step"] = train_step(policy, mesh, samples)
        result["weights"] = exported(policy)
    return result


@pytest.fixture(scope="module")
def alone(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What one process makes of a variant, without recompute. It trains only models that a parallel
    step is compared with."""

    @cache
    def run(variant: str) -> dict[str, Any]:
        path, folder, trains = (
            checkpoint(variant),
            tmp_path_factory.mktemp("alone"),
            variant in SETTINGS,
        )
        return run_ranks(1, exercise, path, {}, tiny_samples(path), False, trains, folder=folder)[0]

    return run


def assert_is_checkpoint(loaded: dict[str, Tensor], path: Path) -> None:
    hf = load_file(path / "model.safetensors")
    loaded = dict(stored_tensors(loaded.items(), HfModel.read(path)))
    assert loaded.keys() == hf.keys()
    assert [name for name in hf if not torch.equal(loaded[name], hf[name])] == []


@pytest.mark.parametrize("variant", only_in_release(VARIANTS, lambda name: name in RELEASED))
def test_one_process_equals_transformers(
    variant: str, checkpoint: Callable[[str], Path], alone: Callable[[str], dict[str, Any]]
) -> None:
    path, start = checkpoint(variant), 0
    out = alone(variant)
    assert_is_checkpoint(out["loaded"], path)
    for sample in tiny_samples(path):
        theirs = reference_logprobs(path, sample.token_ids, TEMPERATURE)
        end = start + len(sample.token_ids)
        assert (out["logprobs"][start + 1 : end] - theirs).abs().max() < PARITY
        start = end


@pytest.mark.parametrize(
    ("model_type", "world"),
    [release("qwen3", 4), release("deepseek_v3", 4), *(release(name, 8) for name in MOE_TYPES)],
)
def test_weights_come_back_bit_for_bit_from_stages_and_shards(
    model_type: str, world: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = {"tensor": 2, "pipeline": 2} | ({"expert": 2} if model_type in MOE_TYPES else {})
    path = checkpoint(model_type)
    out = run_ranks(world, exercise, path, sizes, [], False, False, folder=tmp_path)
    for rank in out:
        assert_is_checkpoint(rank["loaded"], path)


# In `make test`: dense with TP, and each kind of expert layer and attention with TP and EP. qwen3_moe
# is the model of test_layouts.py; mixtral and olmoe have its layers less a norm, glm4_moe its attention
# and the experts of deepseek_v3.
@pytest.mark.parametrize("model_type", only_in_release(SETTINGS, lambda n: n in ALIKE))
def test_a_parallel_step_with_recompute_equals_one_process(
    model_type: str,
    checkpoint: Callable[[str], Path],
    alone: Callable[[str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    sizes = {"tensor": 2} | ({"expert": 2} if model_type in MOE_TYPES else {})
    path, theirs = checkpoint(model_type), alone(model_type)
    samples = tiny_samples(path)
    ours = run_ranks(2, exercise, path, sizes, samples, True, True, folder=tmp_path)[0]
    assert_is_checkpoint(ours["loaded"], path)
    assert (ours["logprobs"] - theirs["logprobs"]).abs().max() < TOLERANCE
    if model_type in MOE_TYPES:
        assert ours["step"]["routing/replay_coverage"] == 1.0
        assert ours["step"]["routing/disagreement"] > 0.2
    for key in ("loss/policy", "grad_norm"):
        assert ours["step"][key] == pytest.approx(theirs["step"][key], rel=TOLERANCE), key
    assert distance(ours["weights"], theirs["weights"]) < TOLERANCE
    moved = {k for k, v in theirs["weights"].items() if not torch.equal(v, theirs["loaded"][k])}
    untrained = ("e_score_correction_bias", *INDEXER)
    frozen = {k for k in theirs["weights"] if k.endswith(untrained)}
    assert moved == theirs["weights"].keys() - frozen


def logits_of(router: Any, hidden: Tensor) -> Tensor:
    """f32[n, E]: the logits of hidden states [..., H], without the router's own code."""
    logits = hidden.flatten(0, -2) @ router.weight.T
    return logits if router.bias is None else logits + router.bias


def replay_effects(path: Path, samples: list[Sample]) -> dict[str, Any]:
    """Log-probs with the captured routes, with one captured id changed, native and recorded."""
    policy = build(path, join_mesh(path, {}))
    batch = packed(samples)
    assert batch.routes is not None
    numbers, experts = batch.routes.layer_numbers, batch.routes.num_experts
    captured = local_routes(batch.routes, numbers, 0, 1)
    changed = batch.routes.expert_ids.clone()
    row = changed[1, 0]  # the second token of the first sample, in the first MoE layer
    row[0] = next(e for e in range(experts) if e not in row.tolist())
    routes = dataclasses.replace(batch.routes, expert_ids=changed)
    native = policy.forward_only([batch], Replay.off)
    layers = [x for x in unwrap(policy.chunks[0]).decoder.layers if hasattr(x.mlp, "router")]
    gates: dict[str, Any] = {}
    for layer in layers:
        layer.mlp.router.register_forward_hook(
            lambda router, inputs, output, number=layer.layer_number: gates.update(
                {str(number): (logits_of(router, inputs[0]), output[0], captured[number])}
            )
        )
    replayed = policy.forward_only([batch], Replay.rollout).logprobs[0]
    return {
        "gates": {key: [tensor.detach().clone() for tensor in kept] for key, kept in gates.items()},
        "replayed": replayed,
        "changed": policy.forward_only(
            [dataclasses.replace(batch, routes=routes)], Replay.rollout
        ).logprobs[0],
        "native": native.logprobs[0],
        "recorded": policy.forward_only([batch], Replay.recorded(native.native_routes)).logprobs[0],
    }


def gate_weights(config: dict[str, Any], logits: Tensor, ids: Tensor) -> Tensor:
    """The weights [n, K] that the papers give to experts `ids` [n, K], from router logits [n, E]."""
    if "routed_scaling_factor" in config:  # arXiv 2412.19437 eq. 12 to 16
        chosen = logits.sigmoid().gather(1, ids)
        return config["routed_scaling_factor"] * chosen / chosen.sum(1, keepdim=True)
    chosen = logits.softmax(1).gather(1, ids)
    if config.get("norm_topk_prob", config["model_type"] in ("mixtral", "gpt_oss")):
        return chosen / chosen.sum(1, keepdim=True)
    return chosen


# In `make test`: softmax before the choice, a router with biases, sigmoid with groups. qwen3_moe, with
# softmax after the choice, is the model of tests/moe and test_layouts.py.
ROUTERS = ("qwen2_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("model_type", only_in_release(MOE_TYPES, lambda n: n not in ROUTERS))
def test_replay_replaces_the_choice_and_nothing_else(
    model_type: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint(model_type)
    samples, model = tiny_samples(path), HfModel.read(path)
    out = run_ranks(1, replay_effects, path, samples, folder=tmp_path)[0]
    length = len(samples[0].token_ids)
    difference = (out["changed"] - out["replayed"]).abs()
    assert (difference[:2] == 0).all()  # causal: the changed token predicts only later ones
    assert (difference[2:length] > 0).all()
    assert (difference[length:] == 0).all()  # other sequences of the pack
    assert torch.equal(out["recorded"], out["native"])
    assert (out["replayed"] - out["native"]).abs().max() > 0.1
    assert out["gates"].keys() == {str(number) for number in model.moe_layer_numbers}
    for logits, given, ids in out["gates"].values():
        rows = (ids >= 0).all(1)  # those with a captured route
        expected = gate_weights(model.config, logits[rows], ids[rows])
        assert rows.sum() == sum(len(s.token_ids) - 1 for s in samples)
        assert (given[rows].gather(1, ids[rows]) - expected).abs().max() < 1e-6
        assert ((given[rows] > 0).sum(1) == ids.shape[1]).all()


def bf16_bias(path: Path, samples: list[Sample]) -> dict[str, Any]:
    mesh = join_mesh(path, {})
    policy = Policy(
        HfModel.read(path),
        mesh,
        ModelConfig(path=str(path), dtype="bfloat16"),
        OptimizerConfig(lr=0.05),  # less would be rounded away
        recompute=True,
        temperature=TEMPERATURE,
    )
    result = {"loaded": exported(policy)}
    train_step(policy, mesh, samples)
    return {**result, "trained": exported(policy)}


# deepseek_v32 has the router of deepseek_v3.
@pytest.mark.parametrize("model_type", [release("deepseek_v3"), "deepseek_v32"])
def test_router_biases_and_indexers_stay_frozen_in_a_bf16_model(
    model_type: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """And the biases, and the norms of indexers, stay fp32."""
    path = checkpoint(model_type)
    out = run_ranks(1, bf16_bias, path, tiny_samples(path), folder=tmp_path)[0]
    hf = load_file(path / "model.safetensors")
    buffers = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")
    kept_fp32 = [name for name in hf if name.endswith(buffers)]
    frozen = [*kept_fp32, *(name for name in hf if name.endswith(INDEXER))]
    assert len(kept_fp32) == (11 if model_type == "deepseek_v32" else 3)
    for name, tensor in hf.items():
        kept = tensor if name in kept_fp32 else tensor.bfloat16()
        assert torch.equal(out["loaded"][name], kept), name
        assert out["loaded"][name].dtype == kept.dtype, name
        assert torch.equal(out["trained"][name], kept) == (name in frozen), name
