"""The routes that an engine returns with a sample, made into a `RoutingTrace`, and traces without ids.

Dimensions: T all tokens of a sample, H hidden layers (dense ones too), L MoE layers, K experts per
token. SGLang sends int32 [T-1, H, K] in C order: the prompt is included, the last token has no row,
dense layers hold placeholders, shared experts are left out. With weights the rows are [T-1, H, 2K]:
K ids, then the bits of the K float32 gate weights. They come as base64, or through memory in one
byte or two an id (`mrl.rollout.sglang.route_memory`).
"""

from __future__ import annotations

import binascii
import dataclasses
from collections.abc import Sequence

import numpy as np
import pybase64
import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.kernels.routes import pack_routes, unpack_routes
from mrl.types import PackedRoutes, RoutingTrace, VersionSpan


def decode_base64(payload: str) -> np.ndarray:
    """i4[n]: what SGLang sends. Raises ValueError where the payload is no base64 of whole numbers."""
    try:
        raw = pybase64.b64decode(payload, validate=True)  # 40 times as fast as base64
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routes: the payload is not base64: {error}") from None
    if len(raw) % 4:
        raise ValueError(f"routes: got {len(raw)} bytes, expected 4 for each number")
    return np.frombuffer(raw, dtype="<i4")  # little-endian whatever this machine is


def decode_routes(
    numbers: np.ndarray,
    *,
    num_tokens: int,
    num_hidden_layers: int,
    moe_layer_numbers: Sequence[int],
    num_experts: int,
    topk: int,
    row_versions: Sequence[VersionSpan],
    num_cached_rows: int,
    num_recomputed_rows: int = 0,
    with_weights: bool = False,
) -> RoutingTrace:
    """Drop the dense layers and narrow to u8[T-1, L, K], or u16 above 256 experts.

    `numbers`: flat, of any integer type. `moe_layer_numbers` are Megatron's, 1-based. Raises InputError
    for impossible layer numbers and ValueError where there are too few or too many numbers, an expert
    id is out of range or repeated in a row, or a weight is negative or no number.
    """
    layers = np.asarray(moe_layer_numbers, dtype=np.int64) - 1
    if not len(layers) or layers.min() < 0 or layers.max() >= num_hidden_layers:
        raise InputError(
            f"routes: MoE layer numbers {list(moe_layer_numbers)} given, expected at least one, "
            f"all from 1 to {num_hidden_layers}"
        )
    num_rows = num_tokens - 1
    width = 2 * topk if with_weights else topk
    expected = num_rows * num_hidden_layers * width
    if len(numbers) != expected:
        raise ValueError(
            f"routes: got {len(numbers)} numbers ({len(numbers) / (num_hidden_layers * width):g} "
            f"rows), expected {expected}: {num_tokens} tokens less the last = {num_rows} rows x "
            f"{num_hidden_layers} layers x top-{topk}{' with weights (x 2)' * with_weights}"
        )
    if not 0 <= num_cached_rows <= num_rows:
        raise ValueError(f"routes: got {num_cached_rows} cached rows, expected 0 to {num_rows}")
    if with_weights:  # bits of 32
        numbers = numbers.astype("<i4", copy=False)
    ids = numbers.reshape(num_rows, num_hidden_layers, width)
    if len(layers) != num_hidden_layers:
        ids = ids[:, layers]
    weights = _weights_of(ids[..., topk:], moe_layer_numbers) if with_weights else None
    ids = ids[..., :topk]
    _refuse_unknown(ids, moe_layer_numbers, num_experts)
    narrow = ids.astype(np.uint8 if num_experts <= 256 else np.uint16, copy=False)
    expert_ids = torch.from_numpy(np.ascontiguousarray(narrow))
    _refuse_repeats(expert_ids, moe_layer_numbers, num_experts)
    return RoutingTrace(
        expert_ids=expert_ids,
        layer_numbers=tuple(moe_layer_numbers),
        num_experts=num_experts,
        row_versions=tuple(row_versions),
        num_cached_rows=num_cached_rows,
        num_recomputed_rows=num_recomputed_rows,
        expert_weights=weights,
    )


def _weights_of(bits: np.ndarray, layer_numbers: Sequence[int]) -> Tensor:
    """int32 [T-1, L, K] -> f32 of the same bits. Raises ValueError for what is no gate weight."""
    weights = np.ascontiguousarray(bits).view("<f4")
    wrong = ~(weights >= 0) | ~np.isfinite(weights)
    if wrong.any():
        row, layer, _ = np.argwhere(wrong)[0]
        raise ValueError(
            f"routes: token {row} in MoE layer {layer_numbers[layer]} has weights "
            f"{weights[row, layer].tolist()}, expected finite numbers from 0 on"
        )
    return torch.from_numpy(weights.copy())


