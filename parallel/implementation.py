"""Decide which layers to build, with which fused kernels and dtype, without importing Megatron."""

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

OLDEST_TRANSFORMER_ENGINE = (2, 6)
"""The oldest version of TransformerEngine whose layers mrl can build."""
OLDEST_BATCH_INVARIANT = (2, 10)
"""The oldest TransformerEngine for Megatron's batch-invariant mode. In this mode
`TEDotProductAttention.forward` sets `num_splits`, and asserts that the version is at least this one."""
OLDEST_FUSED_PERMUTE = (2, 1)
"""The oldest TransformerEngine with which Megatron accepts `moe_permute_fusion`
(`TransformerConfig.__post_init__`)."""


@dataclass(frozen=True)
class TransformerEngine:
    """The state of TransformerEngine on this machine."""

    version: str | None
    """The installed version; None if it is not installed."""
    error: str | None = None
    """The exception that the import of TransformerEngine raised, in one line; None if it can be
    imported or is not installed."""

    @property
    def problem(self) -> str | None:
        """The reason why TransformerEngine's layers cannot be built; None if they can be built."""
        if self.version is None:
            return "no transformer-engine"
        if self.error is not None:
            return f"transformer-engine {self.version} does not import ({self.error})"
        if self.numbers < OLDEST_TRANSFORMER_ENGINE:
            oldest = _dotted(OLDEST_TRANSFORMER_ENGINE)
            return f"transformer-engine {self.version} is older than {oldest}"
        return None

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"\d+", self.version or "")[:2])


@functools.cache
def find_transformer_engine() -> TransformerEngine:
    """Import TransformerEngine; return its version and the error of the import, if any.

    Without this check, a broken TransformerEngine would fail in the middle of Megatron's imports
    instead of being reported in one line.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return TransformerEngine(None)
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing symbol raises OSError, a wrong build RuntimeError
        lines = str(error).splitlines() or [""]
        return TransformerEngine(version, f"{type(error).__name__}: {lines[0]}")
    return TransformerEngine(version)


def choose_implementation(
    asked: Literal["auto", "local", "transformer_engine"],
) -> tuple[Implementation, str]:
    """Choose which layers to build; return the choice and the reason for it, which the plan prints.

    `local` means mrl's own layers (docs/layers.md). `auto` means TransformerEngine's layers if they
    can be built on this machine, and mrl's own layers otherwise. Raises InputError if
    `transformer_engine` is asked for and its layers cannot be built here.
    """
    if asked == "local":
        return "local", "asked for"
    problems = []
    if not torch.cuda.is_available():
        problems.append("no CUDA device")
        if importlib.util.find_spec("transformer_engine") is None:
            problems.append("no transformer-engine")
    elif problem := find_transformer_engine().problem:
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


def own_layers_only(
    asked: Literal["auto", "local", "transformer_engine"], model_type: str
) -> Literal["local"]:
    """Return `local`, for a model that only mrl's own layers compute. Raises InputError if the layers
    of TransformerEngine are asked for."""
    if asked == "transformer_engine":
        raise InputError(
            "model.transformer_impl is transformer_engine, but only mrl's own layers compute the "
            f"linear attention of a {model_type} over packed sequences; set it to auto or local"
        )
    return "local"


def check_batch_invariant() -> None:
    """Raise InputError if TransformerEngine is too old for `rollout.true_on_policy` on a GPU."""
    engine = find_transformer_engine()
    if engine.problem is None and engine.numbers < OLDEST_BATCH_INVARIANT:
        raise InputError(
            f"rollout.true_on_policy is on, but transformer-engine is {engine.version}; Megatron's "
            f"batch-invariant mode needs {_dotted(OLDEST_BATCH_INVARIANT)} or newer: update it, or "
            "turn the mode off"
        )


def fusions(
    implementation: Implementation,
    device: torch.device,
    dtype: torch.dtype,
    is_latent: bool,
    true_on_policy: bool = False,
) -> dict[str, Any]:
    """Return the settings of Megatron's fused kernels for this machine. A recipe can override them.

    All fused kernels are off on CPUs and under `true_on_policy`. On GPUs:

    - bias_activation_fusion: SwiGLU as one kernel, made by torch.compile. It is always on.
    - apply_rope_fusion: TransformerEngine's kernel, in fp32. It is on with TransformerEngine's
      layers, except for latent attention, whose fused kernel is experimental in Megatron and takes
      cosines that are rounded to the model's dtype.
    - moe_permute_fusion: TransformerEngine's kernels, which sum in a fixed order. It is on with
      TransformerEngine's layers; mrl's own layers have other kernels for this.
    - gradient_accumulation_fusion: a kernel of NVIDIA's apex. It is on with bf16 weights if apex is
      built with its C++ and CUDA extensions.
    """
    if device.type != "cuda" or true_on_policy:
        return {"bias_activation_fusion": False}
    engine = implementation == "transformer_engine"
    return {
        "bias_activation_fusion": True,
        "apply_rope_fusion": engine and not is_latent,
        "moe_permute_fusion": engine and find_transformer_engine().numbers >= OLDEST_FUSED_PERMUTE,
        "gradient_accumulation_fusion": dtype is torch.bfloat16
        and can_import("fused_weight_gradient_mlp_cuda"),
    }


def choose_dtype(asked: Literal["auto", "float32", "bfloat16"]) -> torch.dtype:
    """Return the torch dtype that the recipe asks for. `auto` is bfloat16 on GPUs and float32 on
    CPUs."""
    if asked == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, asked)


def can_import(module: str) -> bool:
    """Return whether a module is installed and can be imported."""
    try:
        importlib.import_module(module)
    except Exception:  # a module that was built for another torch may raise anything
        return False
    return True


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
