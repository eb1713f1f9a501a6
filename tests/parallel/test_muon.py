"""Muon against torch's, against its formula in fp64, in shards, in Megatron's optimizer and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.routes import Replay
from mrl.config import OptimizerConfig
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.optimizer.layer_wise import LayerWiseOptimizer
from parallel.optimizer.muon import Matrix, Muon
from parallel.optimizer.muon_setup import is_matrix
from parallel.optimizer.state import optimizer_shards
from parallel.owners import assign
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, exported, join_mesh, loss, ready_batch, saved_and_resumed
from tests.parallel.models import write_tiny
from tests.ranks import run_ranks
from tests.release import release

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
KEY = ("key_norm_bias", "key_norm_weight", "key_weight")  # of an indexer


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def muon(parameter: Tensor, dtype: torch.dtype, matrix: Matrix = Matrix(), **keys: Any) -> Muon:  # noqa: B008
    config = OptimizerConfig(name="muon", lr=LR, weight_decay=DECAY, **keys)
    return Muon([{"params": [parameter]}], {parameter: matrix}, config, dtype)


def published_orthogonalisation(update: Tensor) -> Tensor:
    """Keller Jordan's iteration in fp64, as in his post, with the transpose left out."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / update.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def published_steps(
    start: Tensor, gradients: list[Tensor], scale: float, nesterov: bool = True
) -> Tensor:
    weight, momentum = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        update = momentum
        if nesterov:
            update = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        weight = weight * (1 - LR * DECAY) - LR * scale * published_orthogonalisation(update)
    return weight


def draw(*shape: int, count: int = 3) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for _ in range(count + 1)]
    return tensors[0], tensors[1:]


