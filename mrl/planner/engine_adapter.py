"""Memory of SGLang for LoRA: a pool of adapter slots on each GPU, and copies on the host.

The pool is counted as SGLang allocates it (`lora/mem_pool.py`, `LoRAMemoryPool`). A slot has room for A
and B of every target module in every layer, at the largest rank; query, key and value count as one
module, and so do gate and up. The pool stays allocated while the engine sleeps.
"""

from __future__ import annotations

from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload

MLP_MODULES = {"gate_proj", "up_proj", "down_proj"}


def slot_elements(shape: ModelShape, work: Workload) -> int:
    """Return how many elements an adapter slot has on one rank; 0 if the engine serves no adapter."""
    if shape.adapter is None or work.lora != "adapter":
        return 0
    adapter = shape.adapter.adapter
    names, total = set(adapter.modules), 0
    for number in range(shape.num_layers):
        total += _attention(shape, work, names)
        if names & MLP_MODULES or adapter.experts != "none":
            # SGLang distinguishes the modules of an MLP from those of experts only by their position in
            # the model, so it allocates both in every layer.
            if shape.shared_ffn or not shape.num_experts:
                total += _mlp(shape, work, number)
            if shape.num_experts:
                total += _experts(shape, work, is_shared=adapter.experts == "shared_outer")
    return adapter.rank * total


def _attention(shape: ModelShape, work: Workload, names: set[str]) -> int:
    """Return how many elements of a slot a layer's attention needs, per unit of the adapter's rank."""
    ranks, hidden, mla = work.attention_ranks, shape.hidden, shape.mla
    total = 0
    if "o_proj" in names:
        total += shape.value_width // ranks + hidden
    if mla is None:
        if names & {"q_proj", "k_proj", "v_proj"}:
            heads = max(1, shape.kv_heads // ranks)
            total += 3 * hidden + shape.query_width // ranks + 2 * heads * shape.head_dim
        return total
    if names & {"q_a_proj", "kv_a_proj_with_mqa"}:
        total += 2 * hidden + mla.q_rank + mla.kv_rank + mla.rope_dim
    if "q_proj" in names and not mla.q_rank:
        total += hidden + shape.query_width // ranks
    if "q_b_proj" in names:
        total += mla.q_rank + shape.query_width // ranks
    if "kv_b_proj" in names:
        expanded = shape.heads * (mla.nope_dim + mla.value_dim)
        total += mla.kv_rank + expanded // ranks
    return total


def _mlp(shape: ModelShape, work: Workload, number: int) -> int:
    """Return how many elements of a slot a dense MLP or shared expert needs, per unit of the
    adapter's rank."""
    columns = shape.shared_ffn if number in shape.moe_layers else shape.dense_ffn
    return 3 * shape.hidden + 3 * (columns // work.engine_tp)


def _experts(shape: ModelShape, work: Workload, *, is_shared: bool) -> int:
    """Return how many elements of a slot a layer's experts need, per unit of the adapter's rank.

    `is_shared`: whether the experts share their outer matrices: A of gate and up, and B of down.
    """
    experts = shape.num_experts // work.engine_ep
    columns = shape.moe_ffn * work.engine_ep // work.engine_tp
    return 3 * shape.hidden * (1 if is_shared else experts) + 3 * columns * experts


def pool_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of all adapter slots on one rank of an engine."""
    return work.adapter_slots * work.weight_bytes * slot_elements(shape, work)


def adapter_pool_rows(shape: ModelShape, work: Workload) -> tuple[Row, ...]:
    """Return the row of the adapter slots on one GPU. It is the same in every phase of a step."""
    return (
        Row(
            "engine's adapter slots",
            pool_bytes(shape, work),
            f"{work.adapter_slots} slots x {work.weight_bytes} B x {slot_elements(shape, work)}",
            "sglang lora/mem_pool.py, LoRAMemoryPool.init_buffers; stays while the engine sleeps",
        ),
    )


def adapter_host_rows(
    shape: ModelShape, work: Workload, engine_weight_bytes: int
) -> tuple[Row, ...]:
    """Return the host-memory rows that LoRA adds to one engine rank; none if it serves no adapter.

    `engine_weight_bytes` is the size of the base model's weights on the rank.
    """
    if shape.adapter is None or work.lora != "adapter":
        return ()
    each = work.sent_bytes(shape)
    sleeps = not work.rollout_ranks
    return (
        Row(
            "engine: copy of the base, pinned",
            engine_weight_bytes * sleeps,
            "the engine's weights, kept after the first sleep of level 1",
            "sglang load_model_utils.py (enable_cpu_backup); TMS_RETAIN_CPU_BACKUP",
        ),
        Row(
            "engine: adapters",
            work.adapter_slots * each,
            f"{work.adapter_slots} x {each} B: every rank keeps whole adapters",
            f"{ASSUMPTION}: as many adapters as slots; sglang lora/lora.py",
        ),
    )
