"""SGLang plugin for all processes of a server without CUDA.

It closes four gaps and makes sleep and the start cheaper. Layers are those of mrl_cpu_layers.

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
5. SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork, and each of
   them imports all of SGLang again, which takes two thirds of a start's CPU time. Here they are
   forked.
6. CPUs have no allocator cache to empty, so SGLang collects garbage instead: over the whole heap,
   whenever the prefix cache is flushed or memory is released, several times a step. Here it skips
   this. Reference counts free the tensors, and Python still collects by its own thresholds.
"""

import gc
import multiprocessing

import torch

from mrl.engines.sglang.compat import hook, take
from mrl.kernels.seeded_sample import seeded_sample

DEFAULT_SEED = 42
"""The seed that SGLang itself gives to requests without a seed."""


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
    hook("CpuDeviceMixin.empty_cache", lambda platform: None, "REPLACE")


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
