"""SGLang's /generate: from prompts to a request, and from its answer to Samples.

P prompt tokens, C completion tokens, T = P + C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe.trace import decode_routes
from mrl.errors import InputError
from mrl.rollout.base import SamplingParams
from mrl.types import RoutingTrace, Sample, VersionSpan


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    num_hidden_layers: int
    moe_layer_numbers: tuple[int, ...]
    """Megatron's, 1-based."""
    num_experts: int
    topk: int


def route_shape(config: Any) -> RouteShape:
    """Read it from a Hugging Face model config. Raises InputError where there are no experts."""
    num_experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    topk = _first(config, "num_experts_per_tok")
    if not num_experts or not topk:
        raise InputError(
            f"model {config.model_type!r}: expected num_experts and num_experts_per_tok in "
            "config.json, found none; set moe.routing_replay=off for a dense model"
        )
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    num_dense_first = getattr(config, "first_k_dense_replace", None) or 0
    sparse_step = getattr(config, "decoder_sparse_step", None) or 1
    layer_numbers = tuple(
        i + 1
        for i in range(config.num_hidden_layers)
        if i not in dense and i >= num_dense_first and (i + 1) % sparse_step == 0
    )
    return RouteShape(config.num_hidden_layers, layer_numbers, num_experts, topk)


def refuse_unfaithful(config: Any, *, on_gpu: bool, return_routes: bool) -> None:
    """Raise InputError for a model that SGLang would run as another one, or not at all.

    Seen in 0.5.20: its Qwen MoE models make every layer sparse, whatever config.json says (the
    experts of a dense layer keep their random initialisation, and nothing is logged); its Mixtral
    does not tell the recorder of routes which layer it is; its Qwen2-MoE adds the shared expert
    with a Triton kernel; its attention for CPUs takes the cached latents of DeepSeek's prompts for
    values.
    """
    if config.model_type == "mixtral" and return_routes:
        raise InputError(
            "model 'mixtral': SGLang cannot record its routes; expected moe.routing_replay=r2 or off"
        )
    not_on_a_cpu = {
        "qwen2_moe": "SGLang's shared expert does not run on a CPU",
        "deepseek_v3": "SGLang's latent attention is wrong on a CPU",
    }
    if config.model_type in not_on_a_cpu and not on_gpu:
        raise InputError(
            f"model {config.model_type!r}: {not_on_a_cpu[config.model_type]}; roll it out on GPUs"
        )
    dense = list(getattr(config, "mlp_only_layers", None) or [])
    sparse_step = getattr(config, "decoder_sparse_step", None) or 1
    if config.model_type in ("qwen2_moe", "qwen3_moe") and (dense or sparse_step != 1):
        raise InputError(
            f"model {config.model_type!r} with mlp_only_layers={dense} and decoder_sparse_step="
            f"{sparse_step}: SGLang would run every layer as MoE; expected [] and 1"
        )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def build_request(
    prompt_ids: Sequence[list[int]],
    seeds: Sequence[int],
    sampling: SamplingParams,
    *,
    return_routes: bool,
) -> dict[str, Any]:
    """The body of one batched request: they reach the scheduler together and in this order."""
    common = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "skip_special_tokens": False,
    }
    if sampling.stop_token_ids:
        common["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.min_new_tokens == sampling.max_new_tokens:
        common["ignore_eos"] = True
    elif sampling.min_new_tokens:
        common["min_new_tokens"] = sampling.min_new_tokens
    return {
        "input_ids": list(prompt_ids),
        "sampling_params": [{**common, "sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
        "return_routed_experts": return_routes,
    }


def decode_sample(
    answer: dict[str, Any],
    *,
    group_id: int,
    prompt_ids: list[int],
    version: int,
    shape: RouteShape | None,
) -> Sample:
    """One answer of the server; routes where `shape` is given.

    Raises RuntimeError where the sample was aborted, came from other weights than `version`, or
    holds a field of the wrong length.
    """
    meta = answer["meta_info"]
    where = f"group {group_id}"
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in ("stop", "length"):
        raise RuntimeError(
            f"{where}: finish_reason {meta.get('finish_reason')}, expected stop or length"
        )
    _check_version(meta, version, where)
    output = answer["output_ids"]
    _expect(where, "completion_tokens", meta["completion_tokens"], len(output))
    _expect(where, "prompt_tokens", meta["prompt_tokens"], len(prompt_ids))
    entries = meta["output_token_logprobs"]
    _expect(where, "output_token_logprobs", len(entries), len(output))
    if [entry[1] for entry in entries] != output:
        raise RuntimeError(f"{where}: the log-probs belong to other tokens than output_ids")
    prompt_len, num_tokens = len(prompt_ids), len(prompt_ids) + len(output)
    logprobs = torch.zeros(num_tokens, dtype=torch.float32)
    logprobs[prompt_len:] = torch.tensor([entry[0] for entry in entries], dtype=torch.float32)
    loss_mask = torch.zeros(num_tokens, dtype=torch.bool)
    loss_mask[prompt_len:] = True
    return Sample(
        group_id=group_id,
        token_ids=torch.tensor(prompt_ids + output, dtype=torch.int64),
        prompt_len=prompt_len,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        weight_versions=(VersionSpan(version, prompt_len, num_tokens),),
        finish_reason=reason,
        routing=_decode_routing(meta, num_tokens, version, shape, where) if shape else None,
    )


def _decode_routing(
    meta: dict[str, Any], num_tokens: int, version: int, shape: RouteShape, where: str
) -> RoutingTrace:
    payload = meta.get("routed_experts")
    if payload is None:
        raise RuntimeError(f"{where}: the server returned no routed_experts, expected base64")
    try:
        return decode_routes(
            payload,
            num_tokens=num_tokens,
            num_hidden_layers=shape.num_hidden_layers,
            moe_layer_numbers=shape.moe_layer_numbers,
            num_experts=shape.num_experts,
            topk=shape.topk,
            row_versions=[VersionSpan(version, 0, num_tokens - 1)],
            num_cached_rows=meta["cached_tokens"],
        )
    except ValueError as error:
        raise RuntimeError(f"{where}: {error}") from error


def _check_version(meta: dict[str, Any], version: int, where: str) -> None:
    """`weight_versions` (0.5.20 and later) lists every version that took part."""
    spans = meta.get("weight_versions") or []
    seen = {str(span["version"]) for span in spans} | {str(meta.get("weight_version"))}
    if seen != {str(version)}:
        raise RuntimeError(
            f"{where}: sampled with weight version {', '.join(sorted(seen))}, expected {version}, "
            "the version last pushed"
        )


def _expect(where: str, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise RuntimeError(f"{where}: {what}: got {got}, expected {expected}")
