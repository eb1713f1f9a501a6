"""Turns the answers of SGLang's /generate into completions.

Dimensions: P tokens of a request, C tokens of its completion, T = P + C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch

from moe.trace import decode_base64, decode_routes
from mrl.engines.base import Completion, Request
from mrl.engines.sglang.route_memory import RouteReader, find_reference
from mrl.engines.sglang.spans import cut_spans, row_versions, version_spans
from mrl.errors import InputError
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, VersionSpan


@dataclass(frozen=True)
class RouteShape:
    """The shape of a model's routes."""

    num_hidden_layers: int
    moe_layer_numbers: tuple[int, ...]
    """Megatron's layer numbers of the MoE layers, counted from 1."""
    num_experts: int
    topk: int
    with_weights: bool = False
    """Whether the engine returns gate weights along with the expert ids."""


def route_shape(config: Any, *, with_weights: bool = False) -> RouteShape:
    """Return the shape of a model's routes from its Hugging Face config. Raises InputError for a model
    without experts."""
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
    return RouteShape(config.num_hidden_layers, layer_numbers, num_experts, topk, with_weights)


def refuse_weights(*, on_gpu: bool, return_routes: bool) -> None:
    """Raise InputError if the engine cannot return gate weights (`rollout.return_routing_weights`)."""
    if on_gpu or not return_routes:
        given = "an engine on GPUs" if on_gpu else "no routes"
        raise InputError(
            f"rollout.return_routing_weights is on with {given}; expected "
            "moe.routing_replay=r3 and an engine on CPUs"
        )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def finish_reason(answer: dict[str, Any]) -> str | None:
    """Return `stop`, `length` or `abort`; None if the request is not finished."""
    return (answer["meta_info"].get("finish_reason") or {}).get("type")


def refusal(answer: dict[str, Any]) -> str:
    """Return why SGLang refused a request; empty if `answer`, from the stream, is no refusal."""
    reason = answer["meta_info"].get("finish_reason") or {}
    if reason.get("type") != "abort" or reason.get("status_code") != HTTPStatus.BAD_REQUEST:
        return ""
    return " ".join(str(reason.get("message")).split())


@dataclass(frozen=True)
class Expected:
    """What the answer to one request may contain."""

    versions: Sequence[int]
    """The weight versions in force since the request was sent, the oldest first. Each update while the
    request is in flight adds one version."""
    cached_versions: Sequence[int]
    """The versions whose prefixes the request may have read from the cache. If the request has a cache
    key (`version_key`), this is only `versions[0]`."""
    shape: RouteShape | None
    """The shape of the model's routes; None if routes are off."""
    retracted: bool
    """Whether a pause retracted the running requests. Only used if the answer does not say how often
    the request was retracted."""
    routes: RouteReader
    """Reader of the routes that the server wrote into memory."""


def was_retracted(meta: Mapping[str, Any], expected: Expected) -> bool:
    """Return whether the request was, or may have been, retracted and computed again."""
    num_retractions = meta.get("num_retractions")
    return expected.retracted if num_retractions is None else num_retractions > 0


def decode_completion(answer: dict[str, Any], request: Request, expected: Expected) -> Completion:
    """Decode one finished answer of the server.

    Raises RuntimeError if it came from unexpected weights, or a field has the wrong length.
    """
    try:
        return _decode(answer, request, expected)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise RuntimeError(f"{request.request_id}: a damaged answer: {error!r}") from error


