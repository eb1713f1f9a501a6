"""Encodes sample groups as bytes, for files and for other ranks, and decodes them, without pickle.

The bytes are one safetensors blob. Each tensor holds one field of all samples, concatenated in the
order of the samples. Everything else, including lengths, is JSON in the header.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from moe.trace import empty_trace_ids
from mrl.errors import InputError
from mrl.run.json_lines import finite_or_null
from mrl.sampling_mask import SamplingMask
from mrl.system.files import write_whole
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, VersionSpan

FORMAT = "mrl-rollouts-2"


def save_groups(path: Path, groups: Sequence[SampleGroup]) -> None:
    """Write all groups to `path` atomically."""
    write_whole(path, encode_groups(groups))


def load_groups(path: Path) -> list[SampleGroup]:
    """Return the groups that `save_groups` wrote, bit for bit. Raises InputError for any other file."""
    try:
        return decode_groups(path.read_bytes())
    except OSError as error:
        raise InputError(f"rollouts {path}: {error.strerror}; give a file of save_groups") from None
    except ValueError as error:
        raise InputError(f"rollouts {path}: {error}") from None


def is_held(group: SampleGroup) -> bool:
    """Return whether this rank holds the tokens of all samples of the group."""
    return all(sample.is_held for sample in group.samples)


def outline(group: SampleGroup) -> SampleGroup:
    """Return a copy of the group for ranks that do not hold its samples.

    Token ids, expert ids, log-probs, gate weights and sampling masks are on the meta device, with a
    shape but no content, and `texts` is None.
    """

    def of_sample(sample: Sample) -> Sample:
        return dataclasses.replace(
            sample,
            token_ids=sample.token_ids.to("meta"),
            rollout_logprobs=sample.rollout_logprobs.to("meta"),
            routing=None if sample.routing is None else of_trace(sample.routing),
            sampling_mask=sample.sampling_mask and sample.sampling_mask.outline(),
        )

    def of_trace(trace: RoutingTrace) -> RoutingTrace:
        weights = None if trace.expert_weights is None else trace.expert_weights.to("meta")
        ids = trace.expert_ids.to("meta")
        return dataclasses.replace(trace, expert_ids=ids, expert_weights=weights)

    return dataclasses.replace(group, samples=[of_sample(s) for s in group.samples], texts=None)


def encode_groups(
    groups: Sequence[SampleGroup], *, with_routes: bool = True, with_tokens: bool = True
) -> bytes:
    """Return the groups as bytes. Their tensors must be on the CPU.

    `with_routes=False` leaves out the routes, which are the expert ids and gate weights of tokens.
    `with_tokens=False` leaves out the tokens, log-probs and sampling masks of the samples. In
    decoded groups, tensors that were left out are on the meta device. Without routes and tokens,
    decoding gives the `outline` of each group. Without tokens, a loss mask is encoded only if it
    differs from the mask that is true for exactly the tokens that the policy sampled.

    Raises ValueError if the routes of samples differ in shape, or if routes that are to be encoded
    are on another rank.
    """
    samples = [sample for group in groups for sample in group.samples]
    traces = [sample.routing for sample in samples if sample.routing is not None]
    shapes = {
        (t.expert_ids.dtype, *t.expert_ids.shape[1:], t.layer_numbers, t.expert_weights is None)
        for t in traces
    }
    if len(shapes) > 1:
        raise ValueError(f"rollouts: expected one shape of routes in all samples, got {shapes}")
    tensors = {
        "prompt_ids": _join((g.prompt.token_ids for g in groups), torch.int64),
        "rewards": _join((g.rewards for g in groups if g.rewards is not None), torch.float32),
        "advantages": _join(
            (g.advantages for g in groups if g.advantages is not None), torch.float32
        ),
    }
    masked = samples if with_tokens else [s for s in samples if not _trains_all_chosen(s)]
    tensors["loss_mask"] = _join((s.loss_mask for s in masked), torch.bool)
    if with_tokens:
        tensors["token_ids"] = _join((s.token_ids for s in samples), torch.int64)
        tensors["rollout_logprobs"] = _join((s.rollout_logprobs for s in samples), torch.float32)
        masks = [s.sampling_mask for s in samples if s.sampling_mask is not None]
        if masks:
            tensors["kept_ids"] = torch.cat([mask.token_ids for mask in masks])
            tensors["kept_counts"] = torch.cat([mask.counts for mask in masks])
    if traces and with_routes:
        if any(trace.expert_ids.is_meta for trace in traces):
            raise ValueError("rollouts: expected routes with ids, another rank holds some of them")
        tensors["expert_ids"] = torch.cat([trace.expert_ids for trace in traces])
        weights = [t.expert_weights for t in traces if t.expert_weights is not None]
        if weights:
            tensors["expert_weights"] = torch.cat(weights)
    record = {
        "layer_numbers": traces[0].layer_numbers if traces else [],
        "groups": [_group_record(group, has_masks=with_tokens) for group in groups],
    }
    return save(tensors, {"format": FORMAT, "record": json.dumps(record)})


def decode_groups(data: bytes) -> list[SampleGroup]:
    """Return the groups that `encode_groups` encoded. Raises ValueError for all other bytes."""
    try:
        return _decode(data)
    except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not what save_groups writes ({type(error).__name__}: {error})") from None


def _decode(data: bytes) -> list[SampleGroup]:
    try:
        header_size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + header_size]).get("__metadata__") or {}
        tensors = load(data)
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"not a safetensors blob: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"format is {metadata.get('format')!r}, expected {FORMAT!r}")
    record = json.loads(metadata["record"])
    take = {name: _reader(name, tensor) for name, tensor in tensors.items()}
    layer_numbers = tuple(record["layer_numbers"])
    return [_read_group(group, take, layer_numbers) for group in record["groups"]]


def _join(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    parts = list(tensors)
    for part in parts:
        if part.dtype != dtype:
            raise ValueError(f"rollouts: got a tensor of {part.dtype}, expected {dtype}")
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _reader(name: str, tensor: Tensor) -> Callable[[int], Tensor]:
    """Return a function `take(count)` that returns a copy of the next `count` rows of the tensor.

    It raises ValueError if fewer rows are left.
    """
    start = 0

    def take(count: int) -> Tensor:
        nonlocal start
        rows = tensor[start : start + count]
        if len(rows) != count:
            raise ValueError(f"{name}: got {len(rows)} rows at {start}, expected {count}")
        start += count
        return rows.clone()

    return take


def _chosen(num_tokens: int, spans: Iterable[VersionSpan]) -> Tensor:
    """Return bool[num_tokens]: true for the tokens in `spans`, which the policy sampled."""
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


def _trains_all_chosen(sample: Sample) -> bool:
    chosen = _chosen(len(sample.token_ids), sample.weight_versions)
    return torch.equal(sample.loss_mask, chosen)


def _group_record(group: SampleGroup, *, has_masks: bool) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt_id": prompt.prompt_id,
        "num_prompt_tokens": prompt.token_ids.numel(),
        "content": prompt.content,
        "columns": prompt.columns,
        "source": prompt.source,
        **({} if prompt.reward is None else {"reward": prompt.reward}),
        **({} if prompt.source_name is None else {"source_name": prompt.source_name}),
        "num_rewards": None if group.rewards is None else group.rewards.numel(),
        "num_advantages": None if group.advantages is None else group.advantages.numel(),
        **_parts_record(group),
        **({} if group.episodes is None else {"episodes": group.episodes}),
        "samples": [
            _sample_record(sample) | ({} if has_masks else {"trains": _trained(sample)})
            for sample in group.samples
        ],
    }


def _parts_record(group: SampleGroup) -> dict[str, Any]:
    """Return a dict with only the field `reward_parts`; empty if the group's rewards have no parts."""
    if group.reward_parts is None:
        return {}
    return {"reward_parts": {k: finite_or_null(v.tolist()) for k, v in group.reward_parts.items()}}


