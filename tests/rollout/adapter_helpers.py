"""Adapters of the toy model, and the model that each of them should make of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from rollout_helpers import load_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from mrl.config.adapter import Adapter, lora_name
from mrl.engines.sglang.adapter.manifest import AdapterManifest
from mrl.engines.sglang.manifest import Manifest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT = ("gate_proj", "up_proj", "down_proj")
KINDS = {
    "attention": Adapter(4, 8.0, ATTENTION),
    "per_expert": Adapter(4, 8.0, ATTENTION, "per_expert", EXPERT),
    "shared_outer": Adapter(4, 6.0, ATTENTION, "shared_outer", EXPERT),
}

SHARED = re.compile(r"\.experts\.\D")
"""Names of what all experts of a layer share have it."""


def manifest_of(folder: Path, adapter: Adapter) -> AdapterManifest:
    config = Qwen3MoeConfig.from_pretrained(folder)
    return AdapterManifest(Manifest(folder, config).required, adapter)


def matrices_of(folder: Path, adapter: Adapter, seed: int) -> dict[str, Tensor]:
    """Random matrices, large enough to change every token's log-prob."""
    generator = torch.Generator().manual_seed(seed)
    shapes = manifest_of(folder, adapter).required
    return {n: torch.randn(s, generator=generator) * 0.1 for n, s in sorted(shapes.items())}


def merged_weight(
    name: str, weight: Tensor, matrices: Mapping[str, Tensor], scale: float
) -> Tensor:
    """The formula, for a weight of the checkpoint; an adapter that has none leaves it as it is."""
    of_all = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    found = [
        matrices.get(lora_name(name, matrix), matrices.get(lora_name(of_all, matrix)))
        for matrix in ("A", "B")
    ]
    if found[0] is None or found[1] is None:
        return weight
    return weight + scale * found[1] @ found[0]


def merged_oracle(folder: Path, adapter: Adapter, matrices: Mapping[str, Tensor], into: Path):
    """transformers' model with the adapter merged into its weights."""
    shutil.copytree(folder, into)
    weights = load_file(folder / "model.safetensors")
    merged = {n: merged_weight(n, w, matrices, adapter.scale) for n, w in weights.items()}
    adapted = {n.rpartition(".lora_")[0] for n in matrices if not SHARED.search(n)}
    assert len(adapted) == sum(not torch.equal(merged[n], weights[n]) for n in weights)
    save_file(merged, into / "model.safetensors", metadata={"format": "pt"})
    return load_oracle(into)
