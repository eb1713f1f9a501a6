"""A policy with an adapter: the base is its reference, and only the adapter costs training memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import MicroBatch, Sample
from parallel.hf_config import HfModel
from parallel.ledger import gradient_tensors
from parallel.lora.rules import adapter_shapes, is_adapter
from parallel.lora.weights import LoraSetup
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.adapters import adapter_of, lora_folder, write_lora
from tests.parallel.layouts import build, exported, join_mesh, loss, ready_batch
from tests.ranks import run_ranks

KIND = "shared_outer"


def adapted(
    model_path: Path, mesh: Mesh, *, trains: bool = True, recompute: bool = False
) -> Policy:
    model = HfModel.read(model_path)
    adapter = adapter_of(model, KIND)
    return Policy(
        model,
        mesh,
        ModelConfig(path=str(model_path), dtype="float32"),
        OptimizerConfig(lr=1e-3, adam_eps=1e-6) if trains else None,
        recompute=recompute,
        temperature=0.8,
        reference=model,
        lora=LoraSetup(adapter, path=lora_folder(model_path, adapter)),
    )


def logprobs_of(policy: Policy, batches: list[MicroBatch]) -> list[Tensor]:
    return policy.forward_only(batches, Replay.rollout).logprobs


def fails_under_the_reference(policy: Policy) -> None:
    with policy.reference():
        raise KeyError("of the caller")


def own(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    for chunk in policy.chunks:
        yield from chunk.named_parameters()


def exercise(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    """One policy before and after two steps; beside it the base, and one that cannot be trained."""
    mesh = join_mesh(model_path, {})
    policy, base = adapted(model_path, mesh), build(model_path, mesh)
    batch, _ = ready_batch(policy, mesh, samples)
    micro = list(batch.micro_batches)
    found: dict[str, Any] = {"base": logprobs_of(base, micro), "before": logprobs_of(policy, micro)}
    sizes = [tensor.numel() for tensor in gradient_tensors(policy.chunks)]
    with policy.reference():
        found["reference before"] = logprobs_of(policy, micro)
    for _ in range(2):
        policy.train_step(batch, loss, Replay.rollout)
    found["after"] = logprobs_of(policy, micro)
    with policy.reference():
        found["reference after"] = logprobs_of(policy, micro)
    with pytest.raises(KeyError):
        fails_under_the_reference(policy)
    found["after an error"] = logprobs_of(policy, micro)
    evaluated = adapted(model_path, mesh, trains=False)
    found["evaluated"] = logprobs_of(evaluated, micro)
    with evaluated.reference():
        found["reference evaluated"] = logprobs_of(evaluated, micro)
    found["gradients"] = sum(sizes)
    found["where"] = {kind: list(count) for kind, count in policy.ledger.where().items()}
    found["where evaluated"] = sorted(evaluated.ledger.where())
    found["host buffers"] = policy.ledger.host_buffer_bytes
    found["trained"] = sum(p.numel() for n, p in own(policy) if p.requires_grad)
    found["all"] = sum(p.numel() for _, p in own(policy))
    found["wrong"] = [n for n, p in own(policy) if p.requires_grad != is_adapter(n)]
    found["with a gradient"] = [n for n, p in own(policy) if hasattr(p, "main_grad")]
    found["names"] = [n for n, p in own(policy) if p.requires_grad]
    found["state"] = sum(
        value.numel()
        for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
        for state in part.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    )
    return found


@pytest.fixture(scope="module")
def found(
    model_path: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    write_lora(model_path, KIND)
    out = tmp_path_factory.mktemp("adapted")
    return run_ranks(1, exercise, model_path, samples, folder=out)[0]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_the_reference_is_the_base_bit_for_bit(found: dict[str, Any]) -> None:
    for name in ("reference before", "reference after", "reference evaluated"):
        assert same(found[name], found["base"]), name
    for name in ("before", "after"):
        assert not same(found[name], found["base"]), name
    assert not same(found["before"], found["after"])
    assert same(found["evaluated"], found["before"])
    assert same(found["after an error"], found["after"])


def test_only_the_adapter_has_gradients_and_optimizer_state(
    found: dict[str, Any], model_path: Path
) -> None:
    model = HfModel.read(model_path)
    shapes = adapter_shapes(model, adapter_of(model, KIND)).values()
    size = sum(a * b for a, b in shapes)
    assert found["wrong"] == []
    assert found["trained"] == size < found["all"]
    assert sorted(found["with a gradient"]) == sorted(found["names"])
    assert found["gradients"] == size
    assert found["state"] == 2 * size  # the two moments of Adam
    where = {kind: dict(zip(("device", "host", "freed"), count, strict=True))
             for kind, count in found["where"].items()}  # fmt: skip
    assert set(where) == {"parameters", "gradients", "optimizer"}  # no reference
    assert where["gradients"]["device"] == 4 * size
    assert where["optimizer"]["device"] == pytest.approx(8 * size, abs=4 * 200)  # step counts
    assert where["parameters"]["device"] >= 4 * found["all"]
    assert all(count["host"] == count["freed"] == 0 for count in where.values())
    assert found["host buffers"] == 0
    assert found["where evaluated"] == ["parameters"]


def recomputes(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    mesh = join_mesh(model_path, {})
    found = {}
    for name, recompute in (("kept", False), ("recomputed", True)):
        policy = adapted(model_path, mesh, recompute=recompute)
        batch, _ = ready_batch(policy, mesh, samples)
        norms = [policy.train_step(batch, loss, Replay.rollout).grad_norm for _ in range(2)]
        found[name] = norms, exported(policy)
    return found


def test_recomputed_layers_train_the_same_adapter(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    write_lora(model_path, KIND)
    (out,) = run_ranks(1, recomputes, model_path, samples, folder=tmp_path)
    (norms, kept), (again, recomputed) = out["kept"], out["recomputed"]
    assert again == pytest.approx(norms, rel=1e-6)
    assert norms[0] > 0
    for name, value in kept.items():
        assert (recomputed[name] - value).norm() <= 1e-6 * value.norm(), name


def moves(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    """Three steps, one of two equal policies away and back after each -> the bytes that were copied."""
    mesh = join_mesh(model_path, {})
    stays, leaves = (adapted(model_path, mesh) for _ in range(2))
    ledger, copied = leaves.ledger, []
    make_buffer = ledger._host_buffer

    def counted(num_bytes: int) -> Tensor:
        copied[-1] += num_bytes
        return make_buffer(num_bytes)

    ledger._host_buffer = counted
    for _ in range(3):
        for policy in (stays, leaves):
            batch, _ = ready_batch(policy, mesh, samples)
            policy.train_step(batch, loss, Replay.rollout)
        copied.append(0)
        ledger.to_host("parameters")
        ledger.to_device("parameters")
    values = [dict(own(policy)) for policy in (stays, leaves)]
    return {
        "copied": copied,
        "same": all(torch.equal(value, values[1][name]) for name, value in values[0].items()),
        "all": ledger.where()["parameters"].device,
        "adapter": sum(p.nbytes for n, p in own(leaves) if is_adapter(n)),
        "buffers": sum(b.nbytes for chunk in leaves.chunks for _, b in chunk.named_buffers()),
    }


def test_the_base_is_copied_to_the_host_once(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    write_lora(model_path, KIND)
    (found,) = run_ranks(1, moves, model_path, samples, folder=tmp_path)
    assert found["same"]
    changing = found["adapter"] + found["buffers"]
    assert found["copied"] == [found["all"], changing, changing]
    assert changing < found["all"]
