"""Bytes that one rank sends per optimizer step in the collectives that Megatron and mrl call.

With ring algorithms, each rank sends T (g-1)/g bytes to gather or scatter a tensor of T bytes over
g ranks, and twice as many for an all-reduce. In an all-to-all of T bytes, each rank sends T (g-1)/g
bytes if routing is balanced.

Dimensions: N packed tokens of a micro-batch, n = N / (tp x cp) rows of a rank, H hidden, K experts per
token, m micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.kernels.vp_logprob import tile_size
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, expert_data_parallel, router_bias_bytes
from mrl.planner.state import shards_of
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Volume:
    """One kind of traffic of one rank, in bytes sent per optimizer step."""

    name: str
    group: int
    """Number of ranks that take part."""
    span: int
    """Number of consecutive ranks from the group's first rank to its last. If it exceeds the number of
    GPUs of a node, the traffic leaves the node."""
    forward: float
    """Bytes that are sent in the forward pass, summed over the micro-batches of the step."""
    backward: float = 0.0
    """Bytes that are sent in the backward pass, without those of recomputed forward passes."""
    recomputed: float = 0.0
    """The part of `forward` that full recompute sends again."""
    update: float = 0.0
    """Bytes that are sent once per step, for the gradients and the new weights."""

    def step(self, recompute: bool) -> float:
        """Return the bytes of one optimizer step; they include `recomputed` if `recompute` is true."""
        return self.forward + self.backward + recompute * self.recomputed + self.update


def ring(size: int, num_bytes: float) -> float:
    """Return the bytes that each of `size` ranks sends to gather or reduce-scatter `num_bytes`."""
    return num_bytes * (size - 1) / size


def volumes(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> list[Volume]:
    """Return the traffic of one rank of `stage` in one optimizer step, with one `Volume` per kind.

    Kinds without traffic are left out.
    """
    found = [
        tensor_parallel(shape, dims, work, stage),
        logprob_statistics(shape, dims, work, stage),
        *expert_parallel(shape, dims, work, stage),
        *context_parallel(shape, dims, work, stage),
        pipeline(shape, dims, work, stage),
        *data_parallel(shape, dims, work, stage),
        *muon_gathers(dims, work, stage),
        expert_adapters(dims, stage),
        tied_embedding(shape, dims, stage),
    ]
    return [volume for volume in found if volume.group > 1 and volume.step(True)]


def tensor_parallel(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> Volume:
    """Return the traffic of tensor parallelism with sequence parallelism.

    The scheme is described in arXiv 2205.05198, section 4.2.2; megatron-core implements it. Each
    attention, dense MLP and shared expert gathers its input [N, H] and scatters its output. In the
    backward pass it gathers the gradient of the output, gathers the input again for the gradient of
    the weight, and scatters the gradient of the input. Routed experts work on the scattered rows. The
    embedding scatters its output in the forward pass and gathers the gradient in the backward pass.
    The output head gathers its input, keeps it, and scatters the gradient. Latent attention gathers
    its compressed vectors instead of [N, H]; where sequences are longer than an indexer's choice, its
    keys and choices are gathered, too. Linear attention also gathers two numbers for each value head.
    A norm over all queries or all keys all-reduces one fp32 number per token, and its gradient.
    Gradients of parameters that every rank holds are all-reduced in fp32.

    With an adapter, inputs are not gathered again, because frozen weights get no gradient. For the same
    reason the frozen embedding communicates nothing in the backward pass. Layers whose weight rows are
    sharded gather A x and scatter its gradient.
    """
    hidden, mla = shape.hidden, shape.mla
    inputs = (mla.q_rank or hidden) + mla.kv_rank if mla else hidden
    rotary = mla.rope_dim if mla else 0
    attention = len(stage.layers)
    mlps = sum(1 for n in stage.layers if n not in shape.moe_layers or shape.shared_ffn)
    linear = shape.linear
    heads = linear.value_heads * sum(n in linear.layers for n in stage.layers) if linear else 0
    forward = attention * (inputs + rotary + hidden) + mlps * 2 * hidden + 2 * heads
    backward = attention * (2 * inputs + rotary + hidden) + mlps * 3 * hidden + 2 * heads
    ends = ends_back = (stage.has_embedding + stage.has_output) * hidden
    if shape.adapter:
        low = sum(shape.adapter.layers[n].gathered for n in stage.layers)
        backward = low + attention * (inputs + rotary + hidden) + mlps * 2 * hidden + 2 * heads
        forward, ends_back = forward + low, stage.has_output * hidden
    tokens = work.num_micro_batches(dims) * work.packed_tokens(dims) // dims.cp
    unit = ring(dims.tp, tokens * work.weight_bytes)
    if (one := shape.indexer) and work.sequence_len > one.topk:
        forward += attention * (one.head_dim + one.topk * 4 // work.weight_bytes)
    norms = 2 * attention * shape.norms_whole_projections  # of queries and of keys
    squares = norms * 2 * ring(dims.tp, 4 * tokens)
    return Volume(
        "tensor parallel",
        dims.tp,
        dims.tp,
        forward=unit * (forward + ends) + squares,
        backward=unit * (backward + ends_back) + squares,
        recomputed=unit * forward + squares,
        update=2 * ring(dims.tp, 4 * stage.whole),
    )


def logprob_statistics(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> Volume:
    """Return the traffic of computing log-probs over a sharded vocabulary.

    `mrl.kernels.linear_logprob` gathers 4 fp32 numbers per loss token and vocabulary tile. Its backward
    pass communicates nothing. (With `train.logprob_chunk_tokens: 0` it also gathers these numbers for
    prompt tokens, which are not counted here.)
    """
    loss_tokens = work.sequences_per_pack(dims) * work.response_len
    tokens = work.num_micro_batches(dims) * loss_tokens / dims.cp
    num_tiles = shape.vocab // tile_size(shape.vocab // dims.tp, dims.tp)
    total = tokens * num_tiles * 16 * stage.has_output
    return Volume("log-prob statistics", dims.tp, dims.tp, forward=ring(dims.tp, total))


def expert_parallel(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """Return the traffic that moves rows to their experts and back.

    The formulas follow megatron-core's `token_dispatcher.py`; E is the number of experts.

    - The `alltoall` dispatcher sends every row K times, as [n K, H] with fp32 probabilities [n K],
      and gets [n K, H] back; the backward pass sends the same. With expert-tensor parallelism, the
      received rows are gathered over the expert-tensor-parallel ranks, and the outputs are
      scattered in fp32, the dtype of the probabilities. The exchange of token counts, 8 E bytes per
      rank, is not counted.
    - The `allgather` dispatcher gathers the rows of all etp x ep ranks, with fp32 probabilities and one
      byte per expert for the routing map, and scatters the outputs in fp32.
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
    """Return the traffic of context parallelism.

    The keys and values of all N tokens are gathered, and their gradients are scattered. So are the keys
    of indexers, which have no gradients, where sequences are longer than their choice. The output head
    gathers log-probs and entropies, f32 [N, 2], whose gradients need no communication.
    """
    tokens = work.num_micro_batches(dims) * work.packed_tokens(dims)
    total = tokens * shape.kv_width // dims.tp * work.weight_bytes * len(stage.layers)
    sent, span, keys = ring(dims.cp, total), dims.tp * dims.cp, 0.0
    if (one := shape.indexer) and work.sequence_len > one.topk:
        width = one.head_dim * work.weight_bytes * len(stage.layers)
        keys = ring(dims.cp, tokens * width)
    head = ring(dims.cp, tokens * 8 * stage.has_output)
    return [
        Volume("context parallel", dims.cp, span, sent + keys, sent, sent + keys),
        Volume("log-probs of all tokens", dims.cp, span, head),
    ]


