"""A step of random sequences with everything that any algorithm reads, whole and as micro-batches.

Dimensions: T tokens of a sequence, N packed tokens, B packed sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms import load_algorithm
from mrl.algorithms.base import traits
from mrl.config import AlgorithmConfig
from mrl.types import MicroBatch

VERSION = 5
MAX_RESPONSE_LEN = 24


@dataclass(frozen=True)
class Drawn:
    """One sequence; per-token fields are f32[T] but `mask` bool[T] and `versions` i32[T]."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    mask: Tensor
    versions: Tensor
    token_advantages: Tensor
    advantage: float
    reward: float

    def __len__(self) -> int:
        return len(self.logprobs)


def draw(length: int, rng: torch.Generator, *, scale: float = 0.3, dropped: bool = False) -> Drawn:
    """Log-ratios of about `scale`, half of it shared by the sequence; NaN and inf where masked."""

    def gap(size: float) -> Tensor:
        both = torch.randn(length + 1, generator=rng)
        return size * (both[1:] + both[0]) / 2

    old = -3 * torch.rand(length, generator=rng) - 0.01
    mask = torch.arange(length) >= max(1, length // 4)
    if length > 6:
        mask &= torch.rand(length, generator=rng) < 0.8  # what an environment answered
    mask &= not dropped
    logprobs = (old + gap(scale)).clamp(max=-1e-3)
    fields = {
        "logprobs": logprobs,
        "old": old,
        "rollout": old + gap(scale),
        "ref": old + gap(scale),
    }
    for (name, values), garbage in zip(
        fields.items(), (torch.nan, torch.inf, -torch.inf, 1e30), strict=True
    ):
        fields[name] = values.masked_fill(~mask, garbage)
    return Drawn(
        **fields,
        mask=mask,
        versions=torch.where(
            mask, torch.randint(0, VERSION + 1, (length,), generator=rng), -1
        ).int(),
        token_advantages=torch.randn(length, generator=rng),
        advantage=(number := float(torch.randn(1, generator=rng))),
        reward=2.0 * number,
    )


def padded(drawn: Drawn, multiple: int) -> Drawn:
    """Append garbage up to a multiple of `multiple` tokens, as context parallelism packs."""
    missing = -len(drawn) % multiple
    filling = draw(missing, torch.Generator().manual_seed(missing), dropped=True)
    tensors = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(Drawn)}
    joined = {
        name: torch.cat([values, getattr(filling, name)])
        for name, values in tensors.items()
        if isinstance(values, Tensor)
    }
    return dataclasses.replace(drawn, **joined)


def sequence_weights(name: str, drawn: Sequence[Drawn], config: AlgorithmConfig) -> Tensor:
    """f32[S] by the algorithm, from the counts of the whole step."""
    counts = torch.tensor([int(d.mask.sum()) for d in drawn])
    total, samples = int(counts.sum()), int((counts > 0).sum())
    algorithm = load_algorithm(name)
    return algorithm.sequence_weights(counts, total, samples, config, MAX_RESPONSE_LEN)


def nll_weights(name: str, drawn: Sequence[Drawn], config: AlgorithmConfig) -> Tensor | None:
    """f32[S] where the algorithm has such weights."""
    weigh = getattr(load_algorithm(name), "nll_weights", None)
    if weigh is None:
        return None
    counts = torch.tensor([int(d.mask.sum()) for d in drawn])
    return weigh(counts, torch.tensor([d.reward for d in drawn]), config)


def pack(
    name: str, drawn: Sequence[Drawn], weights: Tensor, nll: Tensor | None = None, padding: int = 0
) -> tuple[Tensor, MicroBatch]:
    """Current log-probs f32[N] with gradient, and the micro-batch; `padding` more tokens of garbage."""
    parts = list(drawn)
    if padding:
        garbage = draw(padding, torch.Generator().manual_seed(padding), dropped=True)
        parts.append(garbage)
        weights = torch.cat([weights, torch.zeros(1)])
        nll = None if nll is None else torch.cat([nll, torch.zeros(1)])
    sizes = torch.tensor([len(d) for d in parts])
    wants_tokens = traits(load_algorithm(name)).needs_critic or name == "gspo_token"

    def joined(field: str) -> Tensor:
        return torch.cat([getattr(d, field) for d in parts])

    ids = torch.zeros(int(sizes.sum()), dtype=torch.long)
    batch = MicroBatch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(len(d)) for d in parts]),
        cu_seqlens=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        loss_mask=joined("mask"),
        rollout_logprobs=joined("rollout"),
        rewards=torch.tensor([d.reward for d in parts]),
        advantages=torch.tensor([d.advantage for d in parts]),
        seq_weight=weights,
        weight_versions=joined("versions"),
        old_logprobs=joined("old"),
        ref_logprobs=joined("ref"),
        token_advantages=joined("token_advantages") if wants_tokens else None,
        nll_weight=nll,
        version=VERSION,
    )
    return joined("logprobs").requires_grad_(), batch


def without(batch: MicroBatch, **fields: None) -> MicroBatch:
    return dataclasses.replace(batch, **fields)  # type: ignore[arg-type]
