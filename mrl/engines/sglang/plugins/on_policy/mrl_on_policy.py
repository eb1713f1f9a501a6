"""SGLang plugin for `rollout.true_on_policy` on CPUs: the engine computes the same bits as the trainer.

The plugin is on the path only in that mode and under `rollout.batch_invariant`. Each function
replaces a function of SGLang, and gives every token the bits that Megatron's layers give the same
token (parallel/layers/invariant.py). These bits do not depend on the other tokens of the batch,
which is all that `batch_invariant` needs. Products, attention and activation are those of
mrl.kernels.invariant. Log-probs come from the trainer's kernel. Where both sides use torch, formula
and order of operations are Megatron's. docs/on_policy.md describes each replacement.

Dimensions: n tokens of a batch, H hidden size, E experts, K experts per token, V vocabulary, h heads,
g groups of keys and values, d head size.
"""

import numpy
import torch
import torch.nn.functional as F

from mrl.engines.sglang.compat import hook
from mrl.kernels.invariant import attention, linear, silu
from mrl.kernels.vp_logprob import vp_logprob


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
        raise ValueError(
            "batch_invariant: a linear layer has a bias, which the trainer's do not have"
        )
    return linear(x, layer.weight)


def rms_norm(norm, x, residual=None, post_residual_addition=None, quant_linear=None):
    """Add the residual, which SGLang leaves to the norm layer, and apply torch's norm, as Megatron
    does. Return the normalised tensor, or (normalised tensor, sum of input and residual) if there is a
    residual."""
    if residual is not None:
        residual = x = x + residual
    out = F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, residual)


def attend_extend(backend, query, output, *arguments, scaling=None, **options):
    """Compute attention of the new tokens [n, h, d] of each sequence over all cached keys up to and
    including the token's own key. `arguments` are the cache as in `attend`, then for each sequence the
    number of tokens in its prefix and the number of new tokens."""
    cache, (num_prefix, num_new) = arguments[:5], arguments[5:7]
    seen = [
        torch.arange(prefix + 1, prefix + new + 1)
        for prefix, new in zip(num_prefix.tolist(), num_new.tolist(), strict=True)
    ]
    return attend(query, output, cache, seen, scaling)


def attend_decode(backend, query, output, *arguments, scaling=None, **options):
    """Compute attention of the last token of each sequence [n, h, d] over all cached keys of the
    sequence. `arguments` begin with the cache as in `attend`."""
    *_, seq_lens = cache = arguments[:5]
    return attend(query, output, cache, [length.view(1) for length in seq_lens], scaling)


def attend(query, output, cache, seen, scaling):
    """Write the attention output [n, h, d] of the queries into `output`, and return it.

    `cache` is SGLang's (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens). `seen` has one
    tensor for each sequence: the number of keys that each query of the sequence sees.
    """
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
    """Return weights f32[n, K] and ids [n, K] for router logits [n, E], as Megatron's router does. With
    `renormalize`, the weights of a token add up to 1: the softmax is over the chosen experts only."""
    if correction_bias is not None or scoring_func != "softmax":
        raise ValueError("batch_invariant: expected a softmax router without a bias")
    if renormalize:
        scores, ids = torch.topk(gating_output, topk, dim=1)
        return torch.softmax(scores, dim=-1, dtype=torch.float32), ids
    return torch.topk(torch.softmax(gating_output, dim=-1, dtype=torch.float32), topk, dim=1)


def run_experts(layer, x, topk_output, moe_runner_config):
    """Return the experts' output [n, H] for tokens [n, H], as Megatron does: the router's weight is
    applied to the input of an expert's last product, and the outputs for a token are added in the order
    of the expert indices."""
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
    """Sample tokens i64[n] as SGLang does, and compute their log-probs with the trainer's kernel."""
    # Sampling overwrites the logits.
    logits = logits_output.next_token_logits.clone() if return_logprob else None
    ids = original(sampler, logits_output, sampling_info, return_logprob, *rest, **options)
    if logits is not None:
        # In a batch with requests that sample, SGLang takes greedy tokens from probabilities, which
        # have more ties than logits.
        greedy = sampling_info.top_ks == 1
        ids = torch.where(greedy, logits.argmax(-1).to(ids.dtype), ids)
        logits_output.next_token_logprobs = logprobs(logits, ids, temperatures(sampling_info))
    return ids


def temperatures(sampling_info):
    """Return the exact temperatures of the requests. SGLang has them in float32, and 1 /
    float32(0.8) is not 1.25, so each one becomes the shortest decimal number that rounds to its
    float32. For a request with temperature 0 the result is 1, because SGLang has replaced the 0. A
    request with top_k 1 gets its own temperature, even in a batch of only greedy requests, so its
    log-probs do not depend on the batch."""
    narrow = sampling_info.temperatures.flatten().tolist()
    return [float(str(numpy.float32(value))) for value in narrow]


def logprobs(logits, ids, temperatures):
    """Return log-probs f32[n] of tokens i64[n] under logits [n, V]. `temperatures` has n numbers."""
    out = logits.new_empty(len(ids))
    values = torch.tensor(temperatures, dtype=torch.float64)
    for temperature in set(temperatures):
        rows = values == temperature
        out[rows], _ = vp_logprob(logits[rows], ids[rows].long(), temperature=temperature)
    return out
