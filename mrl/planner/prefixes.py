"""What `train.share_prefixes: auto` saves and costs: rows, attention scores, seconds, memory.

The samples of a prompt that are in the same micro-batch share the rows of their common prefix. It is
assumed that they have the same routes there, and that all prompts and all responses have the same
length.

Legend: P prompt tokens, R response tokens, G samples of a prompt in one micro-batch, c blocks of
queries of a sample's own rows (`mrl.shared_prefixes.num_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.planner.flops import forward_flops, model_flops
from mrl.planner.rows import Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage
from mrl.planner.workload import Workload
from mrl.shared_prefixes import MAX_TOKENS_PER_ROW, MIN_GAIN, num_blocks
from parallel.dims import ParallelDims

MASK_BYTES = 3
"""Bytes per pair of a query and a key in a block: the mask, and its copy in half precision that
`scaled_dot_product_attention` makes."""


@dataclass(frozen=True)
class PrefixGain:
    """How many times less a step computes with shared prefixes than without them."""

    rows: float
    scores: float
    """Pairs of a query and a key for which attention computes a score."""
    flops: float
    """FLOPs of a forward pass. Those of a backward pass have the same ratio."""

    @property
    def pays(self) -> bool:
        """Whether `auto` shares, which depends on the rows alone."""
        return self.rows >= MIN_GAIN


def samples_together(work: Workload) -> int:
    """Return G, the number of samples of a prompt that fit into one micro-batch.

    The first sample takes P + R rows, and each other one R + 1, because it computes the last token of
    the prompt itself.
    """
    own = work.response_len + 1
    by_rows = 1 + (work.micro_batch_tokens - work.sequence_len) // own
    by_tokens = MAX_TOKENS_PER_ROW * work.micro_batch_tokens // work.sequence_len
    return max(1, min(work.samples, by_rows, by_tokens))


def prefix_gain(shape: ModelShape, work: Workload) -> PrefixGain:
    """Return what sharing saves, by formulas that docs/prefixes.md compares with measured steps.

    Without sharing, G samples take G (P + R) rows and G (P + R)^2 / 2 scores. With sharing, the first
    one takes as much as before. Each of the others takes r = R + 1 rows, which attend to the p = P - 1
    shared rows and to each other in c blocks; all pairs of a block are computed. So they take r
    (p + r (c + 1) / (2 c)) scores each. Prompts whose samples do not fit into one micro-batch are
    computed once in each of their micro-batches.
    """
    length, own = work.sequence_len, work.response_len + 1
    parts = -(-work.samples // samples_together(work))
    others = work.samples - parts
    blocks = num_blocks(own)
    rows = parts * length + others * own
    before = length - own + own * (blocks + 1) / (2 * blocks)
    scores = parts * length**2 / 2 + others * own * before
    whole = work.samples * length, work.samples * length**2 / 2
    per_row = model_flops(shape, 0)
    per_score = forward_flops(shape, (), shape.full_layers, 1)
    flops = [a * per_row + b * per_score for a, b in (whole, (rows, scores))]
    return PrefixGain(whole[0] / rows, whole[1] / scores, flops[0] / flops[1])


def prefix_speed(shape: ModelShape, work: Workload) -> float:
    """Return how many times faster the trainer's passes become, by FLOPs; 1 if nothing is shared."""
    if not work.share_prefixes:
        return 1.0
    gain = prefix_gain(shape, work)
    return gain.flops if gain.pays else 1.0


def prefix_row(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> Row:
    """Return the row of the copies that attention needs for samples with a shared prefix; 0 bytes if
    nothing is shared.

    Each block of queries gets a copy of its keys and values, with the heads of the queries: c blocks
    of a sample together those of c (P - 1) + r (c + 1) / 2 tokens. The mask of a block has an element
    for each pair of a query and a key. A training pass without recompute keeps them for all layers.
    """
    together = samples_together(work)
    shares = work.share_prefixes and together > 1 and prefix_gain(shape, work).pays
    own, packs = work.response_len + 1, 0
    if shares:
        rows = work.sequence_len + (together - 1) * own
        packs = max(1, work.micro_batch_tokens // rows)
    blocks = num_blocks(own)
    keys = blocks * (work.prompt_len - 1) + own * (blocks + 1) // 2
    width = (shape.query_width + shape.value_width) // dims.tp
    pairs = own * keys // blocks
    each = work.weight_bytes * keys * width + MASK_BYTES * pairs
    layers = len(stage.layers) if training and not work.recompute else 1
    copies = packs * (together - 1)
    return Row(
        "attention to shared prefixes",
        copies * each * layers,
        f"{copies} samples x {blocks} blocks: keys and values of {keys} tokens, masks of {pairs} "
        f"pairs; {layers} layer(s)",
        "mrl.planner.prefixes.prefix_row, for parallel.layers.attention.PackedAttention",
        managed=True,
    )
