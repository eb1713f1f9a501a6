"""This module decides which layers and which number format to use, without importing Megatron."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mrl.errors import InputError

Implementation = Literal["local", "transformer_engine"]

OLDEST_ENGINE = (2, 6)
"""TransformerEngine that the layers are written for."""
OLDEST_INVARIANT_ENGINE = (2, 10)
"""Megatron asserts it for `num_splits`, which its batch-invariant mode sets
(`TEDotProductAttention.forward`)."""
OLDEST_FUSED_PERMUTE = (2, 1)
"""Megatron refuses `moe_permute_fusion` below (`TransformerConfig.__post_init__`)."""


@dataclass(frozen=True)
class Engine:
    """TransformerEngine as it is installed here."""

    version: str | None
    """None where it is not installed."""
    error: str | None = None
    """What importing it raised."""

    @property
    def problem(self) -> str | None:
        """Why its layers cannot be built, in words; None where they can."""
        if self.version is None:
            return "no transformer-engine"
        if self.error is not None:
            return f"transformer-engine {self.version} does not import ({self.error})"
        if self.numbers < OLDEST_ENGINE:
            return f"transformer-engine {self.version} is older than {_dotted(OLDEST_ENGINE)}"
        return None

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"\d+", self.version or "")[:2])


@functools.cache
def find_engine() -> Engine:
    """Import TransformerEngine: a broken one is found out here, in one line, and not
    in the middle of Megatron's imports."""
    if importlib.util.find_spec("transformer_engine") is None:
        return Engine(None)
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing symbol is an OSError, a wrong build a RuntimeError
        lines = str(error).splitlines() or [""]
        return Engine(version, f"{type(error).__name__}: {lines[0]}")
    return Engine(version)


def choose_implementation(
    asked: Literal["auto", "local", "transformer_engine"],
) -> tuple[Implementation, str]:
    """Choose which layers to build, and say why, for the plan. Raises InputError when those that the
    recipe asks for are missing.

    `local` are mrl's native layers (docs/layers.md).
    """
    if asked == "local":
        return "local", "asked for"
    problems = []
    if not torch.cuda.is_available():
        problems.append("no CUDA device")
        if importlib.util.find_spec("transformer_engine") is None:
            problems.append("no transformer-engine")
    elif problem := find_engine().problem:
        problems.append(problem)
    if asked == "transformer_engine":
        if problems:
            raise InputError(
                f"model.transformer_impl is transformer_engine, but there is "
                f"{' and '.join(problems)}; on a GPU machine install mrl[te] "
                "(docs/gpu.md), or set it to auto or local: mrl's own layers need neither "
                "transformer-engine nor apex"
            )
        return "transformer_engine", "asked for"
    if problems:
        return "local", f"auto: {' and '.join(problems)}"
    return "transformer_engine", "auto"


def check_invariant_engine() -> None:
    """Raises InputError where `rollout.true_on_policy` on a GPU would find too old an engine."""
    engine = find_engine()
    if engine.problem is None and engine.numbers < OLDEST_INVARIANT_ENGINE:
        raise InputError(
            f"rollout.true_on_policy is on, but transformer-engine is {engine.version}; Megatron's "
            f"batch-invariant mode needs {_dotted(OLDEST_INVARIANT_ENGINE)} or newer: update it, or "
            "turn the mode off"
        )


def fusions(
    implementation: Implementation,
    device: torch.device,
    dtype: torch.dtype,
    is_latent: bool,
    true_on_policy: bool = False,
) -> dict[str, Any]:
    """Megatron's fusion switches that this machine can have; a recipe's own come after them.

    bias_activation_fusion: SwiGLU as one kernel by torch.compile, with any layers on a GPU.
    apply_rope_fusion: TransformerEngine's, in fp32. Latent attention has its own fused kernel, which
    Megatron calls experimental and which takes cosines rounded to the model's dtype: left off.
    moe_permute_fusion: TransformerEngine's, whose sums have an order. mrl's layers have their own.
    gradient_accumulation_fusion: needs NVIDIA's apex built with its C++ and CUDA extensions.
    """
    if device.type != "cuda" or true_on_policy:
        return {"bias_activation_fusion": False}
    engine = implementation == "transformer_engine"
    return {
        "bias_activation_fusion": True,
        "apply_rope_fusion": engine and not is_latent,
        "moe_permute_fusion": engine and find_engine().numbers >= OLDEST_FUSED_PERMUTE,
        "gradient_accumulation_fusion": dtype is torch.bfloat16
        and _imports("fused_weight_gradient_mlp_cuda"),
    }


def choose_dtype(asked: Literal["auto", "float32", "bfloat16"]) -> torch.dtype:
    """Choose the number format; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    if asked == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, asked)


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # one that was built for another torch raises whatever it likes
        return False
    return True


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
