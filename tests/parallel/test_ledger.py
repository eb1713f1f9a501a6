"""The memory ledger: every byte has one owner and one place, and nothing is lost on the way.

The moves run on CPU storages here: the same resizing and copying, into memory that is not pinned.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample
from parallel.hf_config import HfModel
from parallel.ledger import Ledger, memory_statistics
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reduce import reduce_statistics
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import exported, join_mesh, loss, ready_batch
from tests.parallel.test_critic import build as build_critic
from tests.ranks import run_ranks
from tests.release import release

KINDS = ("parameters", "gradients", "optimizer")


def build(model_path: Path, mesh: Mesh, dtype: str, distributed: bool) -> Policy:
    return Policy(
        HfModel.read(model_path),
        mesh,
        ModelConfig(path=str(model_path), dtype=dtype),  # pyright: ignore[reportArgumentType]
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed),
        recompute=False,
        temperature=1.0,
    )


def accumulator(parameter: Tensor) -> Any:
    view: Any = parameter.expand_as(parameter)
    return view.grad_fn.next_functions[0][0]


def reachable_bytes(policy: Policy) -> int:
    """All storages that can be reached from the model, DDP's buffers and the optimizer, once each."""
    tensors: list[Tensor] = []
    for chunk in policy.chunks:
        tensors += [*chunk.parameters(), *chunk.module.buffers()]
        tensors += [p.main_grad for p in chunk.parameters()]
        tensors += [p.grad for p in chunk.parameters() if p.grad is not None]
        mains = [getattr(p, "main_param", None) for p in chunk.parameters()]
        tensors += [m for m in mains if m is not None]
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            tensors += [b for b in (buffer.param_data, buffer.grad_data) if b is not None]
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
        for group in part.optimizer.param_groups:
            tensors += group["params"]
            tensors += [p.grad for p in group["params"] if p.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def refusals(ledger: Ledger, moves: list[tuple[str, str]]) -> list[str]:
    messages = []
    for move, kind in moves:
        with pytest.raises(RuntimeError) as error:
            getattr(ledger, move)(kind)
        messages.append(str(error.value))
    return messages


def cycle(policy: Policy) -> dict[str, Any]:
    """Everything away and back as a step does it, with what must hold in each phase."""
    ledger, chunks = policy.ledger, policy.chunks
    hooks = [accumulator(p) for chunk in chunks for p in chunk.parameters()]
    total, before = reachable_bytes(policy), ledger.where()
    assert sum(b.device for b in before.values()) == total
    assert all(b.host == b.freed == 0 for b in before.values())

    ledger.free("gradients")
    ledger.to_host("optimizer")
    assert reachable_bytes(policy) == before["parameters"].device  # no parameter went with it
    synced = exported(policy)
    ledger.to_host("parameters")
    away = ledger.where()
    assert reachable_bytes(policy) == 0
    assert {kind: tuple(b) for kind, b in away.items()} == {
        "parameters": (0, before["parameters"].device, 0),
        "gradients": (0, 0, before["gradients"].device),
        "optimizer": (0, before["optimizer"].device, 0),
    }
    refused = refusals(
        ledger, [("to_host", "parameters"), ("free", "gradients"), ("to_host", "gradients")]
    )
    with pytest.raises(RuntimeError, match=r"'parameters': 'host'"):
        policy.forward_only([], Replay.off)

    policy.onload()
    policy.onload()  # nothing left to bring back
    assert ledger.where() == before
    assert reachable_bytes(policy) == total
    refused += refusals(ledger, [("to_device", "optimizer"), ("free", "parameters")])
    back = exported(policy)
    assert all(torch.equal(back[name], tensor) for name, tensor in synced.items())
    # Another accumulator would be one without Megatron's gradient hook.
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    assert all(a is accumulator(p) for a, p in zip(hooks, parameters, strict=True))
    return {"refused": refused, "where": {kind: list(b) for kind, b in before.items()}}


def exercise(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], dtype: str, distributed: bool
) -> dict[str, Any]:
    """Three steps of two equal policies; one moves everything to the host and back in between."""
    mesh = join_mesh(model_path, sizes)
    result: dict[str, Any] = {}
    weights = []
    for moves in (False, True):
        policy = build(model_path, mesh, dtype, distributed)
        batch, _ = ready_batch(policy, mesh, samples)
        buffers = []
        for _ in range(3):
            policy.train_step(batch, loss, Replay.rollout)
            if moves:
                result |= cycle(policy)
                buffers.append(policy.ledger.host_buffer_bytes)
        weights.append(exported(policy))
        if moves:
            where = policy.ledger.where()
            moved = where["parameters"].device + where["optimizer"].device
            assert buffers == [moved] * 3  # made once, used again
            result["metrics"] = reduce_statistics(memory_statistics("train", where))
    result["same"] = all(torch.equal(weights[0][k], v) for k, v in weights[1].items())
    return result


