"""Reads and writes PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from mrl.lora import Adapter
from parallel.hf_config import HfModel


def read_peft_folder(folder: Path, adapter: Adapter, model: HfModel) -> dict[str, Tensor]:
    """Return the matrices of an adapter by PEFT's names."""
    return load_file(folder / "adapter_model.safetensors")
