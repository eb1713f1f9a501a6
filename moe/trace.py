"""Turn the routes that an engine returns with a sample into a `RoutingTrace`, and join traces.

SGLang sends int32 [T-1, H, K] in C order. Prompt tokens have rows; the last token has none. Dense
layers hold placeholders, and shared experts are left out. With gate weights the shape is
[T-1, H, 2K]: K ids, then the bits of the K float32 weights. The numbers come as base64, or through
shared memory with one or two bytes per id (`mrl.engines.sglang.route_memory`).

Dimensions: T all tokens of a sample, H layers of the model (MoE and dense), L MoE layers, K experts
per token.
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
"""The number of rows that `refuse_repeats` compares at once, small enough for the K columns of these
rows to stay in the processor's cache."""


def decode_base64(payload: str) -> np.ndarray:
    """Decode the int32 numbers that SGLang sends as base64 into a flat array.

    Raises ValueError if the payload is not base64, or does not decode to a multiple of 4 bytes.
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

    numbers: the flat array of the shape that the module docstring describes, of any integer type.
    moe_layer_numbers: Megatron's 1-based numbers of the MoE layers.
    topk: K.
    row_versions, num_cached_rows, num_recomputed_rows: see `RoutingTrace`.
    with_weights: whether `numbers` contains gate weights.

    Raises InputError if a layer number is not between 1 and `num_hidden_layers`, or if
    `moe_layer_numbers` is empty. Raises ValueError if `numbers` has the wrong length, if
    `num_cached_rows` is negative or above T-1, if an expert id is out of range or occurs twice in a
    row of a layer, or if a gate weight is negative or not finite.
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
    """Reinterpret the int32 numbers `bits` [T-1, L, K] as float32 gate weights. Raises ValueError
    for a weight that is negative or not finite."""
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
    """Raise ValueError for an expert id out of range. Without this check, the conversion to uint8
    would turn -1 into expert 255."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        row, layer, _ = np.argwhere((ids < 0) | (ids >= num_experts))[0]
        raise ValueError(
            f"routes: token {row} in MoE layer {layer_numbers[layer]} has experts "
            f"{ids[row, layer].tolist()}, expected ids from 0 to {num_experts - 1}"
        )


def refuse_repeats(ids: Tensor, layer_numbers: Sequence[int]) -> None:
    """Raise ValueError if the K ids of a token in a layer contain an expert twice.

    ids: u8 or u16 [T-1, L, K]. layer_numbers: the numbers of the L layers, for the error message.
    """
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
    """Return a placeholder for `RoutingTrace.expert_ids` on a rank that does not hold the ids: a
    `meta` tensor [num_rows, num_layers, topk], which has no data."""
    return torch.empty((num_rows, num_layers, topk), dtype=id_dtype(num_experts), device="meta")


def with_routes(trace: RoutingTrace, routes: TokenRoutes) -> RoutingTrace:
    """Return a copy of `trace` with the expert ids and gate weights of `routes`. `routes` must have
    the T-1 rows and all layers of the trace."""
    return dataclasses.replace(trace, expert_ids=routes.expert_ids, expert_weights=routes.weights)


def join_traces(old: RoutingTrace, new: RoutingTrace) -> RoutingTrace:
    """Join the two traces of a sample that was generated in two pieces.

    old: the trace of the first piece, with R rows.
    new: the trace that came with the second piece. It covers both pieces.

    The result has the R rows of `old`, then the rows of `new` from R on. The rows of `old` are kept
    because the log-probs of the first piece were computed with these routes, even if the engine
    recomputed the piece later. The last token of the first piece has a row only in `new`.

    The result has the `num_cached_rows` of `new` if that number exceeds R + 1, and otherwise the
    one of `old`. `num_recomputed_rows` is chosen in the same way. The result has gate weights if
    both traces have them. Raises ValueError if `new` has fewer rows than `old` or is of another
    model.
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
    """Return the number of leading cached (or recomputed) rows of a joined trace.

    old, new: the number of such rows in each of the two traces. num_kept: the number of rows of the
    old trace.
    """
    # A surplus of one row still belongs to the first piece: SGLang schedules ahead, so it has already
    # computed the row of the last token when it learns that this token is the last.
    return new if new > num_kept + 1 else old


def joined_spans(
    first: Sequence[VersionSpan], second: Sequence[VersionSpan]
) -> tuple[VersionSpan, ...]:
    """Concatenate two lists of spans. Adjacent spans of the same version are merged, and empty spans
    are dropped."""
    joined: list[VersionSpan] = []
    for span in (*first, *second):
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
        elif span.end > span.start:
            joined.append(span)
    return tuple(joined)
