"""What a micro-batch adds on the device: activations that are kept for the backward, and the head.

Dimensions: N packed tokens of a micro-batch, n = N / (tp x cp) rows of one rank, H hidden, V
vocabulary, K experts per token, F columns of an expert, b bytes of a weight or activation.
"""

from __future__ import annotations

from parallel.dims import ParallelDims
from parallel.scaling.rows import Row
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import Stage
from parallel.scaling.workload import Workload

NATIVE = {2: 1.9, 4: 1.3}
"""How many times as much as fused layers mrl's native ones keep, by bytes of a weight: measured on a
CPU in tests/parallel/scaling/test_scaling_estimates.py."""
HEAD_SLICE = 8192
"""Rows of the head's weight gradient that the chunked head computes at a time in half precision."""


def layer_parts(shape: ModelShape, number: int) -> dict[str, tuple[int, int]]:
    """(elements of b bytes, elements of 4 bytes) that one row keeps, by what would recompute them.

    The names are those of Megatron's `recompute_modules`; `kept` is never recomputed selectively.
    """
    width = shape.query_width + shape.kv_width
    turned = (1 + shape.qk_norm) * (shape.query_width + shape.kv_width // 2)
    parts = {
        "kept": (2 * shape.hidden + shape.value_width, shape.heads),
        "layernorm": (2 * shape.hidden, 0),
        "mla_up_proj" if shape.mla else "kept queries, keys, values": (width + turned, 0),
    }
    if number not in shape.moe_layers:
        return parts | {"mlp": (3 * shape.dense_ffn, 0)}
    return parts | {
        "moe": (shape.topk * (shape.hidden + 2 * shape.moe_ffn), 2 * shape.num_experts),
        "moe_act": (shape.topk * shape.moe_ffn, 0),
        "shared_experts": (3 * shape.shared_ffn, 0),
    }


def layer_activation_bytes(
    shape: ModelShape, number: int, rows: int, work: Workload, modules: tuple[str, ...] = ()
) -> int:
    """What one layer keeps of a micro-batch for its backward, without what `modules` recompute.

    After Korthikanti et al. (arXiv 2205.05198, section 4), with attention that keeps no scores, no
    dropout, SwiGLU and MoE: both norms' inputs and outputs; queries, keys and values, once more after
    their norms and after RoPE; the attention's output; per expert row its input and 3 F columns; the
    router's logits and probabilities in fp32. Routing is taken as balanced.

    This is what fused GPU layers need. mrl's native layers keep copies for unfused norms and dense
    SwiGLU beside it: NATIVE times as much in all.
    """
    gone = set(modules)
    if "moe" in gone:  # the whole MoE layer, its activation and shared experts too
        gone |= {"moe_act", "shared_experts"}
    kept = [sizes for name, sizes in layer_parts(shape, number).items() if name not in gone]
    return rows * sum(work.weight_bytes * half + 4 * full for half, full in kept)


def in_flight(stage: int, dims: ParallelDims, num_micro_batches: int) -> int:
    """Chunk activations that a pipeline rank keeps at its peak.

    1F1B (arXiv 2104.04473, section 2.2): pp - stage micro-batches. Interleaved (the same, 2.3, as
    Megatron's schedule counts): 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks.
    """
    if dims.vpp == 1:
        return min(num_micro_batches, dims.pp - stage)
    chunks = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return min(num_micro_batches * dims.vpp, chunks)


def activation_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Estimate what is kept at the peak of training. With full recompute: each layer's input,
    and one layer whole. With selective recompute: what is not recomputed, and that of one layer."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    modules = () if work.recompute else work.recompute_modules
    whole = {n: _kept_bytes(shape, n, rows, work) for n in stage.layers}
    kept = {n: _kept_bytes(shape, n, rows, work, modules) for n in stage.layers}
    peak = in_flight(stage.index, dims, work.num_micro_batches(dims))
    if work.recompute:
        inputs = stage.chunk_layers * rows * shape.hidden * work.weight_bytes
        return peak * inputs + max(whole.values())
    again = max(whole[n] - kept[n] for n in stage.layers)
    return peak * sum(kept.values()) // dims.vpp + again


def _kept_bytes(
    shape: ModelShape, number: int, rows: int, work: Workload, modules: tuple[str, ...] = ()
) -> int:
    """Return what one layer of the implementation that is used keeps."""
    fused = layer_activation_bytes(shape, number, rows, work, modules)
    return int(NATIVE[work.weight_bytes] * fused) if work.native else fused


def activation_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Bytes of a pass with gradients, or of one without, which keeps one layer at a time."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    if not training:
        layer = max(_kept_bytes(shape, n, rows, work) for n in stage.layers)
        return [_activations(layer, f"one layer of {rows} rows")]
    peak = in_flight(stage.index, dims, work.num_micro_batches(dims))
    if work.recompute:
        how = f"{peak} x inputs of {stage.chunk_layers} layers of {rows} rows, and one layer whole"
    else:
        without = f" without {', '.join(work.recompute_modules)}" * bool(work.recompute_modules)
        how = f"{peak} chunks in flight of {len(stage.layers) // dims.vpp} layers{without}"
    return [_activations(activation_bytes(shape, stage, dims, work), how)]


def _activations(num_bytes: int, formula: str) -> Row:
    source = "arXiv 2205.05198, section 4; parallel.scaling.activations.layer_activation_bytes"
    return Row("activations", num_bytes, formula, source, managed=True)


def adapter_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Bytes of A x, which are kept for the backward, and of the update of the largest layer: its parts,
    their joined copy, and that times the scale.

    Frozen layers would need no input to find their weight's gradient. It is counted all the same: where
    a layer is adapted, A needs it.
    """
    if shape.adapter is None:
        return []
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layers = [shape.adapter.layers[n] for n in stage.layers]
    kept = [layer.kept + dims.tp * layer.gathered for layer in layers]
    alive = max(kept)
    if training and not work.recompute:
        alive = in_flight(stage.index, dims, work.num_micro_batches(dims)) * sum(kept) // dims.vpp
    outputs = 3 * max(layer.outputs for layer in layers)
    return [
        Row(
            "adapter: A x and updates",
            work.weight_bytes * rows * (alive + outputs),
            f"{work.weight_bytes} B x {rows} rows x ({alive} of A x, 3 x {outputs // 3} of an update)",
            "parallel.scaling.activations.adapter_rows, for parallel.lora.layers",
            managed=True,
        )
    ]


def logits_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """[rows, V / tp] once: mrl reads logits as they are and its backward overwrites them. Rows are the
    tokens of the micro-batch, or of one chunk of them."""
    tokens = work.packed_tokens(dims) // dims.cp
    if work.logprob_chunk_tokens:
        tokens = min(tokens, work.logprob_chunk_tokens)
    return work.weight_bytes * tokens * shape.vocab // dims.tp


def head_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Logits, and what their backward adds: the gradients of hidden states and of the head's weight."""
    if not stage.has_output:
        return []
    tokens, columns = work.packed_tokens(dims) // dims.cp, shape.vocab // dims.tp
    chunk = min(work.logprob_chunk_tokens or tokens, tokens)
    rows = [
        Row(
            "logits",
            logits_bytes(shape, dims, work),
            f"{work.weight_bytes} B x {chunk} tokens x {columns} columns",
            "parallel.scaling.activations.logits_bytes; train.logprob_chunk_tokens",
            managed=True,
        )
    ]
    hidden = work.weight_bytes * tokens * shape.hidden
    slice_rows = min(columns, HEAD_SLICE) if work.logprob_chunk_tokens else columns
    weight = work.weight_bytes * slice_rows * shape.hidden
    if shape.adapter:
        weight = slice_rows = 0  # the head is frozen
    if work.logprob_chunk_tokens and work.weight_bytes == 4:
        weight = 0  # fp32 products are added to the gradient buffer at once
    gathered = hidden * (dims.tp > 1)
    if training or gathered:
        rows.append(
            Row(
                "head: hidden states and gradients",
                gathered + (hidden + weight) * training,
                f"{work.weight_bytes} B x {shape.hidden} x ({tokens} rows gathered over tensor "
                f"parallel, {tokens} rows of gradient, {slice_rows} rows of weight gradient)"
                if training
                else f"{work.weight_bytes} B x {shape.hidden} x {tokens} rows gathered",
                "parallel.scaling.activations.head_rows",
                managed=True,
            )
        )
    return rows
