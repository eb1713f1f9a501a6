"""Grouped experts with adapters beside Megatron's loop over experts: values, gradients, storages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mrl.config.adapter import Experts
from parallel import prepare

prepare()

from parallel.hf_config import HfModel  # noqa: E402
from parallel.layers.experts import GroupedExperts, stacked  # noqa: E402
from parallel.lora.weights import LoraSetup  # noqa: E402
from parallel.model import unwrap  # noqa: E402
from tests.parallel.adapters import adapter_of, lora_folder, write_lora  # noqa: E402
from tests.parallel.layouts import build, join_mesh  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

SIZES = [5, 0, 7, 1]


def one_layer(model_path: Path, kind: Experts, distributed: bool) -> dict[str, Any]:
    """The experts of the first MoE layer of a policy: grouped, one by one, and without the adapter."""
    adapter = adapter_of(HfModel.read(model_path), kind)
    policy = build(
        model_path,
        join_mesh(model_path, {}),
        distributed_optimizer=distributed,
        lora=LoraSetup(adapter, path=lora_folder(model_path, adapter)),
    )
    layer = next(
        m
        for m in unwrap(policy.chunks[0]).modules()
        if isinstance(getattr(m, "experts", None), GroupedExperts)
    )
    experts: Any = layer.experts
    torch.manual_seed(0)
    rows = torch.randn(sum(SIZES), 32, requires_grad=True)
    probs = torch.rand(sum(SIZES), requires_grad=True)
    trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    found: dict[str, Any] = {"names": sorted(trained)}

    def measure(cls: type) -> list[Tensor]:
        out, _ = cls.forward(experts, rows, torch.tensor(SIZES), probs)  # pyright: ignore
        inputs = [rows, probs, *trained.values()]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    found["grouped"], found["loop"] = measure(GroupedExperts), measure(SequentialMLP)
    with policy.lora.off(), torch.no_grad():  # pyright: ignore[reportOptionalMemberAccess]
        for name, cls in (("grouped off", GroupedExperts), ("loop off", SequentialMLP)):
            found[name] = cls.forward(experts, rows, torch.tensor(SIZES), probs)[0]
    found["viewed"] = [
        stacked(matrices).data_ptr() == matrices[0].data_ptr()
        for linears in experts._linears
        for name, part in linears[0].lora.named_children()
        for matrix, _ in part.named_parameters()
        for matrices in [[getattr(getattr(one.lora, name), matrix) for one in linears]]
    ]
    return found


@pytest.mark.parametrize(("kind", "distributed"), [("shared_outer", False), ("per_expert", True)])
def test_grouped_experts_compute_what_the_loop_computes(
    kind: Experts, distributed: bool, model_path: Path, tmp_path: Path
) -> None:
    write_lora(model_path, kind)
    (found,) = run_ranks(1, one_layer, model_path, kind, distributed, folder=tmp_path)
    for ours, theirs in zip(found["grouped"], found["loop"], strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    # The base alone, and the adapter is not small beside it.
    base, adapted = found["loop off"], found["loop"][0]
    assert (found["grouped off"] - base).abs().max() <= 1e-6 * base.abs().max()
    assert (adapted - base).norm() > 0.1 * base.norm()
    own = {"gate_proj": "AB", "up_proj": "AB", "down_proj": "AB"}
    expected = []
    if kind == "shared_outer":
        own = {"gate_proj": "B", "up_proj": "B", "down_proj": "A"}
        expected = [f"shared_outer.{name}" for name in ("down_proj.B", "gate_proj.A", "up_proj.A")]
    expected += [
        f"experts.local_experts.{n}.linear_fc{2 if name == 'down_proj' else 1}.lora.{name}.{matrix}"
        for n in range(4)
        for name, matrices in own.items()
        for matrix in matrices
    ]
    assert found["names"] == sorted(expected)
    # Gradients are zero for the expert without rows, and for nothing else.
    assert sum(not one.any() for one in found["loop"]) == sum(map(len, own.values()))
    # No copy of the experts' matrices for each product, also where Megatron moved them.
    assert found["viewed"] == [True] * sum(map(len, own.values()))
