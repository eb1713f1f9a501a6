"""Options that change memory: gradients and optimizer state of real policies, and the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.routes import Replay
from mrl.commands.scaling_plan import exact_pinned
from mrl.planner import host, runtime, state
from mrl.planner.memory import gradient_bytes, optimizer_bytes
from mrl.planner.shape import read_shape
from mrl.planner.stages import stages
from mrl.planner.state import Shard, StateOptions, read_state, step_rows
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims
from tests.parallel.layouts import build, join_mesh, loss, ready_batch
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks

BF16_GRADIENTS = {"grad_reduce_in_fp32": False}


def trained_bytes(path: Path, megatron: dict[str, Any]) -> dict[str, int]:
    """Return an update's bytes on two ranks: gradient buffers, state, what the update widens."""
    mesh = join_mesh(path, {})
    policy = build(path, mesh, dtype="bfloat16", distributed_optimizer=True, megatron=megatron)
    buffers = {t.untyped_storage().data_ptr() for c in policy.chunks for b in (*c.buffers,
               *c.expert_parallel_buffers) for t in (b.grad_data,)}  # fmt: skip
    widened: list[int] = []

    def before_step(optimizer: Any, *_: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        own = [t for t in grads if t.untyped_storage().data_ptr() not in buffers]
        widened.append(sum(t.numel() * t.element_size() for t in own))

    for part in policy.optimizer.chained_optimizers:
        part.optimizer.register_step_pre_hook(before_step)
    batch, _ = ready_batch(policy, mesh, tiny_samples(path, [13] * 8))
    policy.train_step(batch, loss, Replay.rollout)
    where = policy.ledger.where()
    return {"gradients": where["gradients"].device, "widened": sum(widened)}


@pytest.mark.parametrize("megatron", [{}, BF16_GRADIENTS], ids=["fp32", "bf16 gradients"])
def test_gradients_of_a_real_policy(megatron: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model")
    ranks = run_ranks(2, trained_bytes, path, megatron, folder=tmp_path / "ranks")
    shape = read_shape(json.loads((path / "config.json").read_text()))
    dims = ParallelDims(world=2, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    work = Workload(8, 1, 3, 10, distributed_optimizer=True, state=read_state(megatron, 2))
    (stage,) = stages(shape, dims)
    shard = state.optimizer_shard(stage, dims, distributed=True)
    planned = gradient_bytes(stage, work)
    widened = sum(row.num_bytes for row in step_rows(shard, work.state, 2))
    for rank in ranks:  # the buffers are padded
        assert planned <= rank["gradients"] < 1.3 * planned
    assert sum(rank["widened"] for rank in ranks) == 2 * widened
    assert bool(widened) == bool(megatron)


class LargestList(TorchDispatchMode):
    """Bytes that list operations (torch._foreach_*) and the fused step return."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if "_foreach" in func.name() and isinstance(out, (list, tuple)):
            self.made = max(self.made, sum(t.numel() * t.element_size() for t in out))
        return out


def test_the_fused_adam_makes_no_lists() -> None:
    parameters = [torch.zeros(n, requires_grad=True) for n in (300, 700)]
    adam = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with LargestList() as seen:
        adam.step()
    rows = step_rows(Shard(1000, 0), StateOptions(), 2)
    assert seen.made == sum(row.num_bytes for row in rows) == 0


def test_state_by_hand() -> None:
    """Bytes an element on the device and (pinned, plain) on the host, by option."""
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    aware = {"use_precision_aware_optimizer": True}
    half = {**aware, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": torch.bfloat16}
    for megatron, device, on_host in (
        ({}, 12, 0),
        (offload, 4 + 8 / 4, 12),
        ({**offload, **aware}, 16 / 4, 12),
        (aware, 2 + 8, 0),
        ({**aware, "store_param_remainders": False}, 12, 0),
        (half, 2 + 4, 0),
        ({**half, "main_params_dtype": "float16"}, 2 + 4, 0),
    ):
        options = read_state(megatron, 2)
        assert state.device_bytes_each(options, 2) == device, megatron
        assert options.offload_fraction * sum(state.host_bytes_each(options)) == on_host, megatron
    assert state.device_bytes_each(read_state({}, 4), 4) == 8  # the weights are the main parameters
    widened = step_rows(Shard(100, 40), read_state(half, 2), 2)
    assert [row.num_bytes for row in widened] == [3 * 4 * 100]


def test_offload_moves_the_state_to_the_host() -> None:
    shape = read_shape(json.loads(Path("benchmarks/models/qwen3_30b_a3b.json").read_text()))
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    megatron = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0,
                "use_precision_aware_optimizer": True}  # fmt: skip
    (stage,) = stages(shape, dims)
    plain = Workload(64, 8, 512, 4096, distributed_optimizer=True)
    away = Workload(64, 8, 512, 4096, distributed_optimizer=True, state=read_state(megatron, 2))
    num = state.optimizer_shard(stage, dims, distributed=True).num
    assert optimizer_bytes(stage, dims, plain) == 12 * num
    assert optimizer_bytes(stage, dims, away) == 0
    pinned, unpinned = host.offloaded_bytes(stage, dims, away)
    assert unpinned == 12 * num
    assert 4 * num < pinned < 8 * num  # gradients, each to a power of two
    assert host.pinned_optimizer(stage, dims, away) == 0


def test_pinned_buffers_as_torch_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 0, 1: 1, 3: 4, 4096: 4096, 4097: 8192, (1 << 33) + 1: 1 << 34}
    assert {n: host.pinned_bytes(n, None) for n in sizes} == sizes
    assert [host.pinned_bytes(n, 4096) for n in (3, 4096, 4097)] == [4, 4096, 4097]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert exact_pinned() is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native,pinned_max_round_threshold_mb:2")
    assert exact_pinned() == 2 << 20


def test_channels_to_peers() -> None:
    mib = 1 << 20

    def peers(size: int, span: int) -> int:
        group = runtime.Communicator("EXPERT_MODEL_PARALLEL_GROUP", size, span, "peers")
        return (group.num_bytes(8) - runtime.COLLECTIVE_BYTES) // (12 * mib)

    assert peers(8, 8) == 7 * 32  # NVIDIA/nccl issue 1685: as many buffers on 8 H100
    assert peers(16, 16) == 7 * 32 + 8 * 2
    assert peers(4, 8) == 3 * 32
    assert peers(4, 64) == 3 * 2  # every 16th rank: one a node
    stage = runtime.Communicator("PIPELINE_MODEL_PARALLEL_GROUP", 4, 64, "peers")
    assert stage.num_bytes(8) == runtime.COLLECTIVE_BYTES + 2 * 2 * 12 * mib
    assert runtime.Communicator("DATA_PARALLEL_GROUP_WITH_CP", 1, 8).num_bytes(8) == 388 * mib