@pytest.mark.parametrize(
    ("distributed", "dtype"),
    [
        (False, "float32"),
        (True, "bfloat16"),
        release(False, "bfloat16"),
        release(True, "float32"),
    ],
)
def test_every_byte_is_somewhere_and_nothing_is_lost(
    distributed: bool, dtype: str, model_path: Path, tmp_path: Path
) -> None:
    world, sizes = (2, {"expert": 2}) if distributed else (1, {})
    outs = run_ranks(
        world, exercise, model_path, sizes, few_samples(), dtype, distributed, folder=tmp_path
    )
    for out in outs:
        assert out["same"]
        parameters, gradients, optimizer = (out["where"][kind][0] for kind in KINDS)
        num_weights = parameters / (4 if dtype == "float32" else 2)
        assert gradients == pytest.approx(4 * num_weights, rel=0.05)  # summed in fp32, padded
        if not distributed:  # two moments, and for half precision the fp32 weights
            per_weight = 8 if dtype == "float32" else 12
            assert optimizer == pytest.approx(per_weight * num_weights, rel=0.01)
        assert "its state is host, expected device" in out["refused"][0]
        assert "its state is freed" in out["refused"][1]
        assert "expected host or freed" in out["refused"][3]
        assert "would lose its contents" in out["refused"][4]
    largest = max(out["where"]["optimizer"][0] for out in outs)
    assert outs[0]["metrics"]["memory/train/optimizer_device_bytes"] == largest
    assert outs[0]["metrics"]["memory/train/parameters_host_bytes"] == 0


def test_a_storage_belongs_to_the_first_kind_that_names_it() -> None:
    shared, own = torch.arange(6.0), torch.ones(3)
    views, grads = [shared[:2], shared[2:], shared.view(2, 3)], torch.ones(4)
    ledger = Ledger(torch.device("cpu"))
    ledger.own("parameters", lambda: views[:2])
    ledger.own("gradients", lambda: [grads], disposable=True)
    ledger.own("optimizer", lambda: [views[2], own])
    ledger.own("reference", lambda: [torch.zeros(5)], on_host=True)
    counts = {kind: tuple(count) for kind, count in ledger.where().items()}
    assert counts == {
        "parameters": (24, 0, 0),
        "gradients": (16, 0, 0),
        "optimizer": (12, 0, 0),
        "reference": (0, 20, 0),
    }
    ledger.to_host("optimizer")
    assert shared.tolist() == [0, 1, 2, 3, 4, 5]
    assert own.untyped_storage().nbytes() == 0
    ledger.to_host("parameters")
    assert ledger.where()["optimizer"] == (0, 12, 0)  # a storage that left is not counted twice
    ledger.free("gradients")
    for kind in KINDS:
        ledger.to_device(kind)
    assert shared.tolist() == [0, 1, 2, 3, 4, 5]
    assert own.tolist() == [1, 1, 1]
    assert grads.tolist() == [0, 0, 0, 0]
    assert refusals(ledger, [("to_device", "reference")]) == [
        "memory ledger: to_device('reference'): it stays on the host"
    ]


def test_what_never_changes_is_copied_to_the_host_once() -> None:
    shared = torch.ones(4)
    frozen, weight = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.ones(5)
    half = torch.nn.Parameter(shared[:2], requires_grad=False)
    tensors = [frozen, weight, half, shared[2:]]  # the other half is trained
    ledger = Ledger(torch.device("cpu"))
    ledger.own("parameters", lambda: tensors, keeps_frozen=True)
    for value in (2.0, 3.0):
        ledger.to_host("parameters")
        assert ledger.where()["parameters"] == (0, 48, 0)
        ledger.to_device("parameters")
        for tensor in (frozen.data, weight, shared):
            tensor.fill_(value)
    ledger.to_host("parameters")
    ledger.to_device("parameters")
    assert frozen.tolist() == [1, 1, 1]  # what was written behind the ledger's back was not copied
    assert weight.tolist() == [3] * 5
    assert shared.tolist() == [3] * 4
    assert ledger.host_buffer_bytes == 48
    ledger.drop("parameters")
    assert ledger.host_buffer_bytes == 0


class Recorded(Ledger):
    """Notes its moves, and when it gives memory back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.moves: list[str] = []

    def to_host(self, kind: str) -> int:
        self.moves.append(kind)
        return super().to_host(kind)

    def free(self, kind: str) -> None:
        self.moves.append(kind)
        super().free(kind)

    def give_back(self) -> None:
        self.moves.append("give back")
        super().give_back()


def offload(model_path: Path) -> list[str]:
    """What a policy with a critic does before the engine wakes, on storages of the CPU."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, "float32", False)
    ledger = policy.ledger
    ledger.__class__ = Recorded
    assert isinstance(ledger, Recorded)
    ledger.moves = []
    critic = build_critic(model_path, mesh, ledger)
    policy.share_device(critic)
    for model in (policy, critic):
        model.mesh = replace(mesh, device=torch.device("cuda"))  # on a CPU nothing would move
    policy.offload_optimizer()
    policy.offload_parameters()
    return ledger.moves


def test_memory_is_given_back_once_for_all_that_leaves(model_path: Path, tmp_path: Path) -> None:
    (moves,) = run_ranks(1, offload, model_path, folder=tmp_path)
    companion = ["critic_optimizer", "critic_gradients", "critic_parameters"]
    assert moves == ["optimizer", "gradients", *companion, "give back", "parameters", "give back"]
