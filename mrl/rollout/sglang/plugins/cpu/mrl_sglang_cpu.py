"""This plugin is loaded by SGLang in each process of a server without CUDA.

Four gaps are closed here, and the start is made cheaper; nothing else is touched:

1. Captured routes live in a host buffer whose allocator pins memory, which needs CUDA.
2. A request's `sampling_seed` counts only under `--enable-deterministic-inference`, which is refused
   on CPUs, and its hash is a triton kernel. Here every batch carries its requests' seeds, and the
   same numbers are computed in torch: a token is a function of (weights, prefix, seed). Where a
   request of a batch truncates its distribution, SGLang lays its seeds over sorted tokens, for every
   request of the batch. Here those that truncate nothing are drawn as they are among their like.
3. `torch.get_device_module()` without a device is torch.cuda in a CUDA build from torch 2.14 on, and
   SGLang synchronises with it when it gives memory back (`release_memory_occupation`). Here it is
   torch.cpu.
4. With a CUDA build of torch the ranks of a server would talk over NCCL, which needs GPUs. Without
   its library they talk over gloo, as with a CPU build.
5. SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork, and each of
   them imports all of SGLang again: two thirds of a start's CPU time. Here they are forked.
"""

import gc
import multiprocessing

import torch

from mrl.rollout.sglang.compat import hook, take

UINT32 = 0xFFFFFFFF
DEFAULT_SEED = 42
"""SGLang's own for requests without a seed."""


def register():
    take("ALLOC_MEMORY_FUNCS")["cpu"] = allocate_unpinned
    hook("multinomial_with_seed", multinomial_with_seed, "REPLACE")
    hook("Sampler._sample_from_probs", sample_by_kind, "AROUND")
    hook("SamplingBatchInfo.from_schedule_batch", attach_seeds, "AFTER")
    hook("moe_forward_native", without_other_ranks_experts, "AROUND")
    give_padding_value()
    give_cpu_module()
    hook("find_nccl_library", find_no_nccl, "REPLACE")
    hook("_set_envs_and_config", fork_children, "AFTER")


def fork_children(result, server_args):
    """Start processes by fork from here on: nothing has started a thread that they would need."""
    gc.freeze()  # what is imported stays shared with them
    multiprocessing.set_start_method("fork", force=True)


def give_cpu_module():
    """Let torch.get_device_module find torch.cpu where it is given no device."""
    find = torch.get_device_module
    torch.get_device_module = lambda device=None: find("cpu" if device is None else device)


def find_no_nccl():
    """Raise what SGLang raises with a CPU build of torch, and takes for an answer."""
    raise ValueError("NCCL needs GPUs, and this server runs on CPUs")


def give_padding_value():
    """The length of the requests that pad a batch under DP attention; the backend does not set it."""
    backend = take("TorchNativeAttnBackend")
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def without_other_ranks_experts(original, layer, x, topk_output, moe_runner_config):
    """Id -1 is an expert of another rank under expert parallelism, which SGLang's loop cannot count.

    Such a place gets an expert of this rank that the token has not chosen, with weight 0.
    """
    weights, ids, logits = topk_output
    elsewhere = ids < 0
    if elsewhere.any():
        num_experts = layer.w13_weight.shape[0]
        used = torch.zeros(len(ids), num_experts, dtype=torch.int64)
        used.scatter_add_(1, ids.clamp(min=0).to(torch.int64), (~elsewhere).to(torch.int64))
        spare = used.argsort(dim=1, stable=True)  # those not chosen come first
        number = (elsewhere.cumsum(1) - 1).clamp(min=0)
        ids = torch.where(elsewhere, spare.gather(1, number).to(ids.dtype), ids)
        topk_output = type(topk_output)(weights.masked_fill(elsewhere, 0), ids, logits)
    return original(layer, x, topk_output, moe_runner_config)


def allocate_unpinned(
    dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None
):
    return torch.empty(dims, dtype=dtype, device=device)


def attach_seeds(info, cls, batch, vocab_size):
    """Give the sampling info of a batch its requests' seeds, i64[B]."""
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    seeds = [DEFAULT_SEED if seed is None else seed for seed in seeds]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def sample_by_kind(original, sampler, probs, info, positions, is_simple):
    """Sampler._sample_from_probs of a batch in which some truncate and others do not, probs [B, V]."""
    ids, capture = original(sampler, probs, info, positions, is_simple)
    if is_simple:
        return ids, capture
    greedy = info.top_ks == 1
    ids = torch.where(greedy, probs.argmax(-1).to(ids.dtype), ids)
    whole = ((info.top_ks >= probs.shape[1]) & (info.top_ps >= 1) & (info.min_ps <= 0)).nonzero()[
        :, 0
    ]
    if len(whole):
        # As SGLang's sampling_from_probs_torch does it where nobody truncates.
        seeds, places = info.sampling_seed[whole], positions[whole]
        drawn = multinomial_with_seed(torch.log(probs[whole]), seeds, places)
        ids[whole] = drawn.view(-1).to(ids.dtype)
    return ids, capture


def multinomial_with_seed(logprobs, seed, positions):
    """Draw a Gumbel-max sample i64[B, 1] from logprobs [B, V], seed i64[B] and positions int[B]."""
    columns = torch.arange(logprobs.shape[1], device=logprobs.device)
    uniform = murmur_hash32(seed, positions, columns).to(torch.float64) / UINT32
    # The bounds are SGLang's: a uniform of exactly 0 or 1 must not become an infinite Gumbel.
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    gumbel = uniform.log_().neg_()
    return torch.argmax(gumbel.add_(logprobs.to(torch.float64)), dim=1, keepdim=True)


def murmur_hash32(seed, positions, columns):
    """Compute MurmurHash3 of (seed i64[B], position[B], column[V]): values below 2**32 as i64[B, V].

    The same values as SGLang's triton kernel. Products wrap modulo 2**64, which keeps the low 32
    bits right.
    """
    seed = seed.to(torch.int64)
    state = torch.zeros_like(seed)
    state = _mix(state, seed & UINT32)
    state = _mix(state, (seed >> 32) & UINT32)
    state = _mix(state, positions.to(torch.int64) & UINT32)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & UINT32)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & UINT32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & UINT32
    return state ^ (state >> 16)


def _mix(state, block):
    block = _rotate((block * 0xCC9E2D51) & UINT32, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & UINT32), 13)
    return (state * 5 + 0xE6546B64) & UINT32


def _rotate(value, bits):
    return ((value << bits) | (value >> (32 - bits))) & UINT32
