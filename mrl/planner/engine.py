"""Memory of SGLang: weights, KV cache and CUDA graphs on each GPU, and pinned memory on the host.

An engine has t ranks. Its experts are distributed over e groups of ranks, and each expert's columns are
split over the t / e ranks of a group. With DP attention there are d replicas of the attention, each on
t / d ranks.
"""

from __future__ import annotations

from mrl.planner.activations import layer_activation_bytes
from mrl.planner.engine_adapter import adapter_host_rows, pool_bytes
from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload, quantized_bytes

PREFILL_TOKENS = 8192
"""SGLang's `chunked_prefill_size` on GPUs of 60 to 160 GB (arg_groups/memory_hook.py)."""
ACTIVATION_MB_PER_TOKEN = 1.5
"""MiB that SGLang reserves for activations per token of a prefill chunk (memory_hook.py)."""
GRAPH_MB_PER_REQUEST = 2
"""MiB that SGLang reserves for the CUDA graphs of decoding, per request in the batch of the largest
graph (memory_hook.py)."""
GRAPH_MB_PER_REPLICA = 3
"""Additional MiB for CUDA graphs under DP attention, per request and replica of the attention
(memory_hook.py)."""
MLA_GRAPH_MB = 1536
"""Additional MiB for the CUDA graphs of prefill, if the model has latent attention and SGLang uses
FlashAttention 3 (memory_hook.py)."""


def engine_weight_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of the weights on one rank of an engine.

    The attention's matrices are sharded over the ranks of its replica, all other matrices over all
    ranks. If a replica has more ranks than key/value heads, several ranks have a copy of the same head
    (`QKVParallelLinear`). Every rank has all routers, all norms, the down projections of latent
    attention and, under DP attention, the whole embedding (`VocabParallelEmbedding(enable_tp=...)`).
    """
    ranks, total, quantized = work.attention_ranks, 0, 0
    extra = max(0, ranks - shape.kv_heads) if shape.mla is None else 0
    copies = 2 * shape.head_dim * shape.hidden * len(shape.full_layers) * extra
    for part in shape.parts():
        ways = work.engine_tp
        if part.sharing == "whole":
            ways = 1
        elif part.name == "attention":
            ways = ranks
        elif part.name == "embedding" and work.engine_dp > 1:
            ways = 1
        if work.quantized and part.sharing != "whole" and part.name not in ("embedding", "output"):
            quantized += -(-part.num // ways)
        else:
            total += -(-part.num // ways)
    if work.quantized:
        return work.weight_bytes * total + quantized_bytes(quantized + copies // ranks)
    return work.weight_bytes * (total + copies // ranks)


def _weights_in_words(num_bytes: int, work: Workload) -> str:
    if work.quantized:
        return f"{num_bytes} B, with quantised matrices"
    return f"{work.weight_bytes} B x {num_bytes // work.weight_bytes}"


def kv_bytes_per_token(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of KV cache per token on one engine rank.

    With latent attention, every rank caches all compressed keys and values. Layers with linear
    attention cache none; their states, one for each request, are not counted. The keys of indexers are
    fp8 with scales.
    """
    ways = 1 if shape.mla else min(work.attention_ranks, shape.kv_heads)
    keys = shape.indexer.cached_bytes * shape.num_layers if shape.indexer else 0
    return work.weight_bytes * len(shape.full_layers) * shape.kv_cache_width // ways + keys


def kv_capacity_tokens(shape: ModelShape, work: Workload, device_bytes: int) -> int:
    """Return how many tokens fit into the KV caches of all attention replicas of an engine together.

    The result is negative if not even weights and adapters fit.
    """
    room = int(device_bytes * work.engine_share) - engine_weight_bytes(shape, work)
    room -= pool_bytes(shape, work)
    return room // kv_bytes_per_token(shape, work) * work.engine_dp


def graph_requests(work: Workload) -> int:
    """Return the batch size, in requests, of the largest CUDA graph for decoding.

    It is 256 (512 if the engine has 4 or more ranks), or `max_running_requests` if that is smaller.
    """
    largest = 256 if work.engine_tp < 4 else 512
    return min(largest, work.max_running_requests or largest)


def graph_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes that SGLang reserves for CUDA graphs (`reserve_for_graph_mb`)."""
    requests = graph_requests(work)
    megabytes = requests * GRAPH_MB_PER_REQUEST + MLA_GRAPH_MB * (shape.mla is not None)
    if work.engine_dp > 1:
        megabytes += requests * work.engine_dp * GRAPH_MB_PER_REPLICA
    return megabytes << 20


def prefill_bytes(shape: ModelShape, work: Workload) -> int:
    """Estimate the bytes of activations for a prefill chunk.

    The estimate is twice the bytes that the largest layer keeps for training, but at most the bytes
    that SGLang itself reserves.
    """
    layer = max(
        layer_activation_bytes(shape, n, PREFILL_TOKENS, work) for n in range(shape.num_layers)
    )
    return min(2 * layer, int(PREFILL_TOKENS * ACTIVATION_MB_PER_TOKEN) << 20)


def engine_rows(
    shape: ModelShape, work: Workload, device_bytes: int, *, awake: bool
) -> tuple[Row, ...]:
    """Return the engine's memory-plan rows on one GPU.

    If the engine is not `awake`, there is only the row of its weights.
    """
    each = engine_weight_bytes(shape, work)
    replicas = f", {work.engine_dp} replicas of the attention" * (work.engine_dp > 1)
    weights = Row(
        "engine weights",
        each,
        f"{_weights_in_words(each, work)}, one of {work.engine_tp} ranks{replicas}",
        "mrl.planner.engine.engine_weight_bytes",
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
            f"{ASSUMPTION}: at most sglang's own reserve (memory_hook.py); flushing its cache frees it",
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
            f"{GRAPH_MB_PER_REQUEST} MiB x {graph_requests(work)} requests, and more for DP or latent "
            "attention",
            f"{ASSUMPTION}: sglang's own reserve (reserve_for_graph_mb)",
        ),
    )


def engine_host_rows(
    shape: ModelShape, work: Workload, world: int, device_bytes: int
) -> tuple[Row, ...]:
    """Return the host-memory rows of one engine rank.

    `world` is the number of ranks that run engines. Memory that only the first rank of an engine
    allocates is divided equally among the engine's ranks.
    """
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
            "engine: routes not yet read",
            work.num_tokens // world * each // (4 if shape.num_experts <= 256 else 1)
            if work.routing_replay == "r3"
            else 0,
            f"ids of {work.num_tokens // world} tokens x {shape.num_layers} layers x {shape.topk}",
            "mrl.engines.sglang.route_memory: one byte per id up to 256 experts, until the trainer has "
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
            "as many bytes as on the GPU, kept after the first sleep",
            "sglang full_cuda_graph_backend.py (enable_cpu_backup); TMS_RETAIN_CPU_BACKUP",
        ),
        *adapter_host_rows(shape, work, engine_weight_bytes(shape, work)),
    )
