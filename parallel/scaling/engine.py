"""What SGLang holds: weights, KV cache, CUDA graphs on each GPU, and pinned memory on the host.

t ranks of an engine, of which e share the experts as wholes and the others their columns; d replicas
of the attention (DP attention), each of t / d ranks.
"""

from __future__ import annotations

from parallel.scaling.activations import layer_activation_bytes
from parallel.scaling.engine_adapter import adapter_host_rows, pool_bytes
from parallel.scaling.rows import ASSUMPTION, Row
from parallel.scaling.shape import ModelShape
from parallel.scaling.workload import Workload

PREFILL_TOKENS = 8192
"""SGLang's `chunked_prefill_size` on GPUs of 60 to 160 GB (arg_groups/memory_hook.py)."""
ACTIVATION_MB_PER_TOKEN = 1.5
"""SGLang's own reserve for activations, in MiB per token of a prefill chunk (the same)."""
GRAPH_MB_PER_REQUEST = 2
"""SGLang's own reserve for decode graphs, in MiB per request of the largest one (the same)."""
GRAPH_MB_PER_REPLICA = 3
"""Bytes on top, per request and replica under DP attention (the same)."""
MLA_GRAPH_MB = 1536
"""Bytes on top for latent attention: prefill graphs with FlashAttention 3 (the same)."""


def attention_ranks(work: Workload) -> int:
    """Ranks that share one replica of the attention."""
    return work.engine_tp // work.engine_dp


