"""Hints of `mrl check`: settings that are valid, but that another value would improve."""

from __future__ import annotations

from mrl.config import Recipe
from mrl.engines.sglang.arguments import field_names

FP32_HEAD = "enable_fp32_lm_head"
"""The field of SGLang's ServerArgs with which the logits are computed in float32."""


def hints(recipe: Recipe, *, on_gpu: bool) -> list[str]:
    """Return the hints for a recipe, one line each. `on_gpu`: whether the engine runs on GPUs."""
    rollout = recipe.rollout
    if rollout.engine != "sglang" or recipe.debug.load_rollouts is not None:
        return []
    dtype = rollout.engine_dtype(recipe.model)
    is_half = dtype == "bfloat16" or (dtype == "auto" and on_gpu)
    is_asked = FP32_HEAD in rollout.server_args or FP32_HEAD not in field_names()
    if not is_half or is_asked or rollout.true_on_policy:
        return []
    return [
        "the engine computes logits in bfloat16, which adds to the mismatch; "
        f"rollout.server_args={{{FP32_HEAD}: true}} computes them in float32 (docs/mismatch.md)"
    ]