def _decode(answer: dict[str, Any], request: Request, expected: Expected) -> Completion:
    meta, output = answer["meta_info"], answer["output_ids"]
    where, prompt_len = request.request_id, len(request.token_ids)
    reason = finish_reason(answer)
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"{where}: finish_reason {reason!r}, expected stop, length or abort")
    if reason == "abort" and "prompt_tokens" not in meta:  # aborted in the queue: no other fields
        return Completion(
            where, torch.empty(0, dtype=torch.int64), torch.empty(0), "abort", (), None
        )
    _expect(where, "completion_tokens", meta["completion_tokens"], len(output))
    _expect(where, "prompt_tokens", meta["prompt_tokens"], prompt_len)
    entries = meta.get("output_token_logprobs") or []
    _expect(where, "output_token_logprobs", len(entries), len(output))
    if [entry[1] for entry in entries] != output:
        raise RuntimeError(f"{where}: the log-probs belong to other tokens than output_ids")
    if not all(entry[0] is not None and abs(entry[0]) < float("inf") for entry in entries):
        raise RuntimeError(
            f"{where}: the engine's log-probs are not finite: its weights or its cache have NaN or inf"
        )
    spans = version_spans(meta, prompt_len, len(output), expected.versions, where)
    routing = None
    if expected.shape and output:
        routing = _decode_routing(answer, spans, prompt_len, expected, expected.shape, where)
    logprobs, mask = [entry[0] for entry in entries], None
    if request.sampling.sampling_mask:
        logprobs, mask = _sampling_mask(meta, output, where)
    completion = Completion(
        request_id=where,
        output_ids=torch.tensor(output, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        finish_reason=reason,
        weight_versions=spans,
        routing=routing,
        num_retractions=meta.get("num_retractions") or 0,
        sampling_mask=mask,
    )
    return without_last_token(completion) if reason == "abort" and output else completion


def _sampling_mask(
    meta: dict[str, Any], output: Sequence[int], where: str
) -> tuple[list[float], SamplingMask]:
    """Return (log-prob of each output token under the truncated distribution, for each output token the
    set of tokens that the truncation kept). `where` begins error messages."""
    sets, logprobs = (meta.get(f"output_token_sampling_{name}") for name in ("mask", "logprobs"))
    if sets is None or logprobs is None:
        raise RuntimeError(
            f"{where}: the server returned no output_token_sampling_mask; rollout.sampling_mask needs "
            "SGLang 0.5.20 or later"
        )
    _expect(where, "output_token_sampling_mask", len(sets), len(output))
    _expect(where, "output_token_sampling_logprobs", len(logprobs), len(output))
    if any(token not in (kept or ()) for token, kept in zip(output, sets, strict=True)):
        raise RuntimeError(f"{where}: a token was sampled that is not in its sampling mask")
    return logprobs, SamplingMask.of(sets)


def without_last_token(completion: Completion) -> Completion:
    """Remove the last token from a completion, together with its log-prob and the last row of routes,
    and return the result.

    SGLang checks for an abort before it checks for the end of the sequence. If the last token of an
    aborted completion ends the sequence, SGLang does not report this, and the sample would be continued
    beyond its end. Without the token, the request that continues the sample draws the token again.
    """
    num_output = len(completion.output_ids) - 1
    trace = completion.routing if num_output else None
    if trace is not None:
        num_rows = len(trace.expert_ids) - 1
        trace = dataclasses.replace(
            trace,
            expert_ids=trace.expert_ids[:-1],
            expert_weights=None if trace.expert_weights is None else trace.expert_weights[:-1],
            row_versions=cut_spans(trace.row_versions, num_rows),
            num_cached_rows=min(trace.num_cached_rows, num_rows),
            num_recomputed_rows=min(trace.num_recomputed_rows, num_rows),
        )
    start = completion.weight_versions[0].start
    return dataclasses.replace(
        completion,
        output_ids=completion.output_ids[:-1],
        logprobs=completion.logprobs[:-1],
        sampling_mask=completion.sampling_mask and completion.sampling_mask.cut(num_output),
        weight_versions=cut_spans(completion.weight_versions, start + num_output),
        routing=trace,
    )


def _decode_routing(
    answer: dict[str, Any],
    spans: Sequence[VersionSpan],
    prompt_len: int,
    expected: Expected,
    shape: RouteShape,
    where: str,
) -> RoutingTrace:
    meta = answer["meta_info"]
    num_cached, retracted = meta["cached_tokens"], was_retracted(meta, expected)
    rows = row_versions(
        spans,
        prompt_len,
        num_cached,
        expected.versions,
        expected.cached_versions,
        retracted=retracted,
        aborted=finish_reason(answer) == "abort",
    )
    payload = meta.get("routed_experts")
    if payload is None:
        raise RuntimeError(f"{where}: the server returned no routed_experts, expected base64")
    num_rows = rows[-1].end
    try:
        reference = find_reference(payload)
        return decode_routes(
            decode_base64(payload) if reference is None else expected.routes.take(reference),
            num_tokens=num_rows + 1,
            num_hidden_layers=shape.num_hidden_layers,
            moe_layer_numbers=shape.moe_layer_numbers,
            num_experts=shape.num_experts,
            topk=shape.topk,
            row_versions=rows,
            num_cached_rows=min(num_cached, num_rows),
            num_recomputed_rows=num_rows if retracted else 0,
            with_weights=shape.with_weights,
        )
    except ValueError as error:
        raise RuntimeError(f"{where}: {error}") from error


def _expect(where: str, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise RuntimeError(f"{where}: {what}: got {got}, expected {expected}")
