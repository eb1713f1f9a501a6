"""Balancing losses, the expert bias and load statistics: against transformers, and in every layout.

The policy loss is 0 here, so that every gradient is that of a balancing loss.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from moe.routes import Replay
from moe.statistics import load_ratios
from mrl.algorithms import gspo
from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.learn.batching import make_train_batch
from mrl.types import LossOutput, MicroBatch, Sample
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.model import unwrap
from parallel.policy import Policy
from parallel.reduce import reduce_statistics
from tests.parallel.conftest import EXPERTS, MOE_LAYERS, TOPK, make_sample
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import LAYOUTS, TOLERANCE, join_mesh
from tests.ranks import run_ranks
from tests.release import release

COEFF = 0.3
LOSSES = {
    "z": MoeConfig(z_loss_coeff=COEFF),
    "aux_loss": MoeConfig(load_balancing_type="aux_loss", aux_loss_coeff=COEFF),
    "seq_aux_loss": MoeConfig(load_balancing_type="seq_aux_loss", aux_loss_coeff=COEFF),
    "global_aux_loss": MoeConfig(load_balancing_type="global_aux_loss", aux_loss_coeff=COEFF),
}


def nothing(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
    return LossOutput(0.0 * logprobs.sum())


def build(
    model: HfModel, mesh: Mesh, moe: MoeConfig, recompute: bool = False, lr: float = 1e-3
) -> Policy:
    return Policy(
        model,
        mesh,
        ModelConfig(path=str(model.path)),
        OptimizerConfig(lr=lr, clip_grad=0),
        recompute=recompute,
        temperature=1.0,
        moe=moe,
    )


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The reduced gradients of the last step under HF names."""
    entries = policy.weights.entries
    grads = [dataclasses.replace(e, parameter=getattr(e.parameter, "main_grad")) for e in entries]  # noqa: B009
    policy.weights.entries = grads
    try:
        buckets = export_buckets(policy.weights, 0, 1 << 20)
        return {name: t.clone() for bucket in buckets for name, t in bucket.tensors}
    finally:
        policy.weights.entries = entries


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of a gradient; those of exactly 0 must be 0 on both sides."""
    assert a.keys() == b.keys()
    zero = [name for name in b if not b[name].any()]
    assert set(zero) == {"model.norm.weight", "lm_head.weight"} | {
        n for n in zero if "experts" in n
    }
    assert not any(a[name].any() for name in zero)
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in b if k not in zero)


def step(
    policy: Policy, mesh: Mesh, samples: list[Sample], tokens: int, replay: Replay
) -> dict[str, float]:
    batch = make_train_batch(samples, [1.0] * len(samples), gspo, mesh, tokens)
    return reduce_statistics(policy.train_step(batch, nothing, replay).stats)


def masked(samples: list[Sample]) -> list[Sample]:
    """One sample without a reward: it is no token of the step."""
    off = dataclasses.replace(samples[3], loss_mask=torch.zeros_like(samples[3].loss_mask))
    return [*samples[:3], off, *samples[4:]]


PACKS = (4096, 48)
"""Tokens of a micro-batch: all in one, and several."""


def exercise(
    model_path: Path,
    sizes: dict[str, int],
    samples: list[Sample],
    packs: tuple[int, ...],
    names: tuple[str, ...],
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    model = HfModel.read(model_path)
    result: dict[str, Any] = {}
    for name in names:
        policy = build(model, mesh, LOSSES[name], recompute=name == "seq_aux_loss")
        for tokens in packs:
            stats = step(policy, mesh, masked(samples), tokens, Replay.rollout)
            result[f"{name}/{tokens}"] = {
                "grads": gradients(policy),
                "stats": {k: v for k, v in stats.items() if k.startswith("moe/")},
            }
            policy.weights.load()
    return result


@pytest.fixture(scope="module")
def one_process(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("balancing")
    args = (model_path, {}, few_samples(), PACKS, tuple(LOSSES))
    return run_ranks(1, exercise, *args, folder=folder)[0]


def same_plan(layout: str) -> bool:
    """Whether the layout has one process's micro-batches: nothing is shared out over data ranks."""
    world, sizes = LAYOUTS[layout]
    return math.prod(n for name, n in sizes.items() if name in ("tensor", "pipeline")) == world


