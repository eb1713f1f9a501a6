"""This module turns requests into a body for SGLang's /generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.rollout.base import Request, SamplingParams

NEVER = 1 << 30


def version_key(version: int) -> str:
    """Return SGLang's `extra_key` of requests under weights `version`: its prefix cache never gives a
    request what one of another key computed. `mrl_weight_versions` renews it in the scheduler."""
    return f"mrl-version-{version}"


def build_request(
    requests: Sequence[Request],
    rids: Sequence[str],
    *,
    return_routes: bool,
    extra_key: str | None = None,
) -> dict[str, Any]:
    """Build one batched body: its requests reach the scheduler together and in this order."""
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
    masks = [request.sampling.sampling_mask for request in requests]
    return body | {"return_sampling_mask": masks} if any(masks) else body


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
