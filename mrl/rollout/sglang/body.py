"""This module turns requests into bodies for SGLang's /generate and /start_profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrl.rollout.base import Request, SamplingParams

NEVER = 1 << 30


def version_key(version: int, cache: str = "") -> str:
    """Return SGLang's `extra_key` of requests under weights `version`: its prefix cache never gives a
    request what one of another key computed. `mrl_weight_versions` renews it in the scheduler. `cache`
    sets calls of one version apart; where it is given, requests have an adapter and keep their key."""
    return f"mrl-version-{version}{cache}"


def adapter_name(version: int, name: str = "mrl") -> str:
    """Return SGLang's name of a version of adapter `name`; `mrl_adapter` reads the version in it."""
    return f"{name}@{version}"


def build_request(
    requests: Sequence[Request],
    rids: Sequence[str],
    *,
    return_routes: bool,
    extra_key: str | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Build one batched body: its requests reach the scheduler together and in this order.

    `adapter` is the name of the one that they go to; None is the base.
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
    """Build the body of /start_profile."""
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
