"""The merged export: each weight of the base plus its update, and all that has none as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.config.adapter import Experts
from parallel.hf_config import HfModel
from parallel.lora.weights import LoraSetup
from tests.parallel.adapters import adapter_of, lora_folder, with_updates, write_lora
from tests.parallel.layouts import build, exported, join_mesh
from tests.parallel.models import checkpoint_tensors, write_tiny
from tests.ranks import run_ranks
from tests.release import release


def merged(model_path: Path, kind: Experts, sizes: dict[str, int]) -> dict[str, Tensor]:
    adapter = adapter_of(HfModel.read(model_path), kind)
    setup = LoraSetup(adapter, path=lora_folder(model_path, adapter), merged=True)
    return exported(build(model_path, join_mesh(model_path, sizes), lora=setup))


@pytest.mark.parametrize(
    ("model_type", "kind", "sizes"),
    [
        ("qwen2_moe", "shared_outer", {}),  # with biases, which have no update
        release("deepseek_v3", "per_expert", {}),
        ("deepseek_v32", "per_expert", {"tensor": 2}),
        release("mixtral", "per_expert", {"tensor": 2, "expert_tensor": 2}),
        release("olmoe", "shared_outer", {"tensor": 2}),
        release("glm4_moe", "per_expert", {"tensor": 2}),
        release("gpt_oss", "per_expert", {"tensor": 2}),
        ("qwen3_next", "per_expert", {"tensor": 2}),
        release("qwen3", "none", {"tensor": 2}),
    ],
)
def test_each_weight_has_its_update(
    model_type: str, kind: Experts, sizes: dict[str, int], tmp_path: Path
) -> None:
    folder = write_tiny(model_type, tmp_path / model_type)
    base = checkpoint_tensors(folder)
    expected = with_updates(base, write_lora(folder, kind))
    world = sizes.get("tensor", 1)
    for found in run_ranks(world, merged, folder, kind, sizes, folder=tmp_path / "out"):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name].shape == weight.shape, name
            assert (found[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name
            assert torch.equal(weight, base[name]) == torch.equal(found[name], base[name]), name
