"""Adapters of the tiny models for the tests of PEFT's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mrl.config import LoraConfig
from mrl.config.adapter import Adapter, Experts
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import write_peft_folder
from parallel.lora.rules import adapter_shapes, read_adapter

RANK, ALPHA = 3, 6.0
"""A rank that nothing divides by."""


def make_adapter(model: HfModel, experts: Experts, rank: int = RANK) -> Adapter:
    """An adapter of the attention, and of the experts as `experts` says."""
    return read_adapter(LoraConfig(rank=rank, alpha=ALPHA, experts=experts), model)


def random_matrices(model: HfModel, adapter: Adapter) -> dict[str, Tensor]:
    """Random A and B: the gradients of both are then not zero."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.1 * torch.randn(shape, generator=generator)
        for name, shape in sorted(adapter_shapes(model, adapter).items())
    }


def write_adapter(folder: Path, model: HfModel, adapter: Adapter) -> dict[str, Tensor]:
    """Write a random adapter as `mrl export` does; return it."""
    tensors = random_matrices(model, adapter)
    folder.mkdir()
    write_peft_folder(folder, tensors.items(), adapter, model, str(model.path))
    return tensors


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