@pytest.mark.parametrize(
    ("layout", "packs", "names"),
    [
        ("TP2", PACKS[1:], ("aux_loss", "seq_aux_loss")),
        release("CP2", PACKS[1:], ("z", "seq_aux_loss")),
        ("PP2", PACKS[1:], ("z", "global_aux_loss")),
        ("EP2", PACKS[1:], ("seq_aux_loss", "global_aux_loss")),
        *(
            release(layout, PACKS, tuple(LOSSES))
            for layout in ("DP2", "EP2", "TP2", "CP2", "TP2xCP2", "PP2xEP2")
        ),
    ],
    ids=str,
)
def test_every_layout_has_the_gradient_of_one_process(
    layout: str,
    packs: tuple[int, ...],
    names: tuple[str, ...],
    model_path: Path,
    one_process: dict[str, Any],
    tmp_path: Path,
) -> None:
    world, sizes = LAYOUTS[layout]
    args = (model_path, sizes, few_samples(), packs, names)
    ours = run_ranks(world, exercise, *args, folder=tmp_path)[0]
    for key in ours:
        reference = one_process[key]
        # Batch-wise losses depend on the micro-batches by definition.
        if key.startswith(("z/", "seq_aux_loss/")) or same_plan(layout):
            assert distance(ours[key]["grads"], reference["grads"]) < TOLERANCE, key
            assert ours[key]["stats"] == pytest.approx(reference["stats"], rel=TOLERANCE), key
        else:
            loads = {k: v for k, v in reference["stats"].items() if "load" in k or "dead" in k}
            assert loads == pytest.approx({k: ours[key]["stats"][k] for k in loads}, rel=1e-12)


def test_sequence_and_z_loss_do_not_depend_on_the_packing(one_process: dict[str, Any]) -> None:
    for name in ("z", "seq_aux_loss"):
        a, b = one_process[f"{name}/4096"], one_process[f"{name}/48"]
        assert distance(a["grads"], b["grads"]) < TOLERANCE
    a, b = one_process["aux_loss/4096"], one_process["aux_loss/48"]
    assert distance(a["grads"], b["grads"]) > 1e-2


def transformers_logits(model: Any, samples: list[Sample]) -> dict[int, list[Tensor]]:
    """Router logits [T, E] of each sample by layer number, with gradients."""
    logits: dict[int, list[Tensor]] = {number: [] for number in MOE_LAYERS}
    for number in MOE_LAYERS:
        gate = model.model.layers[number - 1].mlp.gate
        gate.register_forward_hook(
            lambda gate, inputs, _, number=number: logits[number].append(
                inputs[0].flatten(0, -2) @ gate.weight.T
            )
        )
    for sample in samples:
        model(sample.token_ids.unsqueeze(0))
    return logits


def written_out(kind: str, pack: list[list[Tensor]]) -> Tensor:
    """The loss of one micro-batch from its layers' logits, per token and summed over layers."""
    total = torch.zeros(())
    for layers in pack:
        whole = torch.cat(layers)
        if kind == "z":
            total = total + whole.logsumexp(-1).square().mean()
            continue
        for part in layers if kind == "seq_aux_loss" else [whole]:
            p = part.softmax(-1)
            f = torch.zeros(EXPERTS)
            for row in p.topk(TOPK).indices.flatten().tolist():
                f[row] += 1 / (len(part) * TOPK)
            total = total + EXPERTS * (f * p.mean(0)).sum() * len(part) / len(whole)
    return total


def native(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    mesh = join_mesh(model_path, {})
    result = {}
    for name, moe in LOSSES.items():
        policy = build(HfModel.read(model_path), mesh, moe)
        stats = step(policy, mesh, samples, 4096, Replay.off)
        result[name] = {"grads": gradients(policy), "stats": stats}
    return result


def test_losses_equal_their_formulas_on_transformers(model_path: Path, tmp_path: Path) -> None:
    samples = few_samples()
    ours = run_ranks(1, native, model_path, samples, folder=tmp_path)[0]
    for name in LOSSES:
        model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        logits = transformers_logits(model, samples)
        loss = written_out(name, list(logits.values()))
        key = "moe/z_loss" if name == "z" else "moe/aux_loss"
        mean = float(loss.detach()) / len(MOE_LAYERS)
        assert ours[name]["stats"][key] == pytest.approx(mean, rel=1e-5)
        (COEFF * loss).backward()
        grads = ours[name]["grads"]
        for part in ("layers.0.mlp.gate", "layers.3.mlp.gate", "layers.2.self_attn.v_proj"):
            wanted = model.get_parameter(f"model.{part}.weight").grad
            assert wanted is not None
            assert wanted.norm() > 1e-3
            found = grads[f"model.{part}.weight"]
            assert float((found - wanted).norm() / wanted.norm()) < 1e-5, (name, part)
        counts = [torch.cat(rows).topk(TOPK).indices.flatten() for rows in logits.values()]
        loads = [torch.bincount(c, minlength=EXPERTS) for c in counts]
        by_hand = [int(load.max()) / int(load.sum()) * EXPERTS for load in loads]
        stats = ours[name]["stats"]
        found = [stats[f"moe/load_max/layer_{number:02d}"] for number in MOE_LAYERS]
        assert found == pytest.approx(by_hand, rel=1e-12)
        assert stats["moe/load_max"] == max(found)
        assert "moe/load_max/layer_02" not in stats  # dense


def test_load_ratios_by_hand() -> None:
    loads = {1: torch.tensor([3, 3, 3, 3]), 12: torch.tensor([0, 6, 0, 2])}
    stats = {key: float(value.value) for key, value in load_ratios(loads).items()}  # pyright: ignore
    shares = (0.75, 0.25)
    assert stats == pytest.approx(
        {
            "moe/load_max": 3.0,
            "moe/dead_experts": 2.0,
            "moe/load_max/layer_01": 1.0,
            "moe/load_entropy/layer_01": 1.0,
            "moe/dead_experts/layer_01": 0.0,
            "moe/load_max/layer_12": 3.0,
            "moe/load_entropy/layer_12": -sum(p * math.log(p) for p in shares) / math.log(4),
            "moe/dead_experts/layer_12": 2.0,
        }
    )


def test_a_layer_without_counted_tokens_has_no_load_ratios() -> None:
    assert load_ratios({1: torch.zeros(4)}) == {}
    assert load_ratios({1: torch.zeros(4), 2: torch.ones(4)}) == load_ratios({2: torch.ones(4)})


def with_bias(model_path: Path) -> HfModel:
    """The same model with DeepSeek-V3's kind of router: sigmoid scores and a bias on the choice."""
    model = HfModel.read(model_path)

    def settings(hf: dict[str, Any]) -> dict[str, Any]:
        own = model.architecture.transformer_config(hf)
        return own | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": False,
        }

    architecture = dataclasses.replace(model.architecture, transformer_config=settings)
    return dataclasses.replace(model, architecture=architecture)


