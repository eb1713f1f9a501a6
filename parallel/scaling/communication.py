"""Bytes that one rank sends per optimizer step, by collective, as the code at hand calls them.

Rings: gathering or scattering a tensor of T bytes over g ranks sends T (g-1)/g from each, an all-reduce
twice that. An all-to-all of T bytes sends T (g-1)/g, where routing is balanced.

Dimensions: N packed tokens of a micro-batch, n = N / (tp x cp) rows of a rank, H hidden, K experts per
token, m micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.kernels.vp_logprob import tile_size
from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import Stage, expert_data_parallel, router_bias_bytes
from parallel.scaling.workload import Workload


@dataclass(frozen=True)
class Volume:
    """A volume is one kind of traffic of one rank."""

    name: str
    group: int
    """Ranks that take part."""
    span: int
    """Consecutive ranks that the group stretches over: above a node's, it leaves the node."""
    forward: float
    """Bytes sent per optimizer step in one forward pass over its micro-batches."""
    backward: float = 0.0
    """Bytes sent in the backward pass, without recompute's forward."""
    recomputed: float = 0.0
    """Bytes of `forward` that full recompute sends again."""
    update: float = 0.0
    """Bytes sent once, around the update."""

    def step(self, recompute: bool) -> float:
        """Sum the bytes of one optimizer step."""
        return self.forward + self.backward + recompute * self.recomputed + self.update


def ring(size: int, num_bytes: float) -> float:
    """Bytes that each of `size` ranks sends to gather, or to reduce and scatter, `num_bytes`."""
    return num_bytes * (size - 1) / size


