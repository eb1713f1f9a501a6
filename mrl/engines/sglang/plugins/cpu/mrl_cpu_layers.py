"""SGLang plugin for all processes of a server without CUDA: layers of models.

SGLang computes these layers with loops or chains of torch calls, or not at all. Here each is one call
of a kernel, whose summation order depends neither on the batch nor on what is cached. Under
`batch_invariant` and `true_on_policy`, attention, experts, norms and rotations are those of
plugins/on_policy, or SGLang's.

1. Attention loops in Python over the requests of a batch. Here mrl.kernels.paged_attention computes a
   layer. `fits_kernel` says which calls stay with SGLang.
2. Experts are a loop in Python. Here mrl.kernels.fused_experts computes a layer, unless
   `fits_experts` leaves it to SGLang.
3. Norms and rotary embeddings are many torch calls. Here mrl.kernels.rms_norm and rotate compute them.
   `is_plain_norm` says which norms stay with SGLang.
4. The shared expert of Qwen2-MoE, times the sigmoid of its gate, is added with a Triton kernel. Here
   torch does.
"""

from importlib.util import find_spec

import torch

from mrl.engines.sglang.compat import hook
from mrl.kernels import (
    SWIGLU,
    fused_experts,
    gpt_oss_swiglu,
    paged_attention,
    rms_norm,
    rotate,
    supports_fused_experts,
    supports_paged_attention,
    supports_rms_norm,
    supports_rotate,
)

LARGEST_HALF_EXPERT = 1 << 16
"""The largest H x I of an expert in bf16 or fp16 for which fused_experts replaces SGLang's loop."""

WHOLE_VECTORS = 32
"""A multiple of the number of elements in one of torch's SIMD vectors, for every dtype."""


def register():
    hook("fused_gate_sigmoid_mul_add", add_shared_expert, "REPLACE")
    if find_spec("mrl_on_policy") is not None:
        hook("moe_forward_native", without_other_ranks_experts, "AROUND")
        return
    hook("moe_forward_native", run_experts, "AROUND")
    hook("_run_sdpa_forward_decode", attend_decode, "AROUND")
    hook("_run_sdpa_forward_extend", attend_extend, "AROUND")
    hook("RMSNorm.forward_native", normalise, "AROUND")
    hook("apply_qk_norm", normalise_heads, "AROUND")
    hook("RotaryEmbedding.forward_native", rotate_heads, "AROUND")


def attend_decode(
    original,
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    encoder_lens=None,
    **options,
):
    """Compute attention of the last token of each request: query [n, h, d], output [n, h, e] for n
    tokens, h heads and head sizes d and e.

    Arguments are those of SGLang's function `original`, which is called if `fits_kernel` is False.
    The last token sees all others of its request, so SGLang does not ask for a causal mask here.
    """
    cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not fits_kernel(query, k_cache, v_cache, encoder_lens):
        return original(backend, query, output, *cache, encoder_lens, **options)
    return attend(query, output, cache, None, options)


def attend_extend(
    original,
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_prefix_lens,
    extend_seq_lens,
    encoder_lens=None,
    causal=False,
    **options,
):
    """Compute attention of the new tokens of each request: query [n, h, d], output [n, h, e] for n
    tokens, h heads and head sizes d and e. Arguments are those of SGLang's function `original`,
    which is called if there is no causal mask or `fits_kernel` is False."""
    cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not causal or not fits_kernel(query, k_cache, v_cache, encoder_lens):
        new = (extend_prefix_lens, extend_seq_lens)
        options["causal"] = causal
        return original(backend, query, output, *cache, *new, encoder_lens, **options)
    starts = torch.zeros(len(extend_seq_lens) + 1, dtype=torch.int64)
    starts[1:] = extend_seq_lens.cumsum(0)
    return attend(query, output, cache, starts, options)


def fits_kernel(query, k_cache, v_cache, encoder_lens):
    """Return whether paged_attention can replace SGLang's loop.

    It can if the model has no encoder, if queries and cache have the same dtype (fp32, bf16 or
    fp16), and if the head sizes are multiples of 8. SGLang's loop computes all other cases, and
    every prefill without a causal mask.
    """
    return encoder_lens is None and supports_paged_attention(query, k_cache, v_cache)


def attend(query, output, cache, starts, options):
    """Write the attention output of the batch's queries into `output`, and return it. Padding
    queries at the end are left out.

    `cache` is SGLang's (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens). `starts` has
    the index of each request's first query, and then the number of queries; None if each request
    has one query. `options` are the other arguments of SGLang's function."""
    num_queries = len(cache[-1]) if starts is None else int(starts[-1])
    scale, window = options.get("scaling"), options.get("sliding_window_size")
    paged_attention(
        query[:num_queries],
        *cache,
        starts,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=None if window is None or window < 0 else window,
        out=output[:num_queries],
    )
    return output


def normalise(
    original, norm, x, residual=None, post_residual_addition=None, quant_linear=None, **options
):
    """Compute RMSNorm.forward_native: x [T, d] -> [T, d], and the sum of `x` and `residual` if there is
    a residual. `original` computes what `is_plain_norm` and `supports_rms_norm` exclude."""
    if (
        post_residual_addition is not None
        or quant_linear is not None
        or options
        or not is_plain_norm(norm)
        or not supports_rms_norm(x, norm.weight, residual)
    ):
        return original(norm, x, residual, post_residual_addition, quant_linear, **options)
    out, added = rms_norm(x, norm.weight, norm.variance_epsilon, residual)
    return out if residual is None else (out, added)


