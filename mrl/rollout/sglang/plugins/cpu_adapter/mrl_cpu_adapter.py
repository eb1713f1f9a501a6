"""SGLang plugin: LoRA adapters without CUDA; on the path only of engines that serve one on CPUs.

1. SGLang lays the numbers of a batch, and those of layers, into pinned memory, which needs CUDA. Here
   that memory is the usual one, inside the two functions that ask for it.
2. Experts with adapters are triton kernels (srt/lora/lora_moe_runners.py), and so is the table of the
   slot of each token. Here they are torch.
3. On CPUs SGLang pads the inside of an expert until every rank has a multiple of its block, and cuts
   adapters as if it had not. Here they are padded first, too.
4. Under `rollout.batch_invariant` (the plugin mrl_on_policy is on the path, too) products and
   activation are mrl.kernels.invariant's, so the update of a token does not depend on the tokens
   beside it, nor on the ranks of other adapters: only the rows and columns of its own rank are read.

Dimensions: n tokens, K experts a token, E experts of this rank, S slots of adapters, H hidden size, r
rank.
"""

from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mrl.rollout.sglang.compat import hook, take

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
    """Makes tensors in usual memory where pinned memory is asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **options)


def without_pinning(original, *args, **options):
    with Unpinned():
        return original(*args, **options)


def slots_of_tokens(num_tokens, starts, ranks, slots, *buffers, max_len, bucket_len=None):
    """Return (whether the adapter in each slot is used i32[S], the slot of each token i32[n]).

    `starts` of neighbouring segments of tokens, and the slot of each. SGLang's own torch form comes
    after an assertion about the kernel's grid, which segments of several requests break.
    """
    slots = slots.long()
    enabled = torch.zeros(len(ranks), dtype=torch.int32)
    enabled[slots] = (ranks[slots] > 0).int()
    of_tokens = torch.full((num_tokens,), -1, dtype=torch.int32)
    found = torch.repeat_interleave(slots.int(), starts.diff().long())
    of_tokens[: len(found)] = found
    return enabled, of_tokens


def num_padded(layer, size):
    """Return how much all ranks of an expert together have of its inside above `size`."""
    return layer.tp_size * layer.intermediate_size_per_partition - size


def with_padded_inputs(original, layer, a, tp_rank, target_module):
    """Pad every A of the down projection [..., r, inside] before it is cut for a rank; `a` is one or a
    dict of them."""
    if target_module == "down_proj_moe":
        a = each(a, lambda one: F.pad(one, (0, num_padded(layer, one.shape[-1]))))
    return original(layer, a, tp_rank, target_module)


def with_padded_outputs(original, layer, b, tp_rank, target_module):
    """Pad every B of gate and up projection [..., 2 * inside, r] before it is cut for a rank."""

    def padded(one):
        parts = one.chunk(2, -2)
        return torch.cat(
            [F.pad(part, (0, 0, 0, num_padded(layer, part.shape[-2]))) for part in parts], -2
        )

    if target_module == "gate_up_proj_moe":
        b = each(b, padded)
    return original(layer, b, tp_rank, target_module)


def each(matrices, change):
    """Return `change` of a tensor, or of every tensor of a dict."""
    if isinstance(matrices, dict):
        return {number: change(matrix) for number, matrix in matrices.items()}
    return change(matrices)


def run_layer(layer, hidden_states, topk_output, info, **options):
    """FusedMoEWithLoRA._forward_with_lora; a batch without adapters computes what the base does."""
    base = layer.base_layer
    if not info.has_active_lora:
        return base(hidden_states, topk_output, **options)
    config = base.moe_runner_config
    biased = getattr(base, "w13_weight_bias", None) is not None
    if config.activation != "silu" or config.gemm1_alpha is not None or biased:
        raise NotImplementedError(
            "adapters of experts on a CPU: the experts are no SwiGLU without biases; set "
            "lora.rollout=merged or lora.experts=none"
        )
    given = base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    weights, ids, _ = given.topk_output
    out = run_experts(given.hidden_states, ids, weights, base.w13_weight, base.w2_weight, info)
    return base.dispatcher.combine(combine_input=take("StandardCombineInput")(hidden_states=out))


def run_experts(x, ids, weights, w13, w2, info):
    """Return [n, H] of x [n, H] with experts ids [n, K], of which -1 is another rank's. A token's
    experts are weighted and summed up as Megatron does it, and as mrl_on_policy."""
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
    """Return B A x of x [n, inputs] with the adapter in each token's slot, -1 of none.

    a [S, E or 1, parts * r, inputs] and b [S, E or 1, outputs, r], whose `parts` equal parts are
    matrices of their own; 1 is shared by all experts. Of the r rows an adapter has `ranks[slot]`, 0 of
    the base. B has the scale in it.
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
    """Return the scaled A x [n, slices * R] of x [n, inputs], for each token with the matrices
    [slices * r, inputs] of its slot, in its first columns. R is the largest rank."""
    out = inputs.new_zeros(len(inputs), weights.shape[1])
    for rows, slot, rank in segments(batch_info):
        product = linear(inputs[rows], weights[slot, : num_slices * rank])
        out[rows, : num_slices * rank] = product * batch_info.scalings_cpu[slot]
    return out


def multiply_b(inputs, weights, batch_info, slice_offsets, base_output=None):
    """Add to the base's output [n, outputs], in place, B y of y [n, slices * R] from `multiply_a`."""
    offsets = slice_offsets.tolist()
    if base_output is None:
        base_output = inputs.new_zeros(len(inputs), offsets[-1])
    for rows, slot, rank in segments(batch_info):
        for number, (start, end) in enumerate(pairwise(offsets)):
            part = inputs[rows, number * rank : (number + 1) * rank]
            base_output[rows, start:end] += linear(part, weights[slot, start:end, :rank])
    return base_output


def segments(batch_info):
    """Yield (tokens, slot, rank) of neighbouring tokens that have one adapter."""
    start = 0
    for slot, length in zip(
        batch_info.weight_indices_cpu.tolist(), batch_info.seg_lens_cpu.tolist(), strict=True
    ):
        rank = int(batch_info.lora_ranks_cpu[slot])
        if length and rank:
            yield slice(start, start + length), slot, rank
        start += length
