"""Device memory that a micro-batch needs: activations kept for the backward pass, and the logits,
hidden states and gradients of the output head.

Dimensions: N packed tokens of a micro-batch, n = N / (tp x cp) rows of one rank, H hidden, V
vocabulary, K experts per token, F columns of an expert, b bytes of a weight or activation.
"""

from __future__ import annotations

from mrl.planner.rows import Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

NATIVE = {2: 1.9, 4: 1.3}
"""Ratio of the activation bytes of mrl's native layers to those of fused layers. The keys are the
numbers of bytes of a weight (2 for bf16, 4 for fp32). tests/planner/test_estimates.py measures the
ratios on a CPU."""
HEAD_SLICE = 8192
"""The chunked output head computes the gradient of its weight in slices of this many rows, if the
weight is in half precision."""


def layer_parts(shape: ModelShape, number: int) -> dict[str, tuple[int, int]]:
    """Return a dict with the size of the activations that layer `number` keeps per row.

    The keys are modules as in Megatron's `recompute_modules`; selective recompute never covers the
    activations under keys that begin with `kept`. The values are (number of elements in the dtype
    of the weights, number of elements of 4 bytes).
    """
    width = shape.query_width * (1 + shape.output_gate) + shape.kv_width
    rotated = (1 + shape.qk_norm) * (shape.query_width + shape.kv_width // 2)
    parts = {
        "kept": (2 * shape.hidden + shape.value_width, shape.heads),
        "layernorm": (2 * shape.hidden, 0),
        "mla_up_proj" if shape.mla else "kept queries, keys, values": (width + rotated, 0),
    }
    if shape.linear and number in shape.linear.layers:
        parts["kept"] = (2 * shape.hidden, 0)
        parts["kept queries, keys, values"] = shape.linear.activations
    if number not in shape.moe_layers and number < shape.num_layers:
        return parts | {"mlp": (3 * shape.dense_ffn, 0)}
    return parts | {
        "moe": (shape.topk * (shape.hidden + 2 * shape.moe_ffn), 2 * shape.num_experts),
        "moe_act": (shape.topk * shape.moe_ffn, 0),
        "shared_experts": (3 * shape.shared_ffn, 0),
    }


def layer_activation_bytes(
    shape: ModelShape, number: int, rows: int, work: Workload, modules: tuple[str, ...] = ()
) -> int:
    """Return the bytes that one layer keeps for the backward pass over `rows` rows.

    Selective recompute covers `modules`; their activations are not counted. The count follows
    Korthikanti et al. (arXiv 2205.05198, section 4), for flash attention, no dropout, SwiGLU and
    MoE. The count includes the inputs and outputs of both norms; queries, keys and values; queries
    and keys again after RoPE and, if the model has query and key norms, again after those norms;
    the attention's output; the input and 3 F columns for every row that an expert receives; and the
    router's logits and probabilities in fp32. Routing is assumed to be balanced.

    Fused GPU layers need this much. mrl's native layers also keep copies for unfused norms and dense
    SwiGLU, and need NATIVE times as much in total.
    """
    recomputed = set(modules)
    if "moe" in recomputed:  # includes the MoE layer's activation function and shared experts
        recomputed |= {"moe_act", "shared_experts"}
    kept = [sizes for name, sizes in layer_parts(shape, number).items() if name not in recomputed]
    return rows * sum(work.weight_bytes * half + 4 * full for half, full in kept)


def in_flight(stage: int, dims: ParallelDims, num_micro_batches: int) -> int:
    """Return the largest number of forward passes whose activations a pipeline rank keeps at the
    same time.

    A pass takes one micro-batch through one chunk of layers. With the schedule 1F1B (arXiv
    2104.04473, section 2.2) the number is pp - stage. With the interleaved schedule (section 2.3,
    as Megatron implements it) it is 2 (pp - stage - 1) + (vpp - 1) pp + 1. The number is smaller if
    a step has fewer passes.
    """
    if dims.vpp == 1:
        return min(num_micro_batches, dims.pp - stage)
    chunks = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return min(num_micro_batches * dims.vpp, chunks)


def _kept_bytes(
    shape: ModelShape, number: int, rows: int, work: Workload, modules: tuple[str, ...] = ()
) -> int:
    """Return `layer_activation_bytes`, times the factor in NATIVE if layers are mrl's own."""
    fused = layer_activation_bytes(shape, number, rows, work, modules)
    return int(NATIVE[work.weight_bytes] * fused) if work.native else fused


def activation_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Return one memory-plan row for the activations at the peak of a pass.

    A pass without gradients (not `training`) keeps the activations of one layer at a time. A training
    pass with full recompute keeps the input of each layer and all activations of one layer. Any other
    training pass keeps all activations that are not recomputed, and the recomputed ones of one layer.
    """
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    whole = {n: _kept_bytes(shape, n, rows, work) for n in stage.layers}
    if not training:
        return [_activations(max(whole.values()), f"one layer of {rows} rows")]
    peak = in_flight(stage.index, dims, work.num_micro_batches(dims))
    if work.recompute:
        inputs = stage.chunk_layers * rows * shape.hidden * work.weight_bytes
        how = f"{peak} x inputs of {stage.chunk_layers} layers of {rows} rows, and all of one layer"
        return [_activations(peak * inputs + max(whole.values()), how)]
    modules = work.recompute_modules
    kept = {n: _kept_bytes(shape, n, rows, work, modules) for n in stage.layers}
    again = max(whole[n] - kept[n] for n in stage.layers)
    without = f" without {', '.join(modules)}" * bool(modules)
    how = f"{peak} chunks in flight of {len(stage.layers) // dims.vpp} layers{without}"
    return [_activations(peak * sum(kept.values()) // dims.vpp + again, how)]


def _activations(num_bytes: int, formula: str) -> Row:
    source = "arXiv 2205.05198, section 4; mrl.planner.activations.layer_activation_bytes"
    return Row("activations", num_bytes, formula, source, managed=True)


def adapter_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Return one memory-plan row for the adapter's activations; no row without an adapter.

    The activations are the products `A x` of the adapter's A matrices with the inputs x of their
    layers, and the largest update `B A x` of a linear layer. The products of all layers are kept for
    the backward pass; a pass without gradients or with full recompute keeps the products of one layer
    at a time. The update exists three times: in parts, concatenated, and multiplied by the scale.

    A frozen layer does not need its input for a weight gradient. `layer_parts` counts the input
    nevertheless, because the gradient of A needs it if the layer is adapted.
    """
    if shape.adapter is None:
        return []
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layers = [shape.adapter.layers[n] for n in stage.layers]
    kept = [layer.kept + dims.tp * layer.gathered for layer in layers]
    peak = max(kept)
    if training and not work.recompute:
        peak = in_flight(stage.index, dims, work.num_micro_batches(dims)) * sum(kept) // dims.vpp
    outputs = 3 * max(layer.outputs for layer in layers)
    return [
        Row(
            "adapter: A x and updates",
            work.weight_bytes * rows * (peak + outputs),
            f"{work.weight_bytes} B x {rows} rows x ({peak} of A x, 3 x {outputs // 3} of an update)",
            "mrl.planner.activations.adapter_rows, for parallel.lora.layers",
            managed=True,
        )
    ]


def mtp_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Return the memory-plan rows of the loss of MTP layers: none without such layers on the stage, or
    in a pass without gradients.

    One micro-batch at a time has their activations. A layer keeps those of a decoder layer (or, with
    recompute, its input), the embeddings, both norms' outputs and their concatenation, and the hidden
    states that the output layer reads. With several pipeline stages the last one holds a copy of the
    embedding during a training pass, unless it is tied.
    """
    if not (stage.mtp and training):
        return []
    tokens = work.packed_tokens(dims) // dims.cp
    rows = tokens // dims.tp
    each = _kept_bytes(shape, shape.num_layers, rows, work)
    around = work.weight_bytes * shape.hidden * (6 * rows + 3 * tokens)
    total = shape.num_mtp * ((0 if work.recompute else each) + around) + each * work.recompute
    copy = work.weight_bytes * shape.vocab * shape.hidden // dims.tp
    source = "mrl.planner.activations.mtp_rows, for parallel.mtp"
    text = f"{shape.num_mtp} layer(s) of {rows} rows, embeddings, and {tokens} hidden states"
    found = [Row("MTP layers: activations", total, text, source, managed=True)]
    if dims.pp > 1 and not shape.tied:
        text = f"{work.weight_bytes} B x {shape.vocab} x {shape.hidden} / {dims.tp}"
        found.append(Row("MTP layers: copy of the embedding", copy, text, source, managed=True))
    return found


def logits_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of the logits [tokens, V / tp] that exist at the same time.

    They are the logits of a micro-batch or, with `work.logprob_chunk_tokens`, of one chunk of its
    tokens.

    Only one copy exists: mrl's kernels read the logits in place, and the backward pass overwrites them
    with their gradient.
    """
    tokens = work.packed_tokens(dims) // dims.cp
    if work.logprob_chunk_tokens:
        tokens = min(tokens, work.logprob_chunk_tokens)
    return work.weight_bytes * tokens * shape.vocab // dims.tp


def head_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> list[Row]:
    """Return the memory-plan rows of the output head; none if the stage has no output layer.

    The rows are for the logits, the gathered hidden states and, if `training`, the gradients of the
    hidden states and of the output layer's weight.
    """
    if not stage.has_output:
        return []
    tokens, columns = work.packed_tokens(dims) // dims.cp, shape.vocab // dims.tp
    chunk = min(work.logprob_chunk_tokens or tokens, tokens)
    rows = [
        Row(
            "logits",
            logits_bytes(shape, dims, work),
            f"{work.weight_bytes} B x {chunk} tokens x {columns} columns",
            "mrl.planner.activations.logits_bytes; train.logprob_chunk_tokens",
            managed=True,
        )
    ]
    hidden = work.weight_bytes * tokens * shape.hidden
    slice_rows = min(columns, HEAD_SLICE) if work.logprob_chunk_tokens else columns
    weight = work.weight_bytes * slice_rows * shape.hidden
    if shape.adapter:
        weight = slice_rows = 0  # the head is frozen
    if work.logprob_chunk_tokens and work.weight_bytes == 4:
        weight = 0  # in fp32, the product is added to the gradient buffer directly
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
                "mrl.planner.activations.head_rows",
                managed=True,
            )
        )
    return rows
