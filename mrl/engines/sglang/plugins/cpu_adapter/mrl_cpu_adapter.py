"""SGLang plugin: LoRA adapters without CUDA. Only engines that serve adapters on CPUs have it on their
path.

1. SGLang puts small tensors that describe batches and layers into pinned memory, which needs CUDA. Here
   the two functions that do so use ordinary memory.
2. SGLang computes experts with adapters (srt/lora/lora_moe_runners.py), and the table with the slot of
   each token, in Triton kernels. Here both are computed in torch.
3. On CPUs SGLang pads the intermediate size of an expert, so that each rank's part is a multiple of
the kernel's block size. It cuts adapters into parts without this padding. Here adapters are padded
first.
4. Under `rollout.batch_invariant` (with the plugin mrl_on_policy on the path) products and activation
   are those of mrl.kernels.invariant. What an adapter adds to a token then depends neither on the other
   tokens of the batch nor on the ranks of other adapters, because only the rows and columns up to the
   adapter's own rank r are read.

Dimensions: n tokens, K experts per token, E experts of this process, S slots of adapters, H hidden
size, I intermediate size of an expert, r rank of an adapter.
"""

from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mrl.engines.sglang.compat import hook, take

linear, silu = F.linear, F.silu


def register():
    global linear, silu
    hook("LoRAManager.init_state", without_pinning, "AROUND")
    hook("LoRAManager.prepare_lora_batch", without_pinning, "AROUND")
    hook("_compute_moe_lora_info", slots_of_tokens, "REPLACE")
    hook("FusedMoEWithLoRA._forward_with_lora", run_layer, "REPLACE")
    hook("slice_moe_lora_a_weights", with_padded_inputs, "AROUND")
    hook("slice_moe_lora_b_weights", with_padded_outputs, "AROUND")
    if find_spec("mrl_on_policy") is not None:
        from mrl.kernels import invariant

        linear, silu = invariant.linear, invariant.silu
        hook("sgemm_lora_a_fwd", multiply_a, "REPLACE")
        hook("sgemm_lora_b_fwd", multiply_b, "REPLACE")


