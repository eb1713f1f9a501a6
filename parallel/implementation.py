"""Which layers and which number format to build with; decided without importing Megatron."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from mrl.errors import InputError

Implementation = Literal["local", "transformer_engine"]


def choose_implementation(
    asked: Literal["auto", "local", "transformer_engine"],
) -> tuple[Implementation, str]:
    """Which layers to build, and why, for the plan. Raises InputError when the asked are missing."""
    has_cuda = torch.cuda.is_available()
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if asked == "local":
        return "local", "asked for"
    missing = [
        name
        for name, there in (("CUDA device", has_cuda), ("transformer-engine", has_te))
        if not there
    ]
    if asked == "transformer_engine":
        if missing:
            raise InputError(
                f"model.transformer_impl is transformer_engine, but there is no "
                f"{' and no '.join(missing)}; install mrl[gpu] on a GPU machine or set it to auto or "
                "local"
            )
        return "transformer_engine", "asked for"
    if missing:
        return "local", f"auto: no {' and no '.join(missing)}"
    return "transformer_engine", "auto"


def choose_dtype(asked: Literal["auto", "float32", "bfloat16"]) -> torch.dtype:
    """`auto`: bfloat16 on GPUs, float32 on CPUs."""
    if asked == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, asked)
