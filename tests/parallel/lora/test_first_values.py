"""How an adapter begins without a folder: as in PEFT, and the same whatever the layout."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from mrl.config.adapter import Adapter
from parallel.lora.weights import LoraSetup
from tests.parallel.layouts import build, exported, join_mesh
from tests.ranks import run_ranks

Init = Literal["kaiming", "gaussian"]
RANK = 24
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def first_values(
    model_path: Path, sizes: dict[str, int], init: Init, seed: int
) -> dict[str, Tensor]:
    adapter = Adapter(RANK, 48.0, MODULES, "per_expert", MLP)
    mesh = join_mesh(model_path, sizes)
    return exported(build(model_path, mesh, lora=LoraSetup(adapter, init, seed)))


def by_peft(init: Init, shape: tuple[int, ...]) -> Tensor:
    """A as PEFT's `LoraLayer.reset_lora_parameters` sets it."""
    made = torch.empty(shape)
    if init == "kaiming":
        return torch.nn.init.kaiming_uniform_(made, a=math.sqrt(5))
    return torch.nn.init.normal_(made, std=1 / RANK)


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_a_is_random_as_in_peft_and_b_is_zero(init: Init, model_path: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(1, first_values, model_path, {}, init, 0, folder=tmp_path / "0")
    matrices = {n: v for n, v in found.items() if n.endswith(".lora_A.weight")}
    for name, b in found.items():
        assert name in matrices or not b.any()
    torch.manual_seed(0)
    wide = [a for a in matrices.values() if a.shape == (RANK, 32)]
    ours = torch.stack(wide).flatten()
    theirs = torch.cat([by_peft(init, (RANK, 32)).flatten() for _ in range(50)])
    quantiles = torch.linspace(0.02, 0.98, 25)
    differences = ours.quantile(quantiles) - theirs.quantile(quantiles)
    assert differences.abs().max() < 0.06 * theirs.std()
    if init == "kaiming":
        for a in matrices.values():  # 32 and 64 inputs, and 16 of the experts
            bound = 1 / math.sqrt(a.shape[1])
            assert 0.95 * bound < a.abs().max() <= bound
    # No two begin alike, and another seed gives other values.
    for one, other in itertools.combinations(wide, 2):
        assert not torch.equal(one, other)
    (again,) = run_ranks(1, first_values, model_path, {}, init, 1, folder=tmp_path / "1")
    assert not any(torch.equal(a, again[name]) for name, a in matrices.items())


@pytest.mark.release
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"tensor": 2, "expert_tensor": 2}),
        (4, {"pipeline": 2, "tensor": 2, "expert": 2}),
    ],
)
def test_first_values_are_the_same_in_every_layout(
    world: int, sizes: dict[str, int], model_path: Path, tmp_path: Path
) -> None:
    (one,) = run_ranks(1, first_values, model_path, {}, "kaiming", 0, folder=tmp_path / "1")
    for ours in run_ranks(
        world, first_values, model_path, sizes, "kaiming", 0, folder=tmp_path / "n"
    ):
        assert ours.keys() == one.keys()
        assert all(torch.equal(ours[name], value) for name, value in one.items())