def _read_parts(record: dict[str, list[float | None]] | None) -> dict[str, Tensor] | None:
    if record is None:
        return None
    return {
        name: torch.tensor([math.nan if value is None else value for value in values])
        for name, values in record.items()
    }


def _trained(sample: Sample) -> str:
    """Return how a sample's loss mask is encoded: `mask` (in full) or `chosen` (not at all).

    `chosen`: the mask is true for exactly the tokens that the policy sampled (`_chosen`).
    """
    return "chosen" if _trains_all_chosen(sample) else "mask"


def _sample_record(sample: Sample) -> dict[str, Any]:
    trace = sample.routing
    return {
        "group_id": sample.group_id,
        "num_tokens": sample.token_ids.numel(),
        "prompt_len": sample.prompt_len,
        "weight_versions": _span_records(sample.weight_versions),
        "finish_reason": sample.finish_reason,
        "routing": trace
        and {
            "num_rows": trace.num_rows,
            "num_experts": trace.num_experts,
            "topk": trace.expert_ids.shape[2],
            "has_weights": trace.expert_weights is not None,
            "row_versions": _span_records(trace.row_versions),
            "num_cached_rows": trace.num_cached_rows,
            "num_recomputed_rows": trace.num_recomputed_rows,
        },
        **({"turn_rewards": sample.turn_rewards} if sample.turn_rewards else {}),
        **({"num_kept": len(mask.token_ids)} if (mask := sample.sampling_mask) else {}),
    }