def _refuse_unknown(ids: np.ndarray, layer_numbers: Sequence[int], num_experts: int) -> None:
    """Raise ValueError for an id out of range, before narrowing: -1 would come out as expert 255."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        row, layer, _ = np.argwhere((ids < 0) | (ids >= num_experts))[0]
        raise ValueError(
            f"routes: token {row} in MoE layer {layer_numbers[layer]} has experts "
            f"{ids[row, layer].tolist()}, expected ids from 0 to {num_experts - 1}"
        )


def _refuse_repeats(ids: Tensor, layer_numbers: Sequence[int], num_experts: int) -> None:
    """Raise ValueError where a row of [T-1, L, K] holds an expert twice."""
    try:
        pack_routes(ids, num_experts)  # the check of the kernel is ten times as fast as a sort
    except ValueError as error:
        ordered = ids.long().sort(dim=-1).values
        places = (ordered[..., 1:] == ordered[..., :-1]).nonzero()
        if not len(places):
            raise
        row, layer, _ = places[0].tolist()
        raise ValueError(
            f"routes: token {row} repeats an expert in MoE layer {layer_numbers[layer]}: "
            f"{ids[row, layer].tolist()}"
        ) from error


def empty_trace_ids(num_rows: int, num_layers: int, num_experts: int, topk: int) -> Tensor:
    """`RoutingTrace.expert_ids` of a trace whose ids another rank holds."""
    return torch.empty((num_rows, num_layers, topk), dtype=narrow_dtype(num_experts), device="meta")


def narrow_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of `RoutingTrace.expert_ids`."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


def unpack_trace(routes: PackedRoutes, trace: RoutingTrace) -> RoutingTrace:
    """`trace` with the ids of `routes`, which holds its T-1 rows and all its layers."""
    num_rows, num_layers, _ = routes.packed.shape
    ids = unpack_routes(
        routes.packed,
        num_experts=routes.num_experts,
        topk=routes.topk,
        layers=range(num_layers),
        start=0,
        stop=num_rows,
    )
    narrow = ids.transpose(0, 1).contiguous().to(trace.expert_ids.dtype)
    return dataclasses.replace(trace, expert_ids=narrow, expert_weights=routes.weights)


def join_traces(old: RoutingTrace, new: RoutingTrace) -> RoutingTrace:
    """Routes of tokens that were generated in pieces: the first R rows from `old`, the rest from `new`.

    `new` is of the whole sequence so far. Row r was used where token r was first read: the log-probs of
    the piece that `old` came with depend on its rows and on no others, while the row of its last token
    is the first that only the next piece computed.

    What a piece took from a cache, or computed again, of the tokens that `old` covers is of no
    consequence; where it is more, all leading rows count as that: a trace can say no less.
    Raises ValueError where `new` is shorter than `old`, or of another model.
    """
    num_kept, num_rows = len(old.expert_ids), len(new.expert_ids)
    if num_rows < num_kept:
        raise ValueError(f"routes: got {num_rows} rows to continue {num_kept} rows")
    if (old.layer_numbers, old.num_experts) != (new.layer_numbers, new.num_experts):
        raise ValueError("routes: the pieces of a sample come from different models")
    added = [
        VersionSpan(span.version, max(span.start, num_kept), span.end)
        for span in new.row_versions
        if span.end > num_kept
    ]
    return RoutingTrace(
        expert_ids=torch.cat([old.expert_ids, new.expert_ids[num_kept:]]),
        layer_numbers=old.layer_numbers,
        num_experts=old.num_experts,
        row_versions=joined_spans(old.row_versions, added),
        num_cached_rows=_leading(old.num_cached_rows, new.num_cached_rows, num_kept),
        num_recomputed_rows=_leading(old.num_recomputed_rows, new.num_recomputed_rows, num_kept),
        expert_weights=None
        if old.expert_weights is None or new.expert_weights is None
        else torch.cat([old.expert_weights, new.expert_weights[num_kept:]]),
    )


def _leading(old: int, new: int, num_kept: int) -> int:
    # One row more is the piece's own work as well: SGLang schedules ahead, and has fed the last token
    # back when it learns that it is the last.
    return new if new > num_kept + 1 else old


def joined_spans(
    first: Sequence[VersionSpan], second: Sequence[VersionSpan]
) -> tuple[VersionSpan, ...]:
    """Spans end to end; neighbours of one version become one."""
    joined: list[VersionSpan] = []
    for span in (*first, *second):
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        elif span.end > span.start:
            joined.append(span)
    return tuple(joined)