def engine_weight_bytes(shape: ModelShape, work: Workload) -> int:
    """Count the weights of one rank. Matrices are shared out over the ranks, but for those of
    the attention's replica.

    Above the number of key/value heads, SGLang gives each rank a copy of one (`QKVParallelLinear`).
    Routers and norms are whole on every rank, and so are the down projections of latent attention.
    Under DP attention the embedding is whole, too (`VocabParallelEmbedding(enable_tp=...)`).
    """
    ranks, total = attention_ranks(work), 0
    extra = max(0, ranks - shape.kv_heads) if shape.mla is None else 0
    copies = 2 * shape.head_dim * shape.hidden * shape.num_layers * extra
    for part in shape.parts():
        ways = work.engine_tp
        if part.sharing == "whole":
            ways = 1
        elif part.name == "attention":
            ways = ranks
        elif part.name == "embedding" and work.engine_dp > 1:
            ways = 1
        total += -(-part.num // ways)
    return work.weight_bytes * (total + copies // ranks)


def kv_bytes_per_token(shape: ModelShape, work: Workload) -> int:
    """Count the bytes of one engine rank. Latent attention's compressed keys and values stand on
    every rank."""
    ways = 1 if shape.mla else min(attention_ranks(work), shape.kv_heads)
    return work.weight_bytes * shape.num_layers * shape.kv_cache_width // ways


def kv_capacity_tokens(shape: ModelShape, work: Workload, device_bytes: int) -> int:
    """Tokens of an engine that fit beside its weights and adapters, all replicas of the attention
    together; negative where not even the weights fit."""
    room = int(device_bytes * work.engine_share) - engine_weight_bytes(shape, work)
    room -= pool_bytes(shape, work)
    return room // kv_bytes_per_token(shape, work) * work.engine_dp


def graph_requests(work: Workload) -> int:
    """Requests of the largest decode graph: 256, or 512 for engines of 4 ranks and more."""
    largest = 256 if work.engine_tp < 4 else 512
    return min(largest, work.max_running_requests or largest)


def graph_bytes(shape: ModelShape, work: Workload) -> int:
    """SGLang's own reserve (`reserve_for_graph_mb`): 2 MiB a request, and 3 for each replica."""
    requests = graph_requests(work)
    megabytes = requests * GRAPH_MB_PER_REQUEST + MLA_GRAPH_MB * (shape.mla is not None)
    if work.engine_dp > 1:
        megabytes += requests * work.engine_dp * GRAPH_MB_PER_REPLICA
    return megabytes << 20


def prefill_bytes(shape: ModelShape, work: Workload) -> int:
    """Activations of a chunk of prompts: twice what a layer keeps of it for training, but not more than
    SGLang itself reserves."""
    layer = max(
        layer_activation_bytes(shape, n, PREFILL_TOKENS, work) for n in range(shape.num_layers)
    )
    return min(2 * layer, int(PREFILL_TOKENS * ACTIVATION_MB_PER_TOKEN) << 20)


def engine_rows(
    shape: ModelShape, work: Workload, device_bytes: int, *, awake: bool
) -> tuple[Row, ...]:
    """Rows of one GPU: weights while it is synced, and all of it during the rollout."""
    each = engine_weight_bytes(shape, work)
    replicas = f", {work.engine_dp} replicas of the attention" * (work.engine_dp > 1)
    weights = Row(
        "engine weights",
        each,
        f"{work.weight_bytes} B x {each // work.weight_bytes}, one of {work.engine_tp} ranks{replicas}",
        "parallel.scaling.engine.engine_weight_bytes",
    )
    if not awake:
        return (weights,)
    budget = int(device_bytes * work.engine_share)
    one = kv_bytes_per_token(shape, work)
    least = one * work.sequence_len
    pool = pool_bytes(shape, work)
    cache = max(budget - each - pool, least)
    tokens = cache // one
    routes = PREFILL_TOKENS * work.engine_dp * shape.num_layers * shape.topk * 4
    return (
        weights,
        Row(
            "KV cache",
            cache,
            f"{work.engine_share:g} x {device_bytes} B less the weights{' and adapters' * bool(pool)}: "
            f"{tokens} tokens x {one} B",
            "rollout.mem_fraction_static; sglang kv_cache_configurator.py, _profile_available_bytes",
        ),
        Row(
            "engine activations",
            prefill_bytes(shape, work),
            f"two layers of a prefill chunk of {PREFILL_TOKENS} tokens, at most "
            f"{ACTIVATION_MB_PER_TOKEN} MiB a token",
            f"{ASSUMPTION}: at most sglang's own reserve (memory_hook.py); its flush frees it",
        ),
        Row(
            "engine's captured routes",
            routes if work.routing_replay == "r3" else 0,
            f"4 B x {PREFILL_TOKENS * work.engine_dp} rows x {shape.num_layers} layers x {shape.topk}",
            "sglang state_capturer/base.py, BaseDeviceCache",
        ),
        Row(
            "CUDA graphs",
            graph_bytes(shape, work),
            f"{GRAPH_MB_PER_REQUEST} MiB x {graph_requests(work)} requests, and what DP and latent "
            "attention add",
            f"{ASSUMPTION}: sglang's own reserve (reserve_for_graph_mb)",
        ),
    )


def engine_host_rows(
    shape: ModelShape, work: Workload, world: int, device_bytes: int
) -> tuple[Row, ...]:
    """Host rows of one engine rank; what an engine's leader holds is shared out over its ranks."""
    slots = max(0, kv_capacity_tokens(shape, work, device_bytes)) // work.engine_dp
    slots = max(slots, work.sequence_len)
    each = 4 * shape.num_layers * shape.topk
    return (
        Row(
            "engine: captured routes, pinned",
            slots * each if work.routing_replay == "r3" else 0,
            f"4 B x {shape.num_layers} layers x {shape.topk} experts x {slots} slots of the KV cache",
            "sglang state_capturer/base.py, BaseHostCache (HostTensorAllocator: not rounded)",
        ),
        Row(
            "engine: routes on their way",
            work.num_tokens // world * each // (4 if shape.num_experts <= 256 else 1)
            if work.routing_replay == "r3"
            else 0,
            f"ids of {work.num_tokens // world} tokens x {shape.num_layers} layers x {shape.topk}",
            "mrl.rollout.sglang.route_memory: a byte an id below 257 experts, until the trainer has "
            "read them",
        ),
        Row(
            "engine: process",
            6 << 30,
            "libraries, tokenizer, queues",
            f"{ASSUMPTION}: scheduler, detokenizer and HTTP server of one rank",
        ),
        Row(
            "engine: CUDA graphs, pinned",
            0 if work.rollout_ranks else graph_bytes(shape, work),
            "as many bytes as on the GPU, kept from the first sleep on",
            "sglang full_cuda_graph_backend.py (enable_cpu_backup); TMS_RETAIN_CPU_BACKUP",
        ),
        *adapter_host_rows(shape, work, engine_weight_bytes(shape, work)),
    )
