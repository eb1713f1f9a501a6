"""SGLang plugin of `rollout.true_on_policy` on CPUs: the engine computes what mrl's trainer computes.

On the path only in that mode, and in `rollout.batch_invariant`, for which the second half of the next
sentence counts. Each function here takes the place of one of SGLang's, and gives every
token the bits that Megatron's layers give it (parallel/layers/invariant.py), whatever else is in the
batch: products, attention and activation are mrl.kernels.invariant's, log-probs the trainer's own
kernel, and where both sides use torch, formula and order are Megatron's. docs/on_policy.md goes
through them.

Dimensions: n tokens of a batch, H hidden size, E experts, K experts a token, V vocabulary, h heads, g
groups of keys and values, d head size.
"""

import numpy
import torch
import torch.nn.functional as F

from mrl.kernels.invariant import attention, linear, silu
from mrl.kernels.vp_logprob import vp_logprob
from mrl.rollout.sglang.compat import hook


def register():
    hook("UnquantizedLinearMethod.apply", apply_linear, "REPLACE")
    hook("RMSNorm.forward_native", rms_norm, "REPLACE")
    hook("_run_sdpa_forward_extend", attend_extend, "REPLACE")
    hook("_run_sdpa_forward_decode", attend_decode, "REPLACE")
    hook("fused_topk_native", choose_experts, "REPLACE")
    hook("fused_topk_torch_native", choose_experts, "REPLACE")
    hook("moe_forward_native", run_experts, "REPLACE")
    hook("_compute_lm_head", compute_logits, "REPLACE")
    hook("Sampler.forward", sample, "AROUND")


def apply_linear(method, layer, x, bias=None):
    if bias is not None:
        raise ValueError("batch_invariant: a linear layer has a bias, which the trainer's have not")
    return linear(x, layer.weight)


def rms_norm(norm, x, residual=None, post_residual_addition=None, quant_linear=None):
    """SGLang adds the residual here; the sum is Megatron's, whose norm is torch's own."""
    if residual is not None:
        residual = x = x + residual
    out = F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, residual)


def attend_extend(
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
    *_,
    scaling=None,
    **options,
):
    """Compute attention of new tokens of each sequence [n, h, d] over all keys of the cache up
    to them."""
    seen = [
        torch.arange(prefix + 1, prefix + new + 1)
        for prefix, new in zip(extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    ]
    cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    return attend(query, output, cache, seen, scaling)


def attend_decode(
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    *_,
    scaling=None,
    **options,
):
    """Compute attention of the last token of each sequence [n, h, d] over all keys of the cache."""
    cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    return attend(query, output, cache, [length.view(1) for length in seq_lens], scaling)


def attend(query, output, cache, seen, scaling):
    """`seen`: for each sequence, how many keys each of its queries sees."""
    k_cache, v_cache, req_to_token, req_pool_indices, seq_lens = cache
    lengths = seq_lens.tolist()
    rows = zip(req_pool_indices.tolist(), lengths, strict=True)
    places = torch.cat([req_to_token[row, :length] for row, length in rows])
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    num_queries = torch.tensor([len(counts) for counts in seen])
    output.copy_(
        attention(
            query,
            k_cache[places],
            v_cache[places],
            starts.repeat_interleave(num_queries).int(),
            torch.cat(seen).int(),
            scaling,
        )
    )
    return output


def choose_experts(
    hidden_states, gating_output, topk, renormalize, correction_bias=None, scoring_func="softmax"
):
    """Router logits [n, E] -> weights f32[n, K], ids [n, K], as Megatron's router makes them: where
    the weights of a token add up to 1, the softmax runs over the chosen experts only."""
    if correction_bias is not None or scoring_func != "softmax":
        raise ValueError("batch_invariant: expected a softmax router without a bias")
    if renormalize:
        scores, ids = torch.topk(gating_output, topk, dim=1)
        return torch.softmax(scores, dim=-1, dtype=torch.float32), ids
    return torch.topk(torch.softmax(gating_output, dim=-1, dtype=torch.float32), topk, dim=1)


def run_experts(layer, x, topk_output, moe_runner_config):
    """Run the experts, tokens [n, H] -> [n, H]. Megatron weights what goes into an expert's last
    product, not what comes out of it, and adds a token's experts in the order of their numbers."""
    weights, ids, _ = topk_output
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, place = torch.where(ids == expert)
        gate, up = linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        inner = silu(gate) * up * weights[tokens, place].unsqueeze(-1)
        out[tokens] += linear(inner, layer.w2_weight[expert])
    return out


def compute_logits(processor, hidden_states, lm_head, embedding_bias=None, **buffer):
    return linear(hidden_states, lm_head.weight)


def sample(original, sampler, logits_output, sampling_info, return_logprob, *rest, **options):
    """Tokens i64[n] as SGLang draws them; their log-probs by the trainer's kernel."""
    # Sampling writes over the logits.
    logits = logits_output.next_token_logits.clone() if return_logprob else None
    ids = original(sampler, logits_output, sampling_info, return_logprob, *rest, **options)
    if logits is not None:
        # Beside requests that sample, greedy ones are drawn from probabilities, which have more ties.
        greedy = sampling_info.top_ks == 1
        ids = torch.where(greedy, logits.argmax(-1).to(ids.dtype), ids)
        logits_output.next_token_logprobs = logprobs(logits, ids, temperatures(sampling_info))
    return ids


def temperatures(sampling_info):
    """Return the requests' exact temperatures: SGLang keeps float32, and 1 / float32(0.8) is not 1.25.
    A request with temperature 0 gets 1. One with top_k 1 keeps its own, even if all requests of the
    batch are greedy and SGLang omits their temperatures, so its log-probs do not depend on the
    batch."""
    narrow = sampling_info.temperatures.flatten().tolist()
    return [float(str(numpy.float32(value))) for value in narrow]


def logprobs(logits, ids, temperatures):
    """Return f32[n] of tokens i64[n] under logits [n, V]."""
    out = logits.new_empty(len(ids))
    values = torch.tensor(temperatures, dtype=torch.float64)
    for temperature in set(temperatures):
        rows = values == temperature
        out[rows], _ = vp_logprob(logits[rows], ids[rows].long(), temperature=temperature)
    return out
