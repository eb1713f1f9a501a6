"""SGLang plugin for all processes of a server without CUDA.

It closes five gaps and makes attention, experts, norms, rotations, sleep and the start cheaper:

1. SGLang stores captured routes in a host buffer whose allocator pins memory, which needs CUDA.
   Here the allocator does not pin.
2. A request's `sampling_seed` is used only under `--enable-deterministic-inference`, which is
   refused on CPUs, and a Triton kernel hashes it. Here every batch carries the seeds of its
   requests, and mrl.kernels.seeded_sample draws SGLang's tokens: a token is a function of (weights,
   prefix, seed). If one request of a batch truncates its distribution (top_p, top_k), SGLang applies
   the seeds of all requests in the batch to sorted tokens. Here a request that truncates nothing
   gets the same tokens in any batch.
3. In CUDA builds from torch 2.14 on, `torch.get_device_module()` without a device returns
   torch.cuda, with which SGLang synchronises when it releases memory
   (`release_memory_occupation`). Here it returns torch.cpu.
4. With a CUDA build of torch, the ranks of a server would use NCCL, which needs GPUs. Here SGLang
   does not find the NCCL library, and the ranks use gloo, as with a CPU build.
5. SGLang adds the shared expert of Qwen2-MoE, times the sigmoid of its gate, with a Triton kernel.
   Here torch does.
6. SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork, and each of
   them imports all of SGLang again, which takes two thirds of a start's CPU time. Here they are
   forked.
7. SGLang's attention on CPUs loops in Python over the requests of a batch. Here one call of
   mrl.kernels.paged_attention computes a layer, and its summation order depends neither on the
   batch nor on what is cached. `fits_kernel` says which calls stay with SGLang. Under
   `batch_invariant` and `true_on_policy` the attention is that of plugins/on_policy.
8. SGLang's experts on CPUs are a loop in Python. Here one call of mrl.kernels.fused_experts
   computes a layer, unless `fits_experts` leaves it to SGLang or the experts are those of
   plugins/on_policy.
9. CPUs have no allocator cache to empty, so SGLang collects garbage instead: over the whole heap,
   whenever the prefix cache is flushed or memory is released, several times a step. Here it skips
   this. Reference counts free the tensors, and Python still collects by its own thresholds.
10. SGLang computes norms and rotary embeddings on CPUs with many torch calls. Here one call of
   mrl.kernels.rms_norm or rotate does, unless the plug-in on_policy is active.
"""

import gc
import multiprocessing
from importlib.util import find_spec

import torch

from mrl.engines.sglang.compat import hook, take
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
from mrl.kernels.seeded_sample import seeded_sample

DEFAULT_SEED = 42
"""The seed that SGLang itself gives to requests without a seed."""
LARGEST_HALF_EXPERT = 1 << 16
"""The largest H x I of an expert in bf16 or fp16 for which fused_experts replaces SGLang's loop."""

WHOLE_VECTORS = 32
"""A multiple of the number of elements in one of torch's SIMD vectors, for every dtype."""


def register():
    take("ALLOC_MEMORY_FUNCS")["cpu"] = allocate_unpinned
    hook("multinomial_with_seed", multinomial_with_seed, "REPLACE")
    hook("sampling_from_probs_torch", sample_from_probs, "AROUND")
    hook("Sampler._sample_from_probs", sample_by_kind, "AROUND")
    hook("SamplingBatchInfo.from_schedule_batch", attach_seeds, "AFTER")
    give_padding_value()
    give_cpu_module()
    hook("find_nccl_library", find_no_nccl, "REPLACE")
    hook("_set_envs_and_config", fork_children, "AFTER")
    hook("fused_gate_sigmoid_mul_add", add_shared_expert, "REPLACE")
    hook("CpuDeviceMixin.empty_cache", lambda platform: None, "REPLACE")
    if find_spec("mrl_on_policy") is not None:
        hook("moe_forward_native", without_other_ranks_experts, "AROUND")
    else:
        hook("moe_forward_native", run_experts, "AROUND")
        hook("_run_sdpa_forward_decode", attend_decode, "AROUND")
        hook("_run_sdpa_forward_extend", attend_extend, "AROUND")
        hook("RMSNorm.forward_native", normalise, "AROUND")
        hook("apply_qk_norm", normalise_heads, "AROUND")
        hook("RotaryEmbedding.forward_native", rotate_heads, "AROUND")