def stepped(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    parameter = optimizer.param_groups[0]["params"][0]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


SCALES: dict[str, tuple[dict[str, Any], str, Callable[[int, int], float]]] = {
    "jordan": (
        {"muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 1.0},
        "original",
        lambda m, n: max(1, m / n) ** 0.5,
    ),
    "moonlight": ({}, "match_rms_adamw", lambda m, n: 0.2 * max(m, n) ** 0.5),
}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_is_the_published_one(name: str, shape: tuple, nesterov: bool) -> None:
    keys, torch_name, scale = SCALES[name]
    start, gradients = draw(*shape)
    ours = torch.nn.Parameter(start.clone())
    found = stepped(
        muon(ours, torch.float32, **keys, muon_use_nesterov=nesterov), gradients
    ).double()
    wanted = published_steps(start, gradients, scale(*shape), nesterov)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    assert float((wanted - start).norm() / start.norm()) > 1e-3

    # torch orthogonalises in bfloat16: the same bits, where ours does too.
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    reference = torch.optim.Muon(
        [theirs], lr=LR, weight_decay=DECAY, nesterov=nesterov, adjust_lr_fn=torch_name
    )
    half = muon(ours, torch.bfloat16, **keys, muon_use_nesterov=nesterov)
    assert torch.equal(stepped(half, gradients), stepped(reference, gradients))


@pytest.mark.parametrize("kind", ["simple", "quintic"])
def test_singular_values_come_near_one(kind: str) -> None:
    start, gradients = draw(16, 32, count=1)
    parameter = torch.nn.Parameter(torch.zeros_like(start))
    keys: dict[str, Any] = {"muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 1.0}
    optimizer = muon(parameter, torch.float32, muon_coefficient_type=kind, **keys)
    values = torch.linalg.svdvals(stepped(optimizer, gradients) / LR)
    width = {"simple": 0.35, "quintic": 0.15}[kind]
    assert values.max() < 1 + width
    assert values.min() > 1 - width


def test_unit_rms_norm() -> None:
    start, gradients = draw(20, 10)
    keys: dict[str, Any] = {
        "muon_scale_mode": "unit_rms_norm",
        "muon_extra_scale_factor": 3.0,
    }
    found = stepped(muon(torch.nn.Parameter(start.clone()), torch.float32, **keys), gradients)
    wanted = published_steps(start, gradients, 3 * 2**0.5)
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-6


def test_a_matrix_without_gradients_moves_in_full_until_its_momentum_has_decayed() -> None:
    """The number of docs/muon.md: 250 steps after the last gradient it moves in full, after 350 not."""
    _, [gradient] = draw(24, 16, count=1)
    gradient *= 1e-3 / gradient.norm()
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    config = OptimizerConfig(name="muon", lr=LR)
    optimizer = Muon([{"params": [parameter]}], {parameter: Matrix()}, config, torch.float32)
    moved = []
    for step in range(391):
        before = parameter.detach().clone()
        stepped(optimizer, [gradient if step < 41 else torch.zeros_like(gradient)])
        moved.append(float((parameter.detach() - before).norm()))
    assert moved[290] > 0.9 * moved[40]
    assert moved[390] < 0.1 * moved[40]


HEADS = (6, 3, 3)
"""Rows of queries, keys and values in each of two query groups."""


def shards() -> dict[str, float]:
    """Runs on two ranks: the distance of this rank's shard from the shard of the whole."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}
    for name, dim, heads in (("rows", 0, None), ("columns", 1, None), ("qkv", 0, HEADS)):
        start, gradients = draw(24, 10)
        whole = stepped(
            muon(torch.nn.Parameter(start.clone()), torch.float32, Matrix(heads=heads)), gradients
        )
        own = torch.nn.Parameter(start.chunk(2, dim)[rank].clone())
        matrix = Matrix(group, dim, heads)
        shard = stepped(
            muon(own, torch.float32, matrix), [g.chunk(2, dim)[rank] for g in gradients]
        )
        found[name] = float((shard - whole.chunk(2, dim)[rank]).norm() / whole.norm())
    # Queries, keys and values apart are three matrices.
    parts = [t.unflatten(0, (2, 12)).split(HEADS, dim=1)[1].flatten(0, 1) for t in (start, whole)]
    keys = [g.unflatten(0, (2, 12)).split(HEADS, dim=1)[1].flatten(0, 1) for g in gradients]
    wanted = published_steps(parts[0], keys, 0.2 * 10**0.5)
    found["keys"] = float((parts[1].double() - wanted).norm() / wanted.norm())
    # [gate; up] of each rank: a permutation of the rows of the whole.
    start, gradients = draw(24, 10)
    order = torch.arange(24).view(2, 2, 6).transpose(0, 1).flatten()
    own = torch.nn.Parameter(start[order].chunk(2)[rank].clone())
    shard = stepped(
        muon(own, torch.float32, Matrix(group)), [g[order].chunk(2)[rank] for g in gradients]
    )
    whole = stepped(muon(torch.nn.Parameter(start.clone()), torch.float32), gradients)
    found["gated"] = float((shard - whole[order].chunk(2)[rank]).norm() / whole.norm())
    return found


def test_shards_are_those_of_the_whole_matrix(tmp_path: Path) -> None:
    for found in run_ranks(2, shards, folder=tmp_path):
        assert set(found) == {"rows", "columns", "qkv", "keys", "gated"}
        assert max(found.values()) < 1e-6, found


def trained(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    """One step of a real policy, and what the formulas make of its gradients: the largest distance of
    Muon's parameters, and the names of the parameters that are not Muon's."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, optimizer="muon")
    batch, _ = ready_batch(policy, mesh, samples)
    entries = policy.weights.entries
    before = [entry.parameter.detach().clone() for entry in entries]
    gradients: list[Tensor] = []

    def keep() -> None:
        gradients.extend(entry.parameter.main_grad.clone() for entry in entries)  # pyright: ignore

    norm = policy.train_step(batch, loss, Replay.rollout, keep).grad_norm
    clip = min(1.0, 0.05 / (norm + 1e-6))
    worst, others = 0.0, []
    groups, head = policy.weights.num_groups, policy.weights.heads_per_group
    for entry, start, gradient in zip(entries, before, gradients, strict=True):
        if not is_matrix(entry):
            others.append(entry.rule.megatron.rpartition("{layer}.")[2])
            continue
        parts = [(start, gradient, entry.parameter.detach())]
        if entry.rule.split == "qkv":
            d = start.size(0) // groups // (head + 2)
            cut = [t.unflatten(0, (groups, -1)).split([head * d, d, d], dim=1) for t in parts.pop()]
            parts = [tuple(t.flatten(0, 1) for t in three) for three in zip(*cut, strict=True)]
        for old, g, new in parts:
            update = published_orthogonalisation(g.double() * clip)
            wanted = old.double() * (1 - 1e-3 * 0.01)
            wanted -= 1e-3 * 0.2 * max(old.shape) ** 0.5 * update
            worst = max(worst, float((new.double() - wanted).norm() / wanted.norm()))
    moved = max(
        float((e.parameter - b).norm() / b.norm()) for e, b in zip(entries, before, strict=True)
    )
    return {"worst": worst, "others": sorted(set(others)), "moved": moved}


def test_a_policy_takes_the_published_step(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (found,) = run_ranks(1, trained, model_path, samples, folder=tmp_path)
    assert found["worst"] < 1e-6
    assert found["moved"] > 1e-3
    assert found["others"] == [
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "input_layernorm.weight",
        "mlp.router.weight",
        "output_layer.weight",
        "pre_mlp_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.q_layernorm.weight",
    ]


def others_of(path: Path) -> list[str]:
    mesh = join_mesh(path, {})
    entries = build(path, mesh, optimizer="muon").weights.entries
    flat = [e.rule.megatron for e in entries if is_matrix(e) and len(e.parameter.shape) != 2]
    return sorted({e.rule.megatron.rpartition(".")[2] for e in entries if not is_matrix(e)}) + flat


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen2_moe", ["bias", "gate_weight", "weight"]),
        ("deepseek_v3", ["expert_bias", "weight"]),
        ("deepseek_v32", ["expert_bias", "head_weight", *KEY, "query_weight", "weight"]),
    ],
)
def test_biases_and_gates_are_adams(model_type: str, names: list[str], tmp_path: Path) -> None:
    found = run_ranks(1, others_of, write_tiny(model_type, tmp_path / "m"), folder=tmp_path / "out")
    assert found == [names]


def goes_on(
    model_path: Path, samples: list[Sample], checkpoints: Path, sizes: dict[str, int], dtype: str
) -> dict[str, Any]:
    """Two steps, a save, everything to the host and back, and a third step; and it again resumed."""
    mesh = join_mesh(model_path, sizes)

    def start() -> Policy:
        return build(model_path, mesh, dtype=dtype, optimizer="muon", distributed_optimizer=True)

    policy = start()
    assert isinstance(policy.optimizer, LayerWiseOptimizer)
    batch, _ = ready_batch(policy, mesh, samples)
    norms = [policy.train_step(batch, loss, Replay.rollout).grad_norm for _ in range(2)]
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    resumed = saved_and_resumed(policy, start, Checkpoints(checkpoints, mesh, keep=1))
    owned = optimizer_shards(policy.optimizer)
    names = {name for shard in owned.values() for name in shard.tensors}
    numel = sum(t.numel() for shard in owned.values() for t in shard.tensors.values())
    for each in (policy, resumed):
        norms.append(each.train_step(batch, loss, Replay.rollout).grad_norm)
    ours, theirs = exported(policy), exported(resumed)
    there = optimizer_shards(resumed.optimizer)
    pairs = zip(optimizer_shards(policy.optimizer).values(), there.values(), strict=True)
    return {
        "norms": norms,
        "same": all(torch.equal(ours[key], tensor) for key, tensor in theirs.items()),
        "state": all(
            torch.equal(tensor, b.tensors[name])
            for a, b in pairs
            for name, tensor in a.tensors.items()
        ),
        "names": sorted(names),
        "numel": numel,
        "weights": ours,
    }


def loads(
    model_path: Path, samples: list[Sample], checkpoints: Path, sizes: dict[str, int], dtype: str
) -> dict[str, Tensor]:
    """The same third step at another layout, where all ranks keep all state."""
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh, dtype=dtype, optimizer="muon")
    batch, _ = ready_batch(policy, mesh, samples)  # old log-probs of the first weights
    Checkpoints(checkpoints, mesh, keep=1).load(2, policy)
    policy.train_step(batch, loss, Replay.rollout)
    return exported(policy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), release("bfloat16", 1e-2)])