def _span_records(spans: Iterable[VersionSpan]) -> list[list[int]]:
    return [[span.version, span.start, span.end] for span in spans]


def _read_spans(record: Iterable[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*span) for span in record)


def _read_group(
    record: dict[str, Any], take: dict[str, Callable[[int], Tensor]], layer_numbers: tuple[int, ...]
) -> SampleGroup:
    def optional(name: str) -> Tensor | None:
        count = record[f"num_{name}"]
        return None if count is None else take[name](count)

    return SampleGroup(
        prompt=Prompt(
            prompt_id=record["prompt_id"],
            token_ids=take["prompt_ids"](record["num_prompt_tokens"]),
            content=record["content"],
            columns=record["columns"],
            source=record["source"],
            reward=record.get("reward"),
            source_name=record.get("source_name"),
        ),
        samples=[_read_sample(sample, take, layer_numbers) for sample in record["samples"]],
        rewards=optional("rewards"),
        reward_parts=_read_parts(record.get("reward_parts")),
        advantages=optional("advantages"),
        episodes=tuple(record["episodes"]) if "episodes" in record else None,
    )


def _read_sample(
    record: dict[str, Any], take: dict[str, Callable[[int], Tensor]], layer_numbers: tuple[int, ...]
) -> Sample:
    num_tokens, routing = record["num_tokens"], record["routing"]
    if not 0 < record["prompt_len"] <= num_tokens:
        raise ValueError(f"a prompt of {record['prompt_len']} of {num_tokens} tokens")
    spans = _read_spans(record["weight_versions"])
    if "token_ids" in take:
        token_ids, logprobs = take["token_ids"](num_tokens), take["rollout_logprobs"](num_tokens)
    else:
        token_ids = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        logprobs = torch.empty(num_tokens, device="meta")
    is_chosen = record.get("trains") == "chosen"
    return Sample(
        group_id=record["group_id"],
        token_ids=token_ids,
        prompt_len=record["prompt_len"],
        loss_mask=_chosen(num_tokens, spans) if is_chosen else take["loss_mask"](num_tokens),
        rollout_logprobs=logprobs,
        weight_versions=spans,
        finish_reason=record["finish_reason"],
        routing=routing and _read_trace(routing, take, layer_numbers),
        turn_rewards=tuple((end, reward) for end, reward in record.get("turn_rewards", ())),
        sampling_mask=_read_mask(record, take),
    )


def _read_mask(
    record: dict[str, Any], take: dict[str, Callable[[int], Tensor]]
) -> SamplingMask | None:
    """Return the sampling mask of the next sample; None if the sample has no sampling mask."""
    if "num_kept" not in record:
        return None
    sizes = {"kept_ids": record["num_kept"], "kept_counts": record["num_tokens"]}
    if "kept_ids" in take:
        return SamplingMask(*(take[name](size) for name, size in sizes.items()))
    empty = [torch.empty(size, dtype=torch.int32, device="meta") for size in sizes.values()]
    return SamplingMask(*empty)


def _read_trace(
    record: dict[str, Any], take: dict[str, Callable[[int], Tensor]], layer_numbers: tuple[int, ...]
) -> RoutingTrace:
    num_rows, num_experts = record["num_rows"], record["num_experts"]
    weights = None
    if "expert_ids" in take:
        ids = take["expert_ids"](num_rows)
        weights = take["expert_weights"](num_rows) if record["has_weights"] else None
    else:
        ids = empty_trace_ids(num_rows, len(layer_numbers), num_experts, record["topk"])
        if record["has_weights"]:
            weights = torch.empty(ids.shape, device="meta")
    return RoutingTrace(
        expert_ids=ids,
        layer_numbers=layer_numbers,
        num_experts=num_experts,
        row_versions=_read_spans(record["row_versions"]),
        num_cached_rows=record["num_cached_rows"],
        num_recomputed_rows=record["num_recomputed_rows"],
        expert_weights=weights,
    )
