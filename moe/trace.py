"""Turn the routes that an engine returns with a sample into a `RoutingTrace`, and join traces.

Dimensions: T all tokens of a sample, H hidden layers (dense ones too), L MoE layers, K experts per
token. SGLang sends int32 [T-1, H, K] in C order: the prompt is included, the last token has no row,
dense layers hold placeholders, shared experts are left out. With weights the rows are [T-1, H, 2K]:
K ids, then the bits of the K float32 gate weights. The numbers come as base64, or through shared
memory with one or two bytes per id (`mrl.engines.sglang.route_memory`).
"""

from __future__ import annotations

import binascii
import dataclasses
from collections.abc import Sequence

import numpy as np
import pybase64
import torch
from torch import Tensor

from moe.route_rows import id_dtype
from mrl.errors import InputError
from mrl.types import RoutingTrace, TokenRoutes, VersionSpan

_CHECKED_ROWS = 1 << 15
"""The number of rows that `refuse_repeats` compares at once. It is so small that the K columns of
these rows stay in the processor's cache."""


def decode_base64(payload: str) -> np.ndarray:
    """Decode the int32 numbers that SGLang sends as base64; return them as a flat array i4[n].

    Raises ValueError if the payload is not base64, or its length is not a multiple of 4 bytes.
    """
    try:
        raw = pybase64.b64decode(payload, validate=True)  # 40 times as fast as the standard library
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routes: the payload is not base64: {error}") from None
    if len(raw) % 4:
        raise ValueError(f"routes: got {len(raw)} bytes, expected 4 for each number")
    return np.frombuffer(raw, dtype="<i4")  # little-endian on every machine


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
    """Make a trace from the numbers that an engine sent for a sample. The dense layers are dropped,
    and the expert ids are narrowed to u8[T-1, L, K], or u16 above 256 experts.

    numbers: a flat array of any integer type. moe_layer_numbers: Megatron's 1-based numbers of the
    MoE layers.

    Raises InputError for layer numbers that the model cannot have. Raises ValueError for `numbers`
    of a wrong length, more cached rows than rows, an expert id that is out of range or repeated in
    a row, and a weight that is negative or not finite.
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
    if with_weights:  # the bits of a float32 need an int32
        numbers = numbers.astype("<i4", copy=False)
    ids = numbers.reshape(num_rows, num_hidden_layers, width)
    if len(layers) != num_hidden_layers:
        ids = ids[:, layers]
    weights = _weights_of(ids[..., topk:], moe_layer_numbers) if with_weights else None
    ids = ids[..., :topk]
    _refuse_unknown(ids, moe_layer_numbers, num_experts)
    narrow = ids.astype(np.uint8 if id_dtype(num_experts) == torch.uint8 else np.uint16, copy=False)
    expert_ids = torch.from_numpy(np.ascontiguousarray(narrow))
    refuse_repeats(expert_ids, moe_layer_numbers)
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
    """Reinterpret `bits`, int32 [T-1, L, K], as f32. Raises ValueError for a negative or non-finite
    weight."""
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
    """Raise ValueError for an id out of range, because narrowing would turn -1 into expert 255."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        row, layer, _ = np.argwhere((ids < 0) | (ids >= num_experts))[0]
        raise ValueError(
            f"routes: token {row} in MoE layer {layer_numbers[layer]} has experts "
            f"{ids[row, layer].tolist()}, expected ids from 0 to {num_experts - 1}"
        )


def refuse_repeats(ids: Tensor, layer_numbers: Sequence[int]) -> None:
    """Raise ValueError if a row of `ids`, u8 or u16 [T-1, L, K], holds an expert twice."""
    num_layers, topk = ids.shape[1:]
    flat = ids.numpy().reshape(-1, topk)
    for start in range(0, len(flat), _CHECKED_ROWS):
        columns = np.ascontiguousarray(flat[start : start + _CHECKED_ROWS].T)
        for distance in range(1, topk):
            if not (repeated := columns[distance:] == columns[:-distance]).any():
                continue
            row, layer = divmod(start + int(repeated.any(axis=0).argmax()), num_layers)
            raise ValueError(
                f"routes: token {row} repeats an expert in MoE layer {layer_numbers[layer]}: "
                f"{ids[row, layer].tolist()}"
            )


def empty_trace_ids(num_rows: int, num_layers: int, num_experts: int, topk: int) -> Tensor:
    """Return a value for `RoutingTrace.expert_ids` if another rank holds the ids: a `meta` tensor,
    which has a shape and no data."""
    return torch.empty((num_rows, num_layers, topk), dtype=id_dtype(num_experts), device="meta")


def with_routes(trace: RoutingTrace, routes: TokenRoutes) -> RoutingTrace:
    """Return `trace` with the ids and weights of `routes`. `routes` must hold T-1 rows of all
    layers of the trace."""
    return dataclasses.replace(trace, expert_ids=routes.expert_ids, expert_weights=routes.weights)


def join_traces(old: RoutingTrace, new: RoutingTrace) -> RoutingTrace:
    """Join the traces of a sample that was generated in two pieces.

    old: the trace of the first piece, R rows. new: the trace of the whole sequence so far, which
    came with the second piece. The result has the R rows of `old` and the later rows of `new`,
    because the log-probs of the first piece were computed with the rows of `old`, whatever the
    engine recomputed later. The row of the first piece's last token is only in `new`.

    A trace stores how many of its leading rows the engine took from a cache. The result has this
    number from `old`, or from `new` if the number there exceeds R + 1. The same applies to the
    number of recomputed rows. The result has gate weights if `old` and `new` have them. Raises
    ValueError if `new` is shorter than `old` or of another model.
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
    """Return the number of leading cached (or recomputed) rows of the joined trace. `old` and `new`
    are the numbers of the two traces, and `num_kept` is the number of rows of the old trace."""
    # A surplus of one row still belongs to the first piece: SGLang schedules ahead, so it has already
    # computed the row of the last token when it learns that this token is the last.
    return new if new > num_kept + 1 else old


def joined_spans(
    first: Sequence[VersionSpan], second: Sequence[VersionSpan]
) -> tuple[VersionSpan, ...]:
    """Join spans end to end, and merge neighbours of the same version. Empty spans are dropped."""
    joined: list[VersionSpan] = []
    for span in (*first, *second):
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        elif span.end > span.start:
            joined.append(span)
    return tuple(joined)
