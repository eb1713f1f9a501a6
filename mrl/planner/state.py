"""The memory of gradients and optimizer state under Megatron's options.

P is the number of parameters whose weights a rank holds, and S the number of parameters whose optimizer
state it keeps. Without the distributed optimizer, S equals P. With it (ZeRO stage 1, arXiv 1910.02054),
S is P divided by the number of shards of each parameter's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mrl.planner.rows import Row
from mrl.planner.stages import Stage, expert_data_parallel, is_expert, local_tensors
from parallel.dims import ParallelDims
from parallel.owners import assign, num_states

ADAM_MOMENTS = 2
DTYPE_BYTES = {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2, "uint8": 1,
               "fp8": 1}  # fmt: skip


@dataclass(frozen=True)
class StateOptions:
    """Megatron's options that determine the bytes per element of gradients and optimizer state."""

    gradient_bytes: int = 4
    """Bytes of an element of DDP's gradient buffers: 4, or the size of a weight with
    `grad_reduce_in_fp32: false`."""
    precision_aware: bool = False
    """Whether TransformerEngine's Adam keeps the main parameters (`use_precision_aware_optimizer`).
    Offloaded main parameters are on the host."""
    main_bytes: int = 4
    """Bytes of the main parameter of a bf16 weight: the size of `main_params_dtype`, or 2 with
    `store_param_remainders`. `store_param_remainders` stores only the lower 2 bytes, because the
    bf16 weight is the upper half of the fp32 main parameter."""
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    offload_fraction: float = 0.0
    """`optimizer_offload_fraction` with `optimizer_cpu_offload`: the share of the elements whose state
    stays on the host, where Adam runs on the CPU."""
    muon: bool = False
    """Whether Muon updates the matrices of the layers, with one fp32 momentum instead of Adam's two
    moments (`optimizer.name: muon`)."""

    @property
    def small_state(self) -> int:
        """How many of an element's three states have fewer than 4 bytes; 0 if not `precision_aware`.

        The states are the main parameter and the two moments. TransformerEngine converts each of
        them to fp32 for the update.
        """
        parts = (self.main_bytes, self.exp_avg_bytes, self.exp_avg_sq_bytes)
        return sum(1 for part in parts if part < 4) if self.precision_aware else 0


def read_state(
    megatron: Mapping[str, Any], weight_bytes: int, *, muon: bool = False
) -> StateOptions:
    """Read the options of a recipe's `megatron:` section; absent keys have Megatron's defaults."""
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
        muon=muon,
    )


def dtype_bytes(name: Any) -> int:
    """Return the bytes of an element of a dtype. `name` is a torch.dtype, or a name such as `bf16`
    or `torch.bfloat16`."""
    return DTYPE_BYTES[str(name).rpartition(".")[2]]


class Shard(NamedTuple):
    """Numbers for a stage's dense parameters and for the parameters of its experts."""

    dense: int
    expert: int
    muon: int = 0
    """How many elements of both have a momentum instead of two moments."""

    @property
    def num(self) -> int:
        return self.dense + self.expert


class Ways(NamedTuple):
    """Over how many ranks the state of a dense parameter and of an expert's parameter is sharded."""

    dense: int
    expert: int


def shards_of(dims: ParallelDims, distributed: bool) -> Ways:
    """Return the number of ranks over which the optimizer state of one parameter is sharded.

    The two numbers are for a dense parameter and for a parameter of an expert: dp x cp and world /
    (etp ep pp) with the distributed optimizer (`distributed`). Otherwise every rank keeps the whole
    state of its parameters, and both are 1.
    """
    return Ways(dims.dp * dims.cp, expert_data_parallel(dims)) if distributed else Ways(1, 1)