def is_plain_norm(norm):
    """Return whether a layer is RMSNorm over its whole row with fp32 arithmetic, one rounding at the
    end, and a residual in the dtype of its input. Norms of other classes, such as GemmaRMSNorm, whose
    weights are added to 1, have no `variance_size_override`."""
    return (
        getattr(norm, "variance_size_override", norm) is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )


def normalise_heads(original, q, k, q_norm, k_norm, head_dim, *args, **options):
    """Normalise each head of queries [T, h d] and keys [T, g d], as SGLang's apply_qk_norm does."""
    if q.dim() != 2 or k.dim() != 2:
        return original(q, k, q_norm, k_norm, head_dim, *args, **options)
    heads = [(x.unflatten(1, (-1, head_dim)), norm) for x, norm in ((q, q_norm), (k, k_norm))]
    if not all(is_plain_norm(norm) and supports_rms_norm(x, norm.weight) for x, norm in heads):
        return original(q, k, q_norm, k_norm, head_dim, *args, **options)
    return tuple(rms_norm(x, norm.weight, norm.variance_epsilon)[0].flatten(1) for x, norm in heads)


def rotate_heads(original, rope, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """Rotate queries [T, h d] and keys [T, g d], as RotaryEmbedding.forward_native does."""
    positions = positions.flatten()
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or hasattr(rope, "sin_cos_cache")
        or not supports_rotate(query, key, positions, rope.cos_sin_cache, rope.head_size)
    ):
        return original(rope, positions, query, key, offsets, fused_set_kv_buffer_arg)
    return rotate(
        query, key, positions, rope.cos_sin_cache, rope.head_size, halves=rope.is_neox_style
    )


def run_experts(original, layer, x, topk_output, moe_runner_config):
    """Compute the experts of a layer: x [T, H] -> [T, H]."""
    weights, ids, _ = topk_output
    activation = activation_of(moe_runner_config)
    if activation is None or not fits_experts(x, layer.w13_weight, layer.w2_weight, weights):
        return without_other_ranks_experts(original, layer, x, topk_output, moe_runner_config)
    return fused_experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        ids,
        weights,
        activation,
        w13_bias=getattr(layer, "w13_weight_bias", None),
        w2_bias=getattr(layer, "w2_weight_bias", None),
    )


def activation_of(config):
    """Return the GatedActivation of SGLang's MoeRunnerConfig; None for any other activation, or if
    the router weights multiply the input."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if config.apply_router_weight_on_input or config.activation != "silu":
        return None
    if alpha is None:
        return SWIGLU  # without alpha, SGLang's loop ignores the limit
    return None if limit is None else gpt_oss_swiglu(alpha, limit)


def fits_experts(x, w13, w2, weights):
    """Return whether fused_experts replaces SGLang's loop. The number of tokens does not matter.

    Large bf16 and fp16 experts keep the loop. There the loop is faster, because its oneDNN products
    use the CPU's instructions for these dtypes.
    """
    if weights.dtype != torch.float32 or not supports_fused_experts(x, w13, w2):
        return False
    return x.dtype == torch.float32 or w2[0].numel() <= LARGEST_HALF_EXPERT


def add_shared_expert(hidden_states, gate_weight, shared_output, final_hidden_states):
    """Add the gated shared expert to `final_hidden_states` [T, H], with gate_weight [H].

    A token's bits do not depend on the other tokens. Each dot product is summed alone. Each value
    is repeated WHOLE_VECTORS times before the sigmoid, because torch rounds elements differently if
    they do not fill a SIMD vector.
    """
    dots = (hidden_states * gate_weight).sum(dim=-1, keepdim=True)
    gate = dots.expand(-1, WHOLE_VECTORS).contiguous().sigmoid()[:, :1]
    final_hidden_states.addcmul_(gate, shared_output)


def without_other_ranks_experts(original, layer, x, topk_output, moe_runner_config):
    """Compute the experts of a layer with SGLang's loop: x [T, H] -> [T, H].

    The loop cannot handle id -1, which under expert parallelism is an expert of another rank, nor a
    batch without tokens. In these cases, the loop gets one row, with one expert, for each pair of a
    token and an expert of this rank that the token chose. If there is no such pair, the loop is not
    called.
    """
    weights, ids, _ = topk_output
    rows, places = (ids >= 0).nonzero(as_tuple=True)
    if len(rows) == ids.numel() and len(rows):
        return original(layer, x, topk_output, moe_runner_config)
    out = torch.zeros(*ids.shape, x.shape[-1], dtype=weights.dtype)
    if len(rows):
        chosen, ones = ids[rows, places, None], torch.ones_like(weights[rows, places, None])
        pairs = type(topk_output)(ones, chosen, None)
        found = original(layer, x[rows], pairs, moe_runner_config)
        out[rows, places] = found.to(weights.dtype) * weights[rows, places, None]
    return out.sum(dim=1).to(x.dtype)