def pipeline(shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage) -> Volume:
    """Return the traffic between stages: [n, H] activations and gradients per micro-batch and chunk."""
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
    """Return the traffic of data parallelism.

    Without the distributed optimizer, gradients are all-reduced in fp32 over the ranks that have a
    copy of the parameter. With the distributed optimizer the gradients are reduce-scattered, and
    the new weights are gathered in their own dtype. Megatron chains an optimizer for dense
    parameters and one for experts, and each of these two optimizers gathers all weights of the
    rank. So a rank with experts gathers its weights twice. With Muon, ranks that divide whole
    parameters all-reduce the gradients and broadcast the new weights.

    Routers with a balancing bias also sum the token count of each expert, in fp32, over all ranks of
    the stage.
    """
    gathers = 1 + (stage.expert > 0)
    bytes_each = 4 + gathers * work.weight_bytes if work.divides_ranges else 8
    if work.distributed_optimizer and work.state.muon:
        bytes_each += work.weight_bytes  # the broadcasts of `parallel.optimizer.layer_wise`
    replicas = dims.world // dims.pp
    return [
        Volume(name, copies, replicas, 0.0, update=ring(copies, num_bytes))
        for name, copies, num_bytes in (
            ("data parallel", dims.dp * dims.cp, bytes_each * stage.dense),
            ("expert data parallel", expert_data_parallel(dims), bytes_each * stage.expert),
            ("expert counts", replicas, 2 * router_bias_bytes(shape, stage.layers)),
        )
    ]


