"""Checks `rollout.server_args`, the fields of SGLang's ServerArgs in a recipe, without importing
SGLang."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mrl.engines.sglang.fields import Field, read_fields
from mrl.errors import InputError

OWNED = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "rollout.dtype",
    "tp_size": "rollout.tensor_parallel_size",
    "ep_size": "rollout.expert_parallel_size",
    "dp_size": "rollout.data_parallel_attention_size",
    "enable_dp_attention": "rollout.data_parallel_attention_size",
    "context_length": "rollout.context_len",
    "max_total_tokens": "rollout.max_total_tokens",
    "max_running_requests": "rollout.max_running_requests",
    "mem_fraction_static": "rollout.mem_fraction_static",
    "enable_return_routed_experts": "moe.routing_replay",
    "quantization": "rollout.quantization",
    "random_seed": "seed",
    "enable_lora": "lora.rollout",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "experts_shared_outer_loras": "lora.experts",
}
"""Fields that another recipe key sets, mapped to that key."""
FIXED = {
    "the server is a child process on loopback, behind a key": (
        "host", "port", "api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
        "ssl_keyfile_password", "enable_http2", "grpc_mode", "fastapi_root_path", "use_ray",
        "skip_tokenizer_init", "tokenizer_worker_num", "skip_server_warmup",
    ),
    "SGLang would print the key": ("log_level", "log_level_http"),
    "nodes and devices follow from rollout.tensor_parallel_size and the ranks of a node": (
        "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step", "device",
    ),
    "every rank of an engine holds a share of every layer": ("pp_size", "disaggregation_mode"),
    "digests and routes name experts by their own numbers, and each is in one place": (
        "enable_eplb", "ep_num_redundant_experts", "init_expert_location", "elastic_ep_backend",
        "enable_elastic_expert_backup", "moe_dp_size", "attn_cp_size", "dcp_size", "moe_dense_tp_size",
    ),
    "weights come from the trainer, with a version, and leave the GPU between rollouts": (
        "weight_version", "enable_memory_saver", "enable_weights_cpu_backup", "weight_cache_mode",
    ),
    "adapters come from the trainer, and go when no request uses them": (
        "lora_paths", "max_loaded_loras", "enable_lora_overlap_loading",
    ),
    "requests say how they are sampled, and log-probs and masks rely on it": (
        "preferred_sampling_params",
    ),
    "code of the checkpoint never runs": ("trust_remote_code",),
    "routes are not recorded for drafted tokens": ("speculative_algorithm",),
}  # fmt: skip
"""Fields that no recipe may set, grouped by the reason that the error message gives."""


def check_server_args(server_args: Mapping[str, Any]) -> None:
    """Raise InputError for a field that mrl sets itself or that SGLang does not have, and for a value
    that has the wrong type, is not among the field's choices, or is not valid JSON."""
    reasons = {name: reason for reason, names in FIXED.items() for name in names}
    known = fields() if server_args else {}
    for name, value in server_args.items():
        where = f"rollout.server_args.{name}: got {value!r}"
        if name in OWNED:
            raise InputError(f"{where}, and another key sets this; use {OWNED[name]}")
        if name in reasons:
            raise InputError(f"{where}, but mrl sets this itself: {reasons[name]}; leave it out")
        if known and name not in known:
            raise InputError(
                f"{where}, but ServerArgs of the installed SGLang has no such field"
                f"{_suggest(name, known)}"
            )
        if known and (expected := known[name].problem(value)):
            raise InputError(f"{where}, but the installed SGLang expects {expected}")


def field_names() -> frozenset[str]:
    """Return the names of all fields of the installed ServerArgs; empty if SGLang is not installed."""
    return frozenset(fields())


@cache
def fields() -> dict[str, Field]:
    """Return the fields of the installed ServerArgs by name; empty if SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return {}
    return read_fields(Path(next(iter(spec.submodule_search_locations))) / "srt")


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; look it up in SGLang's server arguments"
