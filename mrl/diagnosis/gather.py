"""Gather the token record of a step from all ranks on rank 0.

A token record holds what trainer and engine computed for the tokens of some or all samples of the
step, up to a maximum number of tokens.

One rank of each data-parallel replica, on the last pipeline stage, sends the log-probs. Every stage
sends the routes of its own MoE layers, and each tensor- and context-parallel rank has some of the
rows. All ranks know the lengths of all samples, and thus the index of each token in the record. So
each rank sends its values together with their indices, and rank 0 only copies the values.

Dimensions: N packed tokens of a micro-batch, n rows of this rank's routers, S samples of the record,
R tokens of the record, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.corrections import token_advantages
from mrl.types import NATIVE_ROUTE, UNKNOWN_VERSION, MicroBatch, Sample
from parallel.mesh import Mesh
from parallel.pass_output import PassOutput
from parallel.policy import Policy

Parts = list[tuple[str, Tensor, Tensor]]
"""The values that one rank has for the record, as tuples (name of the record field, indices i64[m]
of tokens in the record, values [m, ...] of these tokens)."""

OBSERVED = {"expert_ids": "captured", "native_ids": "native", "margins": "margins"}
"""The route fields of a record, each with the attribute of `ObservedRoutes` that has its values."""


@dataclass(frozen=True)
class Chosen:
    """The samples that were chosen for a record, in ascending order of their indices."""

    ids: list[int]
    """The indices of the chosen samples within the step, ascending."""
    lengths: list[int]
    """The number of tokens of each chosen sample."""

    @property
    def cu_seqlens(self) -> Tensor:
        """i64[S+1]: the index of each sample's first token in the record; the last entry is R."""
        return torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0)

    def indices(self, batch: MicroBatch) -> Tensor:
        """Return i64[N]: for each packed token of `batch`, its index in the record.

        The index is -1 for a token that is not in the record.
        """
        assert batch.sample_ids is not None
        starts = dict(zip(self.ids, self.cu_seqlens.tolist(), strict=False))
        lengths = dict(zip(self.ids, self.lengths, strict=True))
        indices = torch.full((batch.num_tokens,), -1, dtype=torch.int64)
        for number, begin in zip(
            batch.sample_ids.tolist(), batch.cu_seqlens.tolist(), strict=False
        ):
            if number in starts:
                size = lengths[number]
                indices[begin : begin + size] = torch.arange(size) + starts[number]
        return indices