def fork_children(result, server_args):
    """Make multiprocessing fork from now on. No thread is running yet that a child would need."""
    gc.freeze()  # keeps the memory of the imports shared with them
    gc.enable()  # it was off for the imports (child.py)
    multiprocessing.set_start_method("fork", force=True)


def give_cpu_module():
    """Make torch.get_device_module return torch.cpu if it is called without a device."""
    find = torch.get_device_module
    torch.get_device_module = lambda device=None: find("cpu" if device is None else device)


def find_no_nccl():
    """Replace SGLang's search for the NCCL library: raise ValueError, as the search does with a CPU
    build of torch. SGLang handles the error."""
    raise ValueError("NCCL needs GPUs, and this server runs on CPUs")


def give_padding_value():
    """Give the attention backend the method that returns the sequence length of padding requests, which
    fill up a batch under DP attention. Do nothing if the backend has the method."""
    backend = take("TorchNativeAttnBackend")
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


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
    end, and a residual in the dtype of its input."""
    return (
        norm.variance_size_override is None
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


def allocate_unpinned(
    dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None
):
    return torch.empty(dims, dtype=dtype, device=device)


def attach_seeds(info, cls, batch, vocab_size):
    """Store the seeds i64[B] of the B requests of `batch` in the batch's sampling info `info`, and
    return `info`."""
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    seeds = [DEFAULT_SEED if seed is None else seed for seed in seeds]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def sample_by_kind(original, sampler, probs, info, positions, is_simple):
    """Wrap Sampler._sample_from_probs, for `probs` [B, V]. In a batch in which some requests truncate
    their distribution, sample again for the requests that do not, and for greedy requests."""
    ids, capture = original(sampler, probs, info, positions, is_simple)
    if is_simple:
        return ids, capture
    greedy = info.top_ks == 1
    ids = torch.where(greedy, probs.argmax(-1).to(ids.dtype), ids)
    whole = ((info.top_ks >= probs.shape[1]) & (info.top_ps >= 1) & (info.min_ps <= 0)).nonzero()[
        :, 0
    ]
    if len(whole):
        # As SGLang's sampling_from_probs_torch does if no request truncates.
        seeds, places = info.sampling_seed[whole], positions[whole]
        ids[whole] = draw(probs[whole], seeds, places).to(ids.dtype)
    if capture is not None:  # the mask's log-probs are then looked up by token
        capture = capture._replace(selected_weight=None)
    return ids, capture


def sample_from_probs(original, probs, sampling_seed=None, positions=None):
    """Draw token ids i32[B] from probs [B, V] like SGLang's sampling_from_probs_torch. Without seeds,
    call that function."""
    if sampling_seed is None:
        return original(probs, sampling_seed, positions)
    return draw(probs, sampling_seed, positions).to(torch.int32)


def draw(probs, seeds, positions):
    """Draw token ids i64[B] from probs [B, V] of any float dtype. The ids are exactly those of
    multinomial_with_seed(torch.log(probs), ...)."""
    if probs.dtype != torch.float32:
        return seeded_sample(torch.log(probs), seeds, positions)
    return seeded_sample(probs, seeds, positions, are_probs=True)


def multinomial_with_seed(logprobs, seed, positions):
    """Draw a Gumbel-max sample i64[B, 1] from logprobs [B, V], seed i64[B] and positions int[B]."""
    return seeded_sample(logprobs, seed, positions)[:, None]
