"""What training keeps of every parameter, by Megatron's options: gradients, main parameters, moments.

P: parameters whose weights a rank holds. S: those of them whose optimizer state it keeps; all of P, or
with the distributed optimizer its share of each parameter's copies (ZeRO stage 1, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel.dims import ParallelDims
from parallel.scaling.rows import Row
from parallel.scaling.stages import Stage, expert_data_parallel

ADAM_MOMENTS = 2
DTYPE_BYTES = {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2, "uint8": 1,
               "fp8": 1}  # fmt: skip


@dataclass(frozen=True)
class StateOptions:
    """Megatron's options that change the bytes of gradients and optimizer, as bytes per element."""

    gradient_bytes: int = 4
    """Bytes of an element of DDP's buffers: 4, or the weights' own size with
    `grad_reduce_in_fp32: false`."""
    precision_aware: bool = False
    """`use_precision_aware_optimizer`: TransformerEngine's Adam keeps the main parameters, or, with
    offload, the host does."""
    main_bytes: int = 4
    """Bytes of a main parameter beside a bf16 weight: `main_params_dtype`, and 2 with
    `store_param_remainders`, where the weight itself is the upper half."""
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    offload_fraction: float = 0.0
    """`optimizer_offload_fraction` with `optimizer_cpu_offload`: share of the elements whose state is
    on the host for good, where Adam runs on the CPU."""
    foreach: bool = False
    """torch's AdamW by lists of tensors, which makes one more fp32 copy; mrl runs it fused."""

    @property
    def small_state(self) -> int:
        """Parts of the state in less than fp32: TransformerEngine widens each for its step."""
        parts = (self.main_bytes, self.exp_avg_bytes, self.exp_avg_sq_bytes)
        return sum(1 for part in parts if part < 4) if self.precision_aware else 0


def read_state(megatron: Mapping[str, Any], weight_bytes: int) -> StateOptions:
    """The options of a recipe's `megatron:` section; keys that are absent have Megatron's defaults."""
    aware = bool(megatron.get("use_precision_aware_optimizer", False))
    offload = bool(megatron.get("optimizer_cpu_offload", False))
    main = dtype_bytes(megatron.get("main_params_dtype", "float32"))
    if aware and not offload and main == 4 and megatron.get("store_param_remainders", True):
        main = 2
    return StateOptions(
        gradient_bytes=4 if megatron.get("grad_reduce_in_fp32", True) else weight_bytes,
        precision_aware=aware,
        main_bytes=main,
        exp_avg_bytes=dtype_bytes(megatron.get("exp_avg_dtype", "float32")),
        exp_avg_sq_bytes=dtype_bytes(megatron.get("exp_avg_sq_dtype", "float32")),
        offload_fraction=float(megatron.get("optimizer_offload_fraction", 0.0)) * offload,
    )


def dtype_bytes(name: Any) -> int:
    """Return the bytes of a dtype as a recipe writes it: `bfloat16`, `bf16`, `torch.bfloat16`,
    or torch's own."""
    return DTYPE_BYTES[str(name).rpartition(".")[2]]


class Shard(NamedTuple):
    """Elements whose optimizer state one rank keeps: dense parameters, experts."""

    dense: int
    expert: int

    @property
    def num(self) -> int:
        return self.dense + self.expert


def copies_of(dims: ParallelDims, distributed: bool) -> Shard:
    """Ranks that share the state of one parameter: dp x cp of a dense one, world / (etp ep pp) of an
    expert; 1 without the distributed optimizer."""
    return Shard(dims.dp * dims.cp, expert_data_parallel(dims)) if distributed else Shard(1, 1)


def optimizer_shard(stage: Stage, dims: ParallelDims, distributed: bool) -> Shard:
    copies = copies_of(dims, distributed)
    return Shard(-(-stage.dense // copies.dense), -(-stage.expert // copies.expert))


def device_bytes_each(options: StateOptions, weight_bytes: int) -> float:
    """Count bytes of optimizer state on the device per element of the shard."""
    kept = 1 - options.offload_fraction
    has_main = weight_bytes < 4
    if not options.precision_aware:
        # The main parameters stay on the GPU, and the host has another copy.
        return 4 * has_main + 4 * ADAM_MOMENTS * kept
    if options.offload_fraction:
        # The optimizer on the GPU also keeps an fp32 copy of its gradients.
        return (4 * has_main + 4 * ADAM_MOMENTS + 4) * kept
    return options.main_bytes * has_main + options.exp_avg_bytes + options.exp_avg_sq_bytes


def host_bytes_each(options: StateOptions) -> tuple[int, int]:
    """Count (pinned, not pinned) bytes on the host per offloaded element.

    Gradients are pinned. Main parameters are pinned too, unless the precision-aware optimizer makes
    them from the weights (megatron-core's `hybrid_optimizer.py`, `_get_sub_optimizer_param_groups`).
    """
    moments = 4 * ADAM_MOMENTS
    return (4, 4 + moments) if options.precision_aware else (8, moments)


def optimizer_row(shard: Shard, options: StateOptions, weight_bytes: int) -> Row:
    """What stays on the device between steps."""
    each = device_bytes_each(options, weight_bytes)
    return Row(
        "optimizer",
        int(each * shard.num),
        f"{each:g} B x {shard.num} elements whose state this rank keeps",
        "parallel.scaling.state.device_bytes_each; counted in tests/parallel/scaling",
        managed=True,
    )


def step_rows(shard: Shard, options: StateOptions, weight_bytes: int) -> list[Row]:
    """What the update adds while it runs."""
    rows = []
    if options.gradient_bytes < 4 and not options.precision_aware:
        rows.append(
            Row(
                "gradients in fp32 for the update",
                4 * shard.num,
                f"4 B x {shard.num}: half-precision gradients are widened",
                "megatron-core distrib_optimizer.py, _copy_model_grads_to_main_grads",
                managed=True,
            )
        )
    if options.foreach:
        largest = max(shard)
        rows.append(
            Row(
                "AdamW's copy (foreach)",
                4 * largest,
                f"4 B x {largest}: the square roots of one optimizer's second moments",
                "torch optim/adamw.py, _multi_tensor_adamw",
                managed=True,
            )
        )
    if options.small_state and not options.offload_fraction and weight_bytes < 4:
        rows.append(
            Row(
                "state in fp32 for the update",
                4 * options.small_state * max(shard),
                f"{options.small_state} x 4 B x {max(shard)}: state below fp32 is widened",
                "TransformerEngine optimizers/fused_adam.py, FusedAdam.step",
                managed=True,
            )
        )
    return rows
