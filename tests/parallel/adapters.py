"""Adapters of the tiny models: how they are written beside a model, and what merging must give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl.config import LoraConfig
from mrl.config.adapter import Adapter, Experts, lora_name
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.rules import LINEAR, adapter_shapes, module_name, read_adapter

RANK, SCALE = 3, 2.0
"""Rank of the adapters, which nothing divides by, and the factor of B A."""


def adapter_of(model: HfModel, experts: Experts) -> Adapter:
    """An adapter of every projection of a model, but of experts as `experts` says."""
    names = dict.fromkeys(
        module_name(hf)
        for rule, hf, _, _ in rule_shapes(model)
        if LINEAR.search(rule.megatron) and "{expert}" not in rule.megatron
    )
    config = LoraConfig(rank=RANK, alpha=SCALE * RANK, targets=tuple(names), experts=experts)
    return read_adapter(config, model)


def lora_folder(model_path: Path, adapter: Adapter) -> Path:
    """The folder that `write_lora` writes an adapter of a model to."""
    return model_path.parent / f"{model_path.name}_lora_{adapter.experts}"


def write_lora(model_path: Path, experts: Experts) -> dict[str, Tensor]:
    """Write an adapter with random A and B beside a model: the gradients of both are then not zero.
    They are small for linear attention, where rounding would otherwise change the gradient's norm by
    1e-3."""
    model = HfModel.read(model_path)
    adapter = adapter_of(model, experts)
    spread = 0.05 if model.sizes.has_linear_attention else 0.2
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: spread * torch.randn(shape, generator=generator)
        for name, shape in sorted(adapter_shapes(model, adapter).items())
    }
    folder = lora_folder(model_path, adapter)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config(str(model_path))))
    return tensors


def with_updates(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add SCALE B A to every weight of `base` that an adapter with PEFT's names has matrices of."""
    merged = {}
    used: set[str] = set()
    for name, weight in base.items():
        shared = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        pair = [
            next((n for n in (lora_name(name, m), lora_name(shared, m)) if n in adapter), None)
            for m in ("A", "B")
        ]
        merged[name] = weight
        if pair != [None, None]:
            a, b = (adapter[str(one)].float() for one in pair)
            # The base is rounded to the dtype that it is trained in.
            merged[name] = weight.to(adapter[str(pair[0])].dtype).float() + SCALE * b @ a
            used.update(map(str, pair))
    assert used == adapter.keys()
    return merged
