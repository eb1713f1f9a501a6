"""Counts the floating-point operations of one token, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from parallel.scaling.shape import ModelShape, Part
from parallel.scaling.stages import Stage


def forward_flops(shape: ModelShape, parts: Iterable[Part], layers: int, context: float) -> float:
    """Count the FLOPs of one token: 2 per parameter that it passes (arXiv 2001.08361, table 1),
    and the attention's scores and sums over `context` earlier tokens, 2 x (query width + value
    width) each."""
    matrices = sum(p.num_active for p in parts if p.name not in ("embedding", "norms"))
    return 2 * matrices + 2 * layers * context * (shape.query_width + shape.value_width)


def model_flops(shape: ModelShape, context: float) -> float:
    """Count the FLOPs of one token in one forward pass; a tied head multiplies like any other."""
    tied = 2 * shape.vocab * shape.hidden * shape.tied
    parts = [*shape.parts(), *(shape.adapter.parts if shape.adapter else ())]
    return forward_flops(shape, parts, shape.num_layers, context) + tied


def stage_flops(shape: ModelShape, stage: Stage, context: float) -> float:
    """Count the same for the layers of one pipeline rank."""
    tied = 2 * shape.vocab * shape.hidden * (shape.tied and stage.has_output)
    parts = (*stage.parts, *stage.adapter)
    return forward_flops(shape, parts, len(stage.layers), context) + tied


def frozen_flops(shape: ModelShape, parts: Iterable[Part], has_output: bool) -> float:
    """Count the FLOPs of one token that a backward pass does without: the gradients of frozen weights,
    as many as a forward pass multiplies with them. 0 without an adapter."""
    if shape.adapter is None:
        return 0.0
    tied = 2 * shape.vocab * shape.hidden * (shape.tied and has_output)
    return forward_flops(shape, parts, 0, 0.0) + tied


def training_flops(shape: ModelShape, context: float) -> float:
    """Count the FLOPs of one token in a forward and a backward pass, which takes twice a forward pass
    less what is frozen."""
    return 3 * model_flops(shape, context) - frozen_flops(shape, shape.parts(), True)


def stage_training_flops(shape: ModelShape, stage: Stage, context: float) -> float:
    """Count the same for the layers of one pipeline rank."""
    frozen = frozen_flops(shape, stage.parts, stage.has_output)
    return 3 * stage_flops(shape, stage, context) - frozen