class Unpinned(TorchFunctionMode):
    """Replaces pinned memory by ordinary memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **options)


def without_pinning(original, *args, **options):
    with Unpinned():
        return original(*args, **options)


def slots_of_tokens(num_tokens, starts, ranks, slots, *buffers, max_len, bucket_len=None):
    """Return two tensors: i32[S], which is 1 for each slot whose adapter is used and otherwise 0, and
    i32[n], the slot of each token (-1 for tokens after the last segment).

    A segment is a run of consecutive tokens with the same adapter: `starts` has the first token of each
    segment, `slots` the slot of its adapter, and `ranks` the rank of the adapter in each slot. SGLang
    also has a version in torch, but runs it only after an assertion about the kernel's grid, which
    fails if a segment has several requests.
    """
    slots = slots.long()
    enabled = torch.zeros(len(ranks), dtype=torch.int32)
    enabled[slots] = (ranks[slots] > 0).int()
    of_tokens = torch.full((num_tokens,), -1, dtype=torch.int32)
    found = torch.repeat_interleave(slots.int(), starts.diff().long())
    of_tokens[: len(found)] = found
    return enabled, of_tokens


def num_padded(layer, size):
    """Return by how much to pad an expert's intermediate size `size`: the padded size, summed over the
    tensor-parallel ranks, minus `size`."""
    return layer.tp_size * layer.intermediate_size_per_partition - size


def with_padded_inputs(original, layer, a, tp_rank, target_module):
    """Pad every A of the down projection [..., r, I] before it is cut for a process. `a` is a
    matrix or a dict of matrices."""
    if target_module == "down_proj_moe":
        a = each(a, lambda one: F.pad(one, (0, num_padded(layer, one.shape[-1]))))
    return original(layer, a, tp_rank, target_module)


def with_padded_outputs(original, layer, b, tp_rank, target_module):
    """Pad every B of the gate and up projections [..., 2 * I, r] before it is cut for a process.
    `b` is a matrix or a dict of matrices."""

    def padded(one):
        parts = one.chunk(2, -2)
        return torch.cat(
            [F.pad(part, (0, 0, 0, num_padded(layer, part.shape[-2]))) for part in parts], -2
        )

    if target_module == "gate_up_proj_moe":
        b = each(b, padded)
    return original(layer, b, tp_rank, target_module)


def each(matrices, change):
    """Apply `change` to a matrix, or to every matrix of a dict, and return the result."""
    if isinstance(matrices, dict):
        return {number: change(matrix) for number, matrix in matrices.items()}
    return change(matrices)


def run_layer(layer, hidden_states, topk_output, info, **options):
    """Replace FusedMoEWithLoRA._forward_with_lora. Batches without adapters go to the base layer."""
    base = layer.base_layer
    if not info.has_active_lora:
        return base(hidden_states, topk_output, **options)
    config = base.moe_runner_config
    biased = getattr(base, "w13_weight_bias", None) is not None
    if config.activation != "silu" or config.gemm1_alpha is not None or biased:
        raise NotImplementedError(
            "adapters of experts on a CPU: expected SwiGLU experts without biases; set "
            "lora.rollout=merged or lora.experts=none"
        )
    given = base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    weights, ids, _ = given.topk_output
    out = run_experts(given.hidden_states, ids, weights, base.w13_weight, base.w2_weight, info)
    return base.dispatcher.combine(combine_input=take("StandardCombineInput")(hidden_states=out))


def run_experts(x, ids, weights, w13, w2, info):
    """Return the output [n, H] of this process's experts for x [n, H], ids [n, K] (-1 is an expert of
    another process) and weights [n, K]. Weighting and summing are in the order of Megatron and
    mrl_on_policy."""
    slots, ranks = info.token_lora_mapping.long(), info.lora_ranks.tolist()
    up_a, up_b = info.gate_up_lora_a_weights, info.gate_up_lora_b_weights
    down_a, down_b = info.down_lora_a_weights, info.down_lora_b_weights
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        rows, places = (ids == expert).nonzero(as_tuple=True)
        own, of_own = x[rows], slots[rows]
        both = linear(own, w13[expert]) + update(own, of_own, ranks, up_a, up_b, expert)
        gate, up = both.chunk(2, -1)
        inner = silu(gate) * up * weights[rows, places, None].to(x.dtype)
        out[rows] += linear(inner, w2[expert]) + update(
            inner, of_own, ranks, down_a, down_b, expert
        )
    return out


def update(x, slots, ranks, a, b, expert):
    """Return B A x for x [n, inputs], with the adapter in each token's slot (-1 is none).

    `a` [S, E or 1, parts * r, inputs] and `b` [S, E or 1, outputs, r] consist of `parts` matrices of
    equal size. If the second dimension is 1, all experts share the matrices. An adapter uses
    `ranks[slot]` of the r rows; a slot without adapter has rank 0. `b` includes the scale.
    """
    a, b = (each[:, expert if each.shape[1] > 1 else 0] for each in (a, b))
    out = x.new_zeros(len(x), b.shape[1])
    num_parts = a.shape[1] // b.shape[2]
    for slot in slots.unique().tolist():
        if slot < 0 or not ranks[slot]:
            continue
        rows, rank = slots == slot, ranks[slot]
        parts = zip(a[slot].chunk(num_parts), b[slot].chunk(num_parts), strict=True)
        out[rows] = torch.cat(
            [linear(linear(x[rows], part_a[:rank]), part_b[:, :rank]) for part_a, part_b in parts],
            -1,
        )
    return out


def multiply_a(inputs, weights, batch_info, num_slices=1):
    """Return A x, times the adapter's scale, for x [n, inputs]. A is [slices * r, inputs] and comes
    from each token's slot. It has one slice for each of the projections that SGLang fuses, such as
    q, k and v. The result fills the first slices * r columns of [n, slices * R], where R is the
    largest rank."""
    out = inputs.new_zeros(len(inputs), weights.shape[1])
    for rows, slot, rank in segments(batch_info):
        product = linear(inputs[rows], weights[slot, : num_slices * rank])
        out[rows, : num_slices * rank] = product * batch_info.scalings_cpu[slot]
    return out


def multiply_b(inputs, weights, batch_info, slice_offsets, base_output=None):
    """Add B y to the base layer's output [n, outputs] in place, and return it. `inputs` is y [n,
    slices * R] from `multiply_a`. Slice i is added to the columns from `slice_offsets[i]` to
    `slice_offsets[i + 1]`."""
    offsets = slice_offsets.tolist()
    if base_output is None:
        base_output = inputs.new_zeros(len(inputs), offsets[-1])
    for rows, slot, rank in segments(batch_info):
        for number, (start, end) in enumerate(pairwise(offsets)):
            part = inputs[rows, number * rank : (number + 1) * rank]
            base_output[rows, start:end] += linear(part, weights[slot, start:end, :rank])
    return base_output


def segments(batch_info):
    """Yield (slice of tokens, slot, rank) for each segment of tokens with the same adapter. Empty
    segments and those without adapter are left out."""
    start = 0
    for slot, length in zip(
        batch_info.weight_indices_cpu.tolist(), batch_info.seg_lens_cpu.tolist(), strict=True
    ):
        rank = int(batch_info.lora_ranks_cpu[slot])
        if length and rank:
            yield slice(start, start + length), slot, rank
        start += length
