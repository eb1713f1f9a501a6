"""The tokens of a step are gathered from all ranks on rank 0, up to a bound.

Who holds what: the last pipeline stage the log-probs (one rank of each data-parallel replica reports
them), every stage its MoE layers, and of those each tensor- and context-parallel rank some rows. All
ranks know all samples, so all of them know where each token lies in the record, and rank 0 only has to
put in place what arrives.

N packed tokens of a micro-batch, n rows of this rank's routers, R tokens of the record, L MoE layers,
K experts per token.
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
from parallel.forward import PassOutput
from parallel.mesh import Mesh
from parallel.policy import Policy

Parts = list[tuple[str, Tensor, Tensor]]
"""(field of the record, indices i64[m] in it, values [m, ...])."""


OBSERVED = {"expert_ids": "captured", "native_ids": "native", "margins": "margins"}
"""Field of the record to field of `ObservedRoutes`."""


@dataclass(frozen=True)
class Chosen:
    """The samples of a record, and where each lies."""

    ids: list[int]
    """Ascending."""
    lengths: list[int]

    @property
    def cu_seqlens(self) -> Tensor:
        """i64[S+1]."""
        return torch.tensor([0, *self.lengths], dtype=torch.int64).cumsum(0)

    def indices(self, batch: MicroBatch) -> Tensor:
        """i64[N]: where in the record each packed token is; -1 where it is not, as padding never is."""
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
    """All samples where their tokens fit `max_tokens`; else half of that for the largest `gaps` (by
    sample; the largest of all may take more), and what is left for samples spread evenly over the
    step. Ascending."""
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
    """Gather the samples of the record and its tensors per token on rank 0. A collective.

    `samples` of all ranks; `batches` of this one, and what the pass `old` over them gave, with its
    `observed` rows where routes are to be recorded; layer_numbers: all L MoE layers of the model.
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
    """Choose the samples of the record, the same on every rank. A collective where not all of
    them fit."""
    lengths = [len(sample.token_ids) for sample in samples]
    gaps: dict[int, float] = {}
    if sum(lengths) > max_tokens:
        everyone: list[Any] = [None] * mesh.dims.world
        dist.all_gather_object(everyone, _gaps(batches, old) if mesh.reports_loss else {})
        gaps = {i: gap for part in everyone for i, gap in part.items()}
    ids = choose_samples(lengths, gaps, max_tokens)
    return Chosen(ids, [lengths[i] for i in ids])


def _gaps(batches: Sequence[MicroBatch], old: PassOutput) -> dict[int, float]:
    """Return, by sample of this rank, the largest |old - rollout| of its loss tokens; infinite
    for a NaN."""
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
    """What the rank that reports the loss gives."""
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
    """What any rank gives of its layers: their numbers, and rows [m, l, ...] of l layers."""
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
    """Gather the parts of all ranks on rank 0; None elsewhere. A collective."""
    tokens, layers, routes = parts
    message = (_joined(tokens), layers, _joined(routes))
    if mesh.dims.world == 1:
        return [message]
    everyone: list[Any] | None = [None] * mesh.dims.world if mesh.rank == 0 else None
    dist.gather_object(message, everyone)
    return everyone


def _joined(parts: Parts) -> Parts:
    """One part a field: a message of few tensors."""
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
    """What arrived -> the tensors of the record, [R, ...]; L are `layer_numbers`."""
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
