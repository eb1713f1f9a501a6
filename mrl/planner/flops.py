"""Count the floating-point operations (FLOPs) of one token, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.planner.parts import Part
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, mtp_layers, mtp_parts


def forward_flops(
    shape: ModelShape, parts: Iterable[Part], layers: Iterable[int], context: float
) -> float:
    """Return the FLOPs of one token's forward pass through `parts` and through attention.

    `parts` are the model's parts with parameters. `layers` are the indices of the layers whose
    attention is counted: the products of queries with keys, and the weighted sums of values; in layers
    with linear attention the delta rule, whatever the context. Sparse attention is counted as mrl
    computes it: its indexers score all keys, and attention masks those that were not chosen.

    A token needs 2 FLOPs per active parameter (arXiv 2001.08361, table 1) and, in each layer, 2 x
    (query width + value width) for each of the `context` tokens that it attends to.
    """
    matrices = sum(p.num_active for p in parts if p.name not in ("embedding", "norms"))
    counted, linear = list(layers), shape.linear
    num_linear = sum(n in linear.layers for n in counted) if linear else 0
    rule = num_linear * linear.rule_flops if linear else 0
    width = shape.query_width + shape.value_width
    rule += len(counted) * shape.indexer.key_flops(context) if shape.indexer else 0
    return 2 * matrices + 2 * (len(counted) - num_linear) * context * width + rule


def model_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of one token in one forward pass of the model.

    The output layer counts, even if it is tied to the embedding.
    """
    tied = 2 * shape.vocab * shape.hidden * shape.tied
    parts = [*shape.parts(), *(shape.adapter.parts if shape.adapter else ())]
    return forward_flops(shape, parts, range(shape.num_layers), context) + tied


def stage_flops(shape: ModelShape, stage: Stage, context: float) -> float:
    """Return the FLOPs of one token in one forward pass of one pipeline stage."""
    tied = 2 * shape.vocab * shape.hidden * (shape.tied and stage.has_output)
    parts = (*stage.parts, *stage.adapter)
    return forward_flops(shape, parts, stage.layers, context) + tied


def frozen_flops(shape: ModelShape, parts: Iterable[Part], has_output: bool) -> float:
    """Return the FLOPs per token that the backward pass saves because weights are frozen.

    The gradients of frozen weights are not computed; they would need as many FLOPs as the forward pass
    through these weights. Return 0 without an adapter. Indexers are not counted (`indexer_flops`).
    """
    if shape.adapter is None:
        return 0.0
    parts = [part for part in parts if not part.is_frozen]
    tied = 2 * shape.vocab * shape.hidden * (shape.tied and has_output)
    return forward_flops(shape, parts, (), 0.0) + tied


def mtp_training_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of one token in a forward and a backward pass of the MTP layers.

    Each ends with the model's output layer, whose weight gets no gradient from them.
    """
    layers = mtp_layers(shape)
    output = 2 * shape.vocab * shape.hidden * len(layers)
    return 3 * forward_flops(shape, mtp_parts(shape), layers, context) + 2 * output


def indexer_flops(
    shape: ModelShape, parts: Iterable[Part], num_layers: int, context: float
) -> float:
    """Return the FLOPs of one token's pass through the indexers of `num_layers` layers, whose
    parameters are in `parts`. They have no backward pass."""
    if shape.indexer is None:
        return 0.0
    own = [part for part in parts if part.is_frozen]
    return forward_flops(shape, own, (), 0.0) + num_layers * shape.indexer.key_flops(context)


def training_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of one token in a forward and a backward pass.

    The backward pass needs twice the FLOPs of the forward pass, less `frozen_flops` and those of
    indexers.
    """
    mtp = mtp_training_flops(shape, context)
    indexers = indexer_flops(shape, shape.parts(), shape.num_layers, context)
    frozen = frozen_flops(shape, shape.parts(), True)
    return 3 * model_flops(shape, context) - frozen - 2 * indexers + mtp


def stage_training_flops(shape: ModelShape, stage: Stage, context: float) -> float:
    """Return the FLOPs of one token in a forward and a backward pass of one pipeline stage."""
    frozen = frozen_flops(shape, stage.parts, stage.has_output)
    mtp = mtp_training_flops(shape, context) if stage.has_output else 0.0
    indexers = indexer_flops(shape, stage.parts, len(stage.layers), context)
    return 3 * stage_flops(shape, stage, context) - frozen - 2 * indexers + mtp