def biases(policy: Policy) -> dict[int, Tensor]:
    layers: list[Any] = [x for chunk in policy.chunks for x in unwrap(chunk).decoder.layers]
    return {
        layer.layer_number: layer.mlp.router.expert_bias
        for layer in layers
        if hasattr(layer.mlp, "router")
    }


def lopsided() -> Sample:
    """A long sample without a reward, all of it at two experts: the bias must not see it."""
    sample = make_sample(torch.Generator().manual_seed(2), 100, prompt_len=3)
    assert sample.routing is not None
    ids = torch.tensor([0, 1], dtype=torch.uint8).expand(99, len(MOE_LAYERS), TOPK).contiguous()
    routing = dataclasses.replace(sample.routing, expert_ids=ids)
    off = torch.zeros_like(sample.loss_mask)
    return dataclasses.replace(sample, loss_mask=off, routing=routing)


def bias_steps(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], rate: float, recompute: bool
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    moe = MoeConfig(expert_bias_update_rate=rate)
    policy = build(with_bias(model_path), mesh, moe, recompute)
    for number, bias in biases(policy).items():
        bias.copy_(torch.linspace(-0.01, 0.02, EXPERTS) * number)
    before = {n: b.clone() for n, b in biases(policy).items()}
    step(policy, mesh, samples, 48, Replay.rollout)
    return {"before": before, "after": biases(policy)}


@pytest.mark.parametrize("layout", ["one", "CP2", release("TP2xCP2"), release("DP2")])
def test_expert_bias_moves_by_the_load_of_the_step(
    layout: str, model_path: Path, tmp_path: Path
) -> None:
    world, sizes = LAYOUTS.get(layout, (1, {}))
    samples, rate = few_samples(), 1e-3
    run = (model_path, sizes, [*samples, lopsided()])
    out = run_ranks(world, bias_steps, *run, rate, layout == "DP2", folder=tmp_path / "on")[0]
    for place, number in enumerate(MOE_LAYERS):
        # Every row but the last of a sequence has a captured route; that one is the router's own.
        load = torch.zeros(EXPERTS)
        num_tokens = 0
        for sample in samples:
            assert sample.routing is not None
            ids = sample.routing.expert_ids[:, place].flatten().long()
            load += torch.bincount(ids, minlength=EXPERTS)
            num_tokens += len(sample.token_ids)
        undecided = len(samples)  # an expert may be among the choices of each last row
        average = num_tokens * TOPK / EXPERTS
        moved = out["after"][number] - out["before"][number]
        for expert in range(EXPERTS):
            if load[expert] > average:
                assert moved[expert] == pytest.approx(-rate, rel=1e-3)
            elif load[expert] + undecided < average:
                assert moved[expert] == pytest.approx(rate, rel=1e-3)
    if layout == "one":
        frozen = run_ranks(1, bias_steps, *run, 0.0, False, folder=tmp_path / "off")[0]
        assert all(torch.equal(frozen["after"][n], b) for n, b in frozen["before"].items())