def muon_gathers(dims: ParallelDims, work: Workload, stage: Stage) -> list[Volume]:
    """Return the traffic of Muon's orthogonalisations.

    The ranks that split a matrix gather its update in the dtype of the weights. If data-parallel ranks
    divide the matrices, the result is the mean over these ranks.
    """
    if not work.state.muon:
        return []
    shards = shards_of(dims, work.distributed_optimizer)
    dense, expert = (
        work.weight_bytes * sum(p.num for p in stage.trained if p.is_muons and p.sharing == sharing)
        for sharing in ("tensor", "expert")
    )
    return [
        Volume("gather for Muon", dims.tp, dims.tp, 0.0, update=ring(dims.tp, dense) / shards.dense),
        Volume("gather for Muon, experts", dims.etp, dims.etp, 0.0,
               update=ring(dims.etp, expert / dims.ep) / shards.expert),
    ]  # fmt: skip


def expert_adapters(dims: ParallelDims, stage: Stage) -> Volume:
    """Return the traffic of adapter matrices that all expert-tensor-parallel ranks replicate.

    Their gradients are all-reduced in fp32 over these ranks (`parallel.lora.adapted`).
    """
    sent = 2 * ring(dims.etp, 4 * stage.expert_whole)
    return Volume("whole matrices of experts", dims.etp, dims.etp, 0.0, update=sent)


def tied_embedding(shape: ModelShape, dims: ParallelDims, stage: Stage) -> Volume:
    """Return the traffic of a tied embedding.

    Its gradient is summed in fp32 over the first and the last stage. With an adapter there is no
    traffic, because the embedding is frozen.
    """
    both = shape.tied and dims.pp > 1 and (stage.has_embedding or stage.has_output)
    both = both and shape.adapter is None  # it is frozen
    sent = 2 * ring(2, 4 * shape.vocab * shape.hidden / dims.tp) if both else 0.0
    return Volume("tied embedding", 2 if both else 1, dims.world, 0.0, update=sent)


def sync_volumes(
    shape: ModelShape, dims: ParallelDims, work: Workload, stage: Stage
) -> list[Volume]:
    """Return the traffic of the export in a weight sync (`parallel.export`).

    `Volume.update` is the number of bytes that one rank receives per sync. Every rank receives the
    whole model, or only the adapter if `work.lora` is `adapter`. First the ranks of a stage gather the
    stage's parameters; experts are gathered over the expert-parallel ranks and then over the
    expert-tensor-parallel ranks. Then each stage broadcasts its parameters to the other stages.
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