def optimizer_shard(
    stage: Stage,
    dims: ParallelDims,
    distributed: bool,
    weight_bytes: int = 2,
    *,
    muon: bool = False,
) -> Shard:
    """Return the number of elements whose optimizer state one rank of the stage keeps.

    With Muon, a rank keeps the state of whole parameters. The result is then for a rank that has both
    the largest share of the dense parameters and the largest share of the experts'.
    """
    if muon:
        kept = kept_tensors(stage, dims, distributed, weight_bytes)
        dense, experts = (sum(n for n, _ in tensors) for tensors in kept)
        return Shard(
            dense, experts, sum(n for tensors in kept for n, is_muons in tensors if is_muons)
        )
    shards = shards_of(dims, distributed)
    return Shard(-(-stage.dense // shards.dense), -(-stage.expert // shards.expert))


def kept_tensors(
    stage: Stage, dims: ParallelDims, distributed: bool, weight_bytes: int
) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]]]:
    """Return the (dense, experts') parameters whose state a rank keeps with Muon, each as (number of
    elements, whether it is Muon's): those of the rank with the most state of dense parameters, and
    those of the rank with the most state of experts."""
    shards = shards_of(dims, distributed)
    dense, experts = (
        _largest_share(
            [
                (numel, part.is_muons)
                for part in stage.trained
                if is_expert(part) == of_experts
                for count, numel in local_tensors(part, dims)
                for _ in range(count)
            ],
            ways,
            has_main=weight_bytes < 4,
        )
        for ways, of_experts in ((shards.dense, False), (shards.expert, True))
    )
    return dense, experts


def _largest_share(
    items: list[tuple[int, bool]], ways: int, *, has_main: bool
) -> list[tuple[int, bool]]:
    """Return the items of the rank with the most state, if `ways` ranks divide them as
    `parallel.optimizer.layer_wise` does."""
    costs = [n * num_states(is_muons=is_muons, has_main=has_main) for n, is_muons in items]
    sums, shares = [0] * ways, [[] for _ in range(ways)]
    for item, cost, rank in zip(items, costs, assign(costs, ways), strict=True):
        sums[rank] += cost
        shares[rank].append(item)
    return shares[sums.index(max(sums))]


def device_bytes_each(options: StateOptions, weight_bytes: int) -> float:
    """Return the bytes of optimizer state that a rank keeps on the device per element of its shard."""
    kept = 1 - options.offload_fraction
    has_main = weight_bytes < 4
    if not options.precision_aware:
        # With offload, the main parameters also stay on the GPU; the host has a second copy.
        return 4 * has_main + 4 * ADAM_MOMENTS * kept
    if options.offload_fraction:
        # The part of the optimizer on the GPU also keeps an fp32 copy of its gradients.
        return (4 * has_main + 4 * ADAM_MOMENTS + 4) * kept
    return options.main_bytes * has_main + options.exp_avg_bytes + options.exp_avg_sq_bytes


def host_bytes_each(options: StateOptions) -> tuple[int, int]:
    """Return the (pinned, not pinned) bytes that each element with offloaded state takes on the host.

    Gradients are pinned. Main parameters are pinned too, unless the precision-aware optimizer creates
    them from the weights (megatron-core's `hybrid_optimizer.py`, `_get_sub_optimizer_param_groups`).
    """
    moments = 4 * ADAM_MOMENTS
    return (4, 4 + moments) if options.precision_aware else (8, moments)


def optimizer_row(shard: Shard, options: StateOptions, weight_bytes: int) -> Row:
    """Return the row of the optimizer state that stays on the device between updates."""
    each = device_bytes_each(options, weight_bytes)
    less = f", less 4 B x {shard.muon} that have a momentum only" if shard.muon else ""
    return Row(
        "optimizer",
        int(each * shard.num) - 4 * shard.muon,
        f"{each:g} B x {shard.num} elements whose state this rank keeps{less}",
        "mrl.planner.state.device_bytes_each; counted in tests/planner",
        managed=True,
    )


def step_rows(shard: Shard, options: StateOptions, weight_bytes: int) -> list[Row]:
    """Return the rows of temporary memory that the optimizer's update needs."""
    rows = []
    if options.gradient_bytes < 4 and not options.precision_aware:
        rows.append(
            Row(
                "gradients in fp32 for the update",
                4 * shard.num,
                f"4 B x {shard.num}: half-precision gradients are converted to fp32",
                "megatron-core distrib_optimizer.py, _copy_model_grads_to_main_grads",
                managed=True,
            )
        )
    if options.small_state and not options.offload_fraction and weight_bytes < 4:
        rows.append(
            Row(
                "state in fp32 for the update",
                4 * options.small_state * max(shard.dense, shard.expert),
                f"{options.small_state} x 4 B x {max(shard.dense, shard.expert)}: state below fp32 is "
                "converted to fp32",
                "TransformerEngine optimizers/fused_adam.py, FusedAdam.step",
                managed=True,
            )
        )
    return rows