def test_a_divided_state_resumes_to_the_bit_and_moves_to_another_layout(
    dtype: str, tolerance: float, model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    root, args = tmp_path / "c" / "d", (model_path, samples)
    ranks = run_ranks(2, goes_on, *args, root, {"expert": 2}, dtype, folder=tmp_path / "1")
    for found in ranks:
        assert found["same"]
        assert found["state"]
        assert found["norms"][-1] == found["norms"][-2]
        main = ["main"] * (dtype == "bfloat16")
        assert found["names"] == sorted(["exp_avg", "exp_avg_sq", "momentum_buffer", *main])
    sizes = [found["numel"] for found in ranks]
    assert max(sizes) < 0.55 * sum(sizes)  # about half each
    other = run_ranks(2, loads, *args, root, {"tensor": 2}, dtype, folder=tmp_path / "2")[0]
    for key, tensor in ranks[0]["weights"].items():
        assert float((other[key] - tensor).norm() / tensor.norm()) < tolerance, key


def test_owners_have_equal_shares() -> None:
    assert assign([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    assert assign([1], 3) == [0]
    assert assign([], 2) == []
    costs = [7, 1, 9, 3, 3, 8, 2]
    sums = [0, 0, 0]
    for cost, rank in zip(costs, assign(costs, 3), strict=True):
        sums[rank] += cost
    assert max(sums) - min(sums) <= 1