def volumes(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> list[Volume]:
    """Everything that one rank of `stage` sends in one optimizer step; groups of one rank left out."""
    found = [
        tensor_parallel(shape, dims, work, stage),
        logprob_statistics(shape, dims, work, stage),
        *expert_parallel(shape, dims, work, stage),
        *context_parallel(shape, dims, work, stage),
        pipeline(shape, dims, work, stage),
        *data_parallel(shape, dims, work, stage),
        expert_adapters(dims, stage),
        tied_embedding(shape, dims, stage),
    ]
    return [volume for volume in found if volume.group > 1 and volume.step(True)]


def tensor_parallel(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> Volume:
    """Sequence parallelism (arXiv 2205.05198, section 4.2.2), as megatron-core's linear layers do it.

    An attention, dense MLP or shared expert gathers [N, H] before and scatters it after. Its backward
    gathers the output's gradient, gathers the input again (for the weight's gradient) and scatters the
    input's. Routed experts take the scattered rows as they are. The embedding scatters and gathers
    back; the head gathers, keeps that, and scatters. Latent attention gathers its compressed vectors in
    place of H. Gradients of parameters that every rank holds are all-reduced in fp32.

    Frozen weights have no gradient, for which inputs would be gathered again, and neither has a frozen
    embedding. Layers whose rows are cut gather their A x, and scatter its gradient.
    """
    hidden, mla = shape.hidden, shape.mla
    inputs = (mla.q_rank or hidden) + mla.kv_rank if mla else hidden
    rotary = mla.rope_dim if mla else 0
    attention = len(stage.layers)
    mlps = sum(1 for n in stage.layers if n not in shape.moe_layers or shape.shared_ffn)
    forward = attention * (inputs + rotary + hidden) + mlps * 2 * hidden
    backward = attention * (2 * inputs + rotary + hidden) + mlps * 3 * hidden
    ends = ends_back = (stage.has_embedding + stage.has_output) * hidden
    if shape.adapter:
        low = sum(shape.adapter.layers[n].gathered for n in stage.layers)
        backward = low + attention * (inputs + rotary + hidden) + mlps * 2 * hidden
        forward, ends_back = forward + low, stage.has_output * hidden
    tokens = work.num_micro_batches(dims) * work.packed_tokens(dims) // dims.cp
    unit = ring(dims.tp, tokens * work.weight_bytes)
    return Volume(
        "tensor parallel",
        dims.tp,
        dims.tp,
        forward=unit * (forward + ends),
        backward=unit * (backward + ends_back),
        recomputed=unit * forward,
        update=2 * ring(dims.tp, 4 * stage.whole),
    )


def logprob_statistics(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> Volume:
    """`mrl.kernels.linear_logprob` gathers 4 fp32 per loss token and tile of the vocabulary. No
    backward. (With all logits, `train.logprob_chunk_tokens: 0`, prompts are gathered too.)"""
    loss_tokens = work.sequences_per_pack(dims) * work.response_len
    tokens = work.num_micro_batches(dims) * loss_tokens / dims.cp
    num_tiles = shape.vocab // tile_size(shape.vocab // dims.tp, dims.tp)
    total = tokens * num_tiles * 16 * stage.has_output
    return Volume("log-prob statistics", dims.tp, dims.tp, forward=ring(dims.tp, total))


def expert_parallel(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """Count tokens sent to their experts and back, in each MoE layer (megatron-core's
    `token_dispatcher.py`).

    alltoall: every row goes out K times, [n K, H] and its fp32 probability [n K], and comes back as
    [n K, H]; the same in the backward. With expert-tensor parallelism the arrived rows are gathered
    over it and scattered after, in the probabilities' fp32. Token counts of 8 E bytes a rank are left
    out.
    allgather: the rows of all etp x ep ranks are gathered, with fp32 probabilities and a map of one
    byte per expert, and the outputs are scattered back in the probabilities' fp32.
    """
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layers = sum(1 for n in stage.layers if n in shape.moe_layers)
    calls = work.num_micro_batches(dims) * layers
    vector, span = shape.hidden * work.weight_bytes, dims.etp * dims.ep
    if dims.dispatcher == "allgather":
        both = ring(span, span * rows * (vector + 4 * shape.hidden))
        probs = ring(span, span * rows * shape.num_experts * 4)
        routed = ring(span, span * rows * shape.num_experts)
        sent = calls * (both + probs + routed)
        back = calls * (both + probs)
        return [Volume("expert parallel", span, span, sent, back, sent)]
    rows *= shape.topk
    once = calls * ring(dims.ep, rows * (2 * vector + 4))
    inner = calls * ring(dims.etp, dims.etp * rows * (vector + 4 * shape.hidden + 4))
    return [
        Volume("expert parallel", dims.ep, span, once, once, once),
        Volume("expert tensor parallel", dims.etp, dims.etp, inner, inner, inner),
    ]


def context_parallel(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """Keys and values of the whole micro-batch are gathered; their gradients are scattered.

    The head gathers log-probs and entropies, f32[N, 2]; every rank keeps its own gradients.
    """
    tokens = work.num_micro_batches(dims) * work.packed_tokens(dims)
    total = tokens * shape.kv_width // dims.tp * work.weight_bytes * len(stage.layers)
    sent, span = ring(dims.cp, total), dims.tp * dims.cp
    head = ring(dims.cp, tokens * 8 * stage.has_output)
    return [
        Volume("context parallel", dims.cp, span, sent, sent, sent),
        Volume("log-probs of all tokens", dims.cp, span, head),
    ]


def pipeline(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> Volume:
    """Count [n, H] per micro-batch and chunk to the next stage, and its gradient to the one before."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    one = work.num_micro_batches(dims) * rows * shape.hidden * work.weight_bytes
    return Volume(
        "pipeline",
        dims.pp,
        dims.world,
        forward=one * (dims.vpp - stage.has_output),
        backward=one * (dims.vpp - stage.has_embedding),
    )


def data_parallel(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """fp32 gradients all-reduced over the copies.

    With the distributed optimizer they are scattered, and the new weights gathered in their own
    format: by each of Megatron's chained optimizers, one of the dense and one of the expert
    parameters, and by each of them all weights. So a rank with experts gathers twice.

    Balanced routers add up how many tokens each expert got, in fp32 over all ranks of the stage.
    """
    gathers = 1 + (stage.expert > 0)
    bytes_each = 4 + gathers * work.weight_bytes if work.distributed_optimizer else 8
    replicas = dims.world // dims.pp
    return [
        Volume(name, copies, replicas, 0.0, update=ring(copies, num_bytes))
        for name, copies, num_bytes in (
            ("data parallel", dims.dp * dims.cp, bytes_each * stage.dense),
            ("expert data parallel", expert_data_parallel(dims), bytes_each * stage.expert),
            ("expert counts", replicas, 2 * router_bias_bytes(shape, stage.layers)),
        )
    ]


def expert_adapters(dims: ParallelDims, stage: Stage) -> Volume:
    """Count the fp32 gradients of matrices that every expert-tensor-parallel rank of an expert holds
    whole (`parallel.lora.adapted`)."""
    sent = 2 * ring(dims.etp, 4 * stage.expert_whole)
    return Volume("whole matrices of experts", dims.etp, dims.etp, 0.0, update=sent)


def tied_embedding(shape: ModelShape, dims: ParallelDims, stage: Stage) -> Volume:
    """Count the gradients of the matrix that the first and last stage share and add up, in fp32."""
    both = shape.tied and dims.pp > 1 and (stage.has_embedding or stage.has_output)
    both = both and shape.adapter is None  # it is frozen
    sent = 2 * ring(2, 4 * shape.vocab * shape.hidden / dims.tp) if both else 0.0
    return Volume("tied embedding", 2 if both else 1, dims.world, 0.0, update=sent)


def sync_volumes(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """The export before a rollout: every rank receives the whole model, or the adapter
    (`parallel.export`).

    The ranks of a stage gather its parameters: an expert over the expert ranks, then each peer's over
    the expert-tensor ranks. Then stage after stage broadcasts to the others.
    """
    b = work.weight_bytes
    sends_adapter = work.lora == "adapter"
    exported = stage.adapter if sends_adapter else stage.exported
    tensor, expert, whole_experts = (
        b * sum(part.num for part in exported if part.sharing == sharing)
        for sharing in ("tensor", "expert", "expert_whole")
    )
    biases = router_bias_bytes(shape, shape.moe_layers) - router_bias_bytes(shape, stage.layers)
    others = work.sent_bytes(shape) - b * sum(part.num for part in exported)
    others += 0 if sends_adapter else biases
    span, experts = dims.etp * dims.ep, expert / dims.etp + whole_experts
    rows = [
        ("gather over tensor parallel", dims.tp, dims.tp, ring(dims.tp, tensor)),
        ("gather over expert parallel", dims.ep, span, ring(dims.ep, experts)),
        ("gather over expert tensor parallel", dims.etp, dims.etp, ring(dims.etp, expert)),
        ("broadcast over pipeline", dims.pp, dims.world, others),
    ]
    return [Volume(name, n, span, 0.0, update=sent) for name, n, span, sent in rows if n > 1]