def choose_samples(lengths: Sequence[int], gaps: Mapping[int, float], max_tokens: int) -> list[int]:
    """Choose samples for a record of at most `max_tokens` tokens; return their indices, ascending.

    lengths: the number of tokens of each sample. gaps: the largest `|old - rollout|` of each
    sample, by sample index.

    All samples are chosen if they fit. Otherwise half of `max_tokens` goes to the samples with the
    largest gaps, and the rest to samples spread evenly over the step. The sample with the largest
    gap may take more than half, and is left out only if it is longer than `max_tokens`.
    """
    if sum(lengths) <= max_tokens:
        return list(range(len(lengths)))
    by_gap = sorted(gaps, key=lambda i: (-gaps[i], i))
    worst = lengths[by_gap[0]] if by_gap else 0
    half = max(max_tokens // 2, worst if worst <= max_tokens else 0)
    chosen = _while_they_fit(by_gap, lengths, half)
    remaining = [i for i in range(len(lengths)) if i not in chosen]
    left = max_tokens - sum(lengths[i] for i in chosen)
    count = int(left / (sum(lengths[i] for i in remaining) / len(remaining)))
    spread = [remaining[k * len(remaining) // count] for k in range(count)]
    return sorted(chosen | _while_they_fit(spread, lengths, left))


def _while_they_fit(numbers: Sequence[int], lengths: Sequence[int], budget: int) -> set[int]:
    """Choose samples in the order of `numbers`, as long as they fit into `budget` tokens in total.

    numbers: the indices of the samples that may be chosen. lengths: the number of tokens of every
    sample, by index. A sample with more tokens than are left of `budget` is skipped. Returns the
    chosen indices.
    """
    chosen: set[int] = set()
    for i in numbers:
        if lengths[i] <= budget:
            chosen.add(i)
            budget -= lengths[i]
    return chosen


def gather_tokens(
    policy: Policy,
    samples: Sequence[Sample],
    batches: Sequence[MicroBatch],
    old: PassOutput,
    layer_numbers: Sequence[int],
    max_tokens: int,
) -> tuple[Chosen, dict[str, Tensor]] | None:
    """Gather the record's samples and per-token tensors on rank 0. All ranks must call this together.

    samples: all samples of the step, the same on every rank. batches: the micro-batches of this
    rank. old: the output of a pass over `batches`; if routes are recorded, the pass must have
    recorded the route of every row (`rows` of `Diagnosis.observe`). layer_numbers: the numbers of
    all L MoE layers of the model. max_tokens: the largest number of tokens in the record.

    Returns (chosen samples, tensors by field name) on rank 0, and None on the other ranks.
    """
    mesh = policy.mesh
    chosen = choose(samples, batches, old, mesh, max_tokens)
    tokens = token_parts(batches, old, chosen) if mesh.reports_loss else []
    everyone = gather((tokens, *route_parts(policy, batches, old, chosen)), mesh)
    if everyone is None:
        return None
    return chosen, fill(everyone, sum(chosen.lengths), layer_numbers)


def choose(
    samples: Sequence[Sample],
    batches: Sequence[MicroBatch],
    old: PassOutput,
    mesh: Mesh,
    max_tokens: int,
) -> Chosen:
    """Choose the samples of the record, the same on every rank.

    All ranks must call this together, because they exchange their mismatches if the samples do not
    all fit into `max_tokens`. The arguments are those of `gather_tokens`.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    gaps: dict[int, float] = {}
    if sum(lengths) > max_tokens:
        everyone: list[Any] = [None] * mesh.dims.world
        dist.all_gather_object(everyone, _gaps(batches, old) if mesh.reports_loss else {})
        gaps = {i: gap for part in everyone for i, gap in part.items()}
    ids = choose_samples(lengths, gaps, max_tokens)
    return Chosen(ids, [lengths[i] for i in ids])


def _gaps(batches: Sequence[MicroBatch], old: PassOutput) -> dict[int, float]:
    """Return the largest `|old - rollout|` over the loss tokens of each sample, by sample index.

    The result has only the samples in this rank's micro-batches. A NaN counts as infinite.
    """
    gaps: dict[int, float] = {}
    for batch, logprobs in zip(batches, old.logprobs, strict=True):
        d = torch.where(batch.loss_mask, logprobs.cpu() - batch.rollout_logprobs, 0.0).abs()
        d = d.nan_to_num(nan=float("inf"))
        assert batch.sample_ids is not None
        parts = d.split(batch.cu_seqlens.diff().tolist())
        found = zip(batch.sample_ids.tolist(), parts, strict=True)
        gaps |= {number: float(part.max()) for number, part in found if number >= 0}
    return gaps


def token_parts(batches: Sequence[MicroBatch], old: PassOutput, chosen: Chosen) -> Parts:
    """Return this rank's values of all per-token record fields except the route fields.

    Only ranks for which `Mesh.reports_loss` is true have these values and may call this.
    """
    parts: Parts = []
    for batch, logprobs, entropy in zip(batches, old.logprobs, old.entropies, strict=True):
        everywhere = chosen.indices(batch)
        kept = everywhere >= 0
        mask = batch.loss_mask
        values = {
            "token_ids": batch.input_ids,
            "loss_mask": mask,
            "rollout_logprobs": torch.where(mask, batch.rollout_logprobs, 0.0),
            "old_logprobs": logprobs.cpu(),
            "entropy": entropy.cpu(),
            "advantages": torch.where(mask, token_advantages(batch).cpu(), 0.0),
            "weight_versions": batch.weight_versions,
            "ref_logprobs": None if batch.ref_logprobs is None else batch.ref_logprobs.cpu(),
        }
        parts += [(name, everywhere[kept], v[kept]) for name, v in values.items() if v is not None]
    return parts


def route_parts(
    policy: Policy, batches: Sequence[MicroBatch], old: PassOutput, chosen: Chosen
) -> tuple[tuple[int, ...], Parts]:
    """Return two values: the ascending numbers of this rank's MoE layers, and the rank's route
    fields.

    The values of a route field for m tokens have the shape [m, layers of this rank, ...], with the
    layers in ascending order.
    """
    layers, parts = tuple(sorted(policy.moe_layers)), []
    for batch, observed in zip(batches, old.observed, strict=True):
        if not observed:
            continue
        indices = chosen.indices(batch)[policy.runner.row_places(batch)]
        kept = indices >= 0
        for name, attribute in OBSERVED.items():
            values = torch.stack([getattr(observed[n], attribute).cpu() for n in layers], dim=1)
            parts.append((name, indices[kept], values[kept]))
    return layers, parts


def gather(parts: tuple[Parts, tuple[int, ...], Parts], mesh: Mesh) -> list[Any] | None:
    """Gather the `parts` of all ranks on rank 0. All ranks must call this together.

    parts: (token values, layer numbers, route values), the results of `token_parts` and
    `route_parts` on this rank. Returns a list with the parts of each rank, in the order of ranks,
    on rank 0, and None on the other ranks.
    """
    tokens, layers, routes = parts
    message = (_joined(tokens), layers, _joined(routes))
    if mesh.dims.world == 1:
        return [message]
    everyone: list[Any] | None = [None] * mesh.dims.world if mesh.rank == 0 else None
    dist.gather_object(message, everyone)
    return everyone


def _joined(parts: Parts) -> Parts:
    """Concatenate the parts of each field, so that the message to rank 0 has few tensors."""
    fields = dict.fromkeys(name for name, _, _ in parts)
    return [
        (
            field,
            torch.cat([indices for name, indices, _ in parts if name == field]),
            torch.cat([values for name, _, values in parts if name == field]),
        )
        for field in fields
    ]


def fill(
    everyone: Sequence[Any], num_tokens: int, layer_numbers: Sequence[int]
) -> dict[str, Tensor]:
    """Copy the gathered values into the tensors of the record, [R, ...]; return these by field name.

    A value that no rank sent is -1 for expert ids and weight versions, and otherwise 0.

    everyone: the result of `gather` on rank 0. num_tokens: R. layer_numbers: the numbers of all L
    MoE layers of the model.
    """
    filled: dict[str, Tensor] = {}
    for tokens, layers, routes in everyone:
        for name, indices, values in tokens:
            if name not in filled:
                empty = UNKNOWN_VERSION if name == "weight_versions" else 0
                filled[name] = torch.full((num_tokens,), empty, dtype=values.dtype)
            filled[name][indices] = values
        columns = torch.tensor([layer_numbers.index(n) for n in layers], dtype=torch.int64)
        for name, indices, values in routes:
            if name not in filled:
                shape = (num_tokens, len(layer_numbers), *values.shape[2:])
                empty = 0 if name == "margins" else NATIVE_ROUTE
                filled[name] = torch.full(shape, empty, dtype=values.dtype)
            filled[name][indices.unsqueeze(1), columns] = values
    return filled
