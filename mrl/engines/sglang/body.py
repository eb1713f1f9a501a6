"""The bodies of requests to SGLang's /generate and /start_profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrl.engines.base import Request, SamplingParams

NEVER = 1 << 30


def version_key(version: int, cache: str = "") -> str:
    """Return SGLang's `extra_key` for requests under weights `version`.

    A request reads from the prefix cache only what requests with the same key computed. When the
    weights change, the plug-in `mrl_weight_versions` renews the key in the scheduler. `cache` is a
    suffix that separates calls under one version. It is only for requests with an adapter, whose keys
    are never renewed.
    """
    return f"mrl-version-{version}{cache}"


def adapter_name(version: int, name: str = "mrl") -> str:
    """Return the name under which SGLang loads a version of adapter `name`. The plug-in `mrl_adapter`
    reads the version from this name."""
    return f"{name}@{version}"


def build_request(
    requests: Sequence[Request],
    rids: Sequence[str],
    *,
    return_routes: bool,
    extra_key: str | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Build the body of one POST to /generate for a batch of requests, which reach the scheduler
    together and in this order.

    `rids` are the ids by which SGLang knows the requests. `return_routes` asks for the expert ids of
    each token. `extra_key` is the key of the requests in the prefix cache (`version_key`). `adapter` is
    SGLang's name of the adapter that the requests use; None is the base model.
    """
    body = {
        "rid": list(rids),
        "input_ids": [request.token_ids.tolist() for request in requests],
        "sampling_params": [
            {**_sampling(request.sampling), "sampling_seed": request.seed} for request in requests
        ],
        "return_logprob": True,
        "return_routed_experts": return_routes,
        "stream": True,
    }
    if extra_key is not None:
        body["extra_key"] = extra_key
    if adapter is not None:
        body["lora_path"] = adapter
    masks = [request.sampling.sampling_mask for request in requests]
    return body | {"return_sampling_mask": masks} if any(masks) else body


def profile_request(folder: Path, name: str, *, with_stack: bool) -> dict[str, Any]:
    """Build the body of a POST to /start_profile. SGLang writes traces whose names begin with `name`
    into `folder`; `with_stack` adds Python stacks."""
    return {
        "output_dir": str(folder),
        "profile_prefix": name,
        "activities": ["CPU", *(["GPU"] if torch.cuda.is_available() else [])],
        "with_stack": with_stack,
    }


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
        "stream_interval": NEVER,  # one event at the first token, and the whole answer at the end
    }
    ends = {"stop_token_ids": sampling.stop_token_ids, "stop": sampling.stop}
    params |= {name: list(values) for name, values in ends.items() if values}
    if sampling.min_new_tokens == sampling.max_new_tokens:
        params["ignore_eos"] = True
    elif sampling.min_new_tokens:
        params["min_new_tokens"] = sampling.min_new_tokens
    return params
