"""SGLang's server arguments and environment are made here from the recipe and the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import AdapterLimits
from mrl.rollout.sglang.adapter.manifest import sglang_modules
from mrl.rollout.sglang.arguments import check_server_args
from mrl.rollout.sglang.requests import RESERVED_TOKENS

PLUGINS = Path(__file__).parent / "plugins"
CPU_STUBS = PLUGINS / "cpu"
SERVER_PLUGIN = PLUGINS / "server"
ON_POLICY_PLUGIN = PLUGINS / "on_policy"
ROUTING_WEIGHTS_PLUGIN = PLUGINS / "routing_weights"
ADAPTER_PLUGIN = PLUGINS / "adapter"
CPU_ADAPTER_PLUGIN = PLUGINS / "cpu_adapter"
SLOT_WAIT_S = 10.0
"""After so many seconds in the queue an adapter without a slot gets the next one that can be emptied:
requests of an adapter that has one would keep it for as long as they come."""
CPU_MAX_TOTAL_TOKENS = 16_384


def server_settings(
    model: ModelConfig,
    config: RolloutConfig,
    *,
    on_gpu: bool,
    context_len: int,
    return_routes: bool,
    first_version: int,
    keep_weights_on_host: bool,
    adapters: AdapterLimits | None = None,
) -> dict[str, Any]:
    """Return the fields of SGLang's ServerArgs, less host, port, api_key and random_seed.

    The recipe's own (`config.server_args`) come last. Raises InputError for one that it may not set.
    """
    check_server_args(config.server_args)
    dtype = config.engine_dtype(model)
    settings: dict[str, Any] = {
        "model_path": model.path,
        "trust_remote_code": False,
        "tp_size": config.tensor_parallel_size,
        "context_length": context_len + RESERVED_TOKENS,
        "weight_version": str(first_version),
        "enable_return_routed_experts": return_routes,
        "sampling_backend": "pytorch",
        # SGLang's own warm-up request runs in a thread beside the server, which nobody can wait for:
        # the engine could be put to sleep under it. `sglang.Engine` sends one of its own.
        "skip_server_warmup": True,
        # At `info` SGLang prints all of its arguments, and the API key is one.
        "log_level": "warning",
    }
    if config.expert_parallel_size > 1:
        settings["ep_size"] = config.expert_parallel_size
    if config.data_parallel_attention_size > 1:
        settings["dp_size"] = config.data_parallel_attention_size
        settings["enable_dp_attention"] = True
    if config.max_total_tokens is not None:
        settings["max_total_tokens"] = config.max_total_tokens
    if config.max_running_requests is not None:
        settings["max_running_requests"] = config.max_running_requests
    if on_gpu:
        settings |= {
            "dtype": "bfloat16" if dtype == "auto" else dtype,
            "mem_fraction_static": config.mem_fraction_static,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": keep_weights_on_host,
        }
        if config.true_on_policy or config.batch_invariant:
            settings["enable_deterministic_inference"] = True
    else:
        settings |= {
            "device": "cpu",
            "dtype": "float32" if dtype == "auto" else dtype,
            "attention_backend": "torch_native",
            # An idle scheduler spins: it would take a core from the trainer while it trains.
            "sleep_on_idle": True,
        }
        settings.setdefault("max_total_tokens", CPU_MAX_TOTAL_TOKENS)
    return settings | adapter_settings(adapters, on_gpu=on_gpu) | config.server_args


def adapter_settings(adapters: AdapterLimits | None, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of an engine that serves adapters beside the base; none without any."""
    if adapters is None:
        return {}
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "max_loras_per_batch": adapters.num_slots,
        "lora_drain_wait_threshold": SLOT_WAIT_S,
    }
    modules = sglang_modules(adapters)
    if adapters.experts != "none":
        # Without all three SGLang wraps no expert, and would drop their matrices without a word.
        modules += ["gate_proj", "up_proj", "down_proj"]
        settings["experts_shared_outer_loras"] = adapters.experts == "shared_outer"
    settings["lora_target_modules"] = list(dict.fromkeys(modules))
    if not on_gpu:  # the default (csgmv) and the others are triton kernels
        settings["lora_backend"] = "torch_native"
    return settings


def server_environment(
    gpu_ids: Sequence[int | str],
    tensor_parallel_size: int,
    *,
    first_rank: int = 0,
    batch_invariant: bool = False,
    return_routing_weights: bool = False,
    serves_adapter: bool = False,
) -> dict[str, str]:
    """What is set on top of the trainer's environment. PYTHONPATH comes before everything else.

    `first_rank` is the engine's first rank on this node.
    """
    plugins = [SERVER_PLUGIN] + [ADAPTER_PLUGIN] * serves_adapter
    # SGLang gets RESERVED_TOKENS in addition to a context that may be all of the model's; mrl sends no
    # request that would use them.
    common = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if gpu_ids:
        return common | {
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpu_ids),
            "PYTHONPATH": _path(plugins),
            # Without the first, the graphs' memory does not belong to the tag `cuda_graph` and stays
            # on the GPU while the engine sleeps. The second keeps NCCL from registering addresses
            # inside graphs, whose memory is unmapped and mapped anew between rollouts.
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
            "NCCL_GRAPH_REGISTER": "0",
            # torch_memory_saver 0.0.10 frees the host copies of weights and graphs at each wake
            # otherwise, and pins as many bytes anew at the next sleep (csrc/core.cpp, `resume`). The
            # memory plan counts them in every phase.
            "TMS_RETAIN_CPU_BACKUP": "1",
            **compile_caches(),
        }
    plugins += [CPU_STUBS] + [ON_POLICY_PLUGIN] * batch_invariant
    plugins += [ROUTING_WEIGHTS_PLUGIN] * return_routing_weights
    plugins += [CPU_ADAPTER_PLUGIN] * serves_adapter
    environment = common | {
        "SGLANG_USE_CPU_ENGINE": "1",
        # A toy model on two threads is 20 to 40 times slower than on one.
        "OMP_NUM_THREADS": "1",
        # SGLang would compile a few functions of a line or two at the first request of two ranks.
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": _path(plugins),
    }
    if tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        # SGLang counts the ranks of a node from 0.
        ranks = (cores[(first_rank + n) % len(cores)] for n in range(tensor_parallel_size))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in ranks)
    return environment


def _path(folders: Sequence[Path]) -> str:
    return os.pathsep.join(str(folder) for folder in folders)


def compile_caches() -> dict[str, str]:
    """Return variables with the folders for kernels compiled at run time: the trainer's, if set.

    The default are the folders that SGLang itself chooses since 0.5.20 (environ.py,
    third_party_cache_defaults). inductor's own default lies in TMPDIR, which ends with the server.
    Both compilers name entries by their contents and versions, and move them into place whole, so
    engines and users' runs share them.
    """
    base = Path(os.environ.get("SGLANG_CACHE_DIR") or "~/.cache/sglang").expanduser()
    defaults = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: os.environ.get(name) or str(base / folder) for name, folder in defaults.items()}
