"""SGLang's server arguments and environment, for a recipe and a device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.config.adapter import AdapterLimits
from mrl.engines.base import EngineConfig
from mrl.engines.sglang.adapter.manifest import sglang_modules
from mrl.engines.sglang.arguments import check_server_args
from mrl.engines.sglang.quantized import quantization_settings
from mrl.engines.sglang.requests import RESERVED_TOKENS

PLUGINS = Path(__file__).parent / "plugins"
CPU_STUBS = PLUGINS / "cpu"
SERVER_PLUGIN = PLUGINS / "server"
ON_POLICY_PLUGIN = PLUGINS / "on_policy"
ROUTING_WEIGHTS_PLUGIN = PLUGINS / "routing_weights"
ADAPTER_PLUGIN = PLUGINS / "adapter"
CPU_ADAPTER_PLUGIN = PLUGINS / "cpu_adapter"
CPU_QUANTIZED_PLUGIN = PLUGINS / "cpu_quantized"
GPT_OSS_PLUGIN = PLUGINS / "gpt_oss"
SLOT_WAIT_S = 10.0
"""Seconds that requests may wait for their adapter to be put into a slot (device memory for one
adapter). Then the adapter gets the next slot that can be emptied. Without this limit, an adapter
would keep its slot for as long as new requests for it come."""
CPU_MAX_TOTAL_TOKENS = 16_384


def server_settings(
    engine: EngineConfig, context_len: int, adapters: AdapterLimits | None = None
) -> dict[str, Any]:
    """Return the fields of SGLang's ServerArgs, except host, port, api_key and random_seed.

    The fields in the recipe's `rollout.server_args` override the others. Raises InputError for a field
    that a recipe may not set.
    """
    config, on_gpu = engine.rollout, bool(engine.gpu_ids)
    check_server_args(config.server_args)
    dtype = config.engine_dtype(engine.model)
    settings: dict[str, Any] = {
        "model_path": engine.model.path,
        "trust_remote_code": False,
        "tp_size": config.tensor_parallel_size,
        "context_length": context_len + RESERVED_TOKENS,
        "weight_version": "0",
        "enable_return_routed_experts": engine.return_routes,
        "sampling_backend": "pytorch",
        # SGLang's own warm-up request runs in a thread of the server, and nobody can wait for it: the
        # engine could be put to sleep during it. mrl sends a request of its own (server.py).
        "skip_server_warmup": True,
        # At `info` SGLang prints all of its arguments, the API key among them.
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
            "enable_weights_cpu_backup": engine.keep_weights_on_host or adapters is not None,
        }
        if config.true_on_policy or config.batch_invariant:
            settings["enable_deterministic_inference"] = True
    else:
        settings |= {
            "device": "cpu",
            "dtype": "float32" if dtype == "auto" else dtype,
            "attention_backend": "torch_native",
            # An idle scheduler would spin, and take a core from the trainer.
            "sleep_on_idle": True,
        }
        settings.setdefault("max_total_tokens", CPU_MAX_TOTAL_TOKENS)
    replicas = config.data_parallel_attention_size
    settings |= adapter_settings(adapters, on_gpu=on_gpu, num_replicas=replicas)
    settings |= config.server_args
    if on_gpu:
        settings |= quantization_settings(config.quantization, config.server_args)
    return settings


def model_settings(
    model_type: str, server_args: Mapping[str, Any], *, on_gpu: bool
) -> dict[str, Any]:
    """Return the fields of ServerArgs that a model needs, without those in the recipe's
    `rollout.server_args`."""
    if model_type != "gpt_oss":
        return {}
    # On CPUs, SGLang's attention does not find keys in the cache that it keeps for windows alone. On
    # GPUs, its other MoE kernels rearrange the weights, so an update could not be copied into them.
    needed: dict[str, Any] = {"moe_runner_backend": "triton"}
    if not on_gpu:  # the plug-in's attention has the name of this backend
        needed = {"disable_hybrid_swa_memory": True, "attention_backend": "intel_amx"}
    return {name: value for name, value in needed.items() if name not in server_args}


def adapter_settings(
    adapters: AdapterLimits | None, *, on_gpu: bool, num_replicas: int = 1
) -> dict[str, Any]:
    """Return the fields of ServerArgs that concern adapters; empty if the engine serves none.
    `num_replicas`: of the attention (`rollout.data_parallel_attention_size`)."""
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
        # Without all three SGLang wraps no expert, and silently ignores their matrices.
        modules += ["gate_proj", "up_proj", "down_proj"]
        settings["experts_shared_outer_loras"] = adapters.experts == "shared_outer"
    settings["lora_target_modules"] = list(dict.fromkeys(modules))
    if not on_gpu:  # the default (csgmv) and the other backends are Triton kernels
        settings["lora_backend"] = "torch_native"
    elif num_replicas > 1:  # the only backend that supports it
        settings["lora_backend"] = "triton"
    return settings


def server_environment(
    gpu_ids: Sequence[int | str],
    tensor_parallel_size: int,
    *,
    first_rank: int = 0,
    batch_invariant: bool = False,
    return_routing_weights: bool = False,
    serves_adapter: bool = False,
    quantization: str = "none",
    cpu_threads: int = 1,
    model_type: str = "",
) -> dict[str, str]:
    """Return the environment variables to set for the server in addition to the trainer's. The returned
    PYTHONPATH has only the folders of the plugins; `ServerProcess` puts it in front of the trainer's.
    `first_rank` is the engine's first rank on this node."""
    plugins = [SERVER_PLUGIN] + [ADAPTER_PLUGIN] * serves_adapter
    plugins += [GPT_OSS_PLUGIN] * (model_type == "gpt_oss")
    # The context, which may be all of the model's, plus RESERVED_TOKENS can exceed the model's. mrl
    # sends no request that would use these tokens.
    common = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if gpu_ids:
        return common | {
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpu_ids),
            "PYTHONPATH": _path(plugins),
            # Without the first variable, the graphs' memory does not belong to the tag `cuda_graph` and
            # stays on the GPU while the engine sleeps. The second prevents NCCL from registering
            # addresses inside graphs, whose memory is unmapped and mapped again between rollouts.
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
            "NCCL_GRAPH_REGISTER": "0",
            # Otherwise torch_memory_saver 0.0.10 frees the host copies of weights and graphs at each
            # wake, and pins as many bytes again at the next sleep (csrc/core.cpp, `resume`). The memory
            # plan counts them in every phase.
            "TMS_RETAIN_CPU_BACKUP": "1",
            **compile_caches(),
        }
    plugins += [CPU_STUBS] + [ON_POLICY_PLUGIN] * batch_invariant
    plugins += [ROUTING_WEIGHTS_PLUGIN] * return_routing_weights
    plugins += [CPU_ADAPTER_PLUGIN] * serves_adapter
    plugins += [CPU_QUANTIZED_PLUGIN] * (quantization != "none")
    environment = common | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(cpu_threads),
        # With two ranks SGLang would compile a few tiny functions at the first request.
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": _path(plugins),
    }
    if quantization != "none":
        environment["MRL_QUANTIZATION"] = quantization
    if tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        # SGLang numbers the ranks of a node from 0.
        ranks = (cores[(first_rank + n) % len(cores)] for n in range(tensor_parallel_size))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in ranks)
    return environment


def _path(folders: Sequence[Path]) -> str:
    return os.pathsep.join(str(folder) for folder in folders)


def compile_caches() -> dict[str, str]:
    """Return the environment variables that name the folders in which inductor and Triton keep the
    kernels that they compile at run time. A variable that is set in the trainer's environment keeps
    its value.

    The defaults are the folders that SGLang itself uses since 0.5.20 (environ.py,
    third_party_cache_defaults). Inductor's own default is in TMPDIR, which is deleted with the
    server. Inductor and Triton name entries by contents and version, and create them atomically, so
    engines and other runs of the user can share the folders.
    """
    base = Path(os.environ.get("SGLANG_CACHE_DIR") or "~/.cache/sglang").expanduser()
    defaults = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: os.environ.get(name) or str(base / folder) for name, folder in defaults.items()}
