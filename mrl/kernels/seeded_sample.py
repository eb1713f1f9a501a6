"""`mrl::seeded_sample`: SGLang's seeded Gumbel-max sampler, computed in one pass on CPUs.

Dimensions: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend, oracle

OPEN = -1
"""The id that the kernel returns for a row that it cannot decide. Torch then computes the id."""


def seeded_sample(
    scores: Tensor, seeds: Tensor, positions: Tensor, *, are_probs: bool = False
) -> Tensor:
    """Return the token ids i64[B] that SGLang's seeded sampler draws from `scores`.

    The id of a row is the first token v that maximises, in fp64,

        log p_v - log(-log u_v),    u_v = MurmurHash3(seed, position, v) / (2**32 - 1)

    where log p_v is computed in the dtype of `scores`, and -log u_v is at least 2**-32. The id depends
    only on the scores, seed and position of the same row.

    The ids are equal to those of the same formula in torch (`mrl.kernels.oracle.seeded_sample`).
    Logarithms may differ in their last bit, so the kernel decides a row only if its best token leads
    all others by more than a margin for rounding. The kernel leaves the row undecided if the lead is
    smaller, if a NaN or an infinity could win, or if the best value is outside of (-60, 60), which is
    impossible for probabilities that add up to 1. Undecided rows, about 1 in 100,000 for
    probabilities, are computed by the formula in torch.

    Args:
        scores: [B, V] on the CPU, log-probs or, with `are_probs`, probabilities. Neither needs to
            be normalised. float32 and float64 are read as they are; other floats become float32.
        seeds: i64[B].
        positions: int[B], of which the low 32 bits are used.
        are_probs: whether `scores` are probabilities, in float32.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    return torch.ops.mrl.seeded_sample(scores, seeds, positions, are_probs)


def _check(scores: Tensor, seeds: Tensor, positions: Tensor, are_probs: bool) -> None:
    if scores.dim() != 2 or not scores.shape[1]:
        raise ValueError(f"scores: got shape {list(scores.shape)}, expected [B, V] with V >= 1")
    if not scores.is_floating_point() or (are_probs and scores.dtype != torch.float32):
        wanted = "torch.float32" if are_probs else "a float"
        raise ValueError(f"scores: got dtype {scores.dtype}, expected {wanted}")
    rows, legend = (scores.shape[0],), f"B = {scores.shape[0]} rows"
    integers = (torch.int64, torch.int32)
    backend.check_tensor("seeds", seeds, rows, (torch.int64,), scores.device, legend)
    backend.check_tensor("positions", positions, rows, integers, scores.device, legend)


torch.library.define(
    "mrl::seeded_sample",
    "(Tensor scores, Tensor seeds, Tensor positions, bool are_probs) -> Tensor",
)


@torch.library.impl("mrl::seeded_sample", "cpu")
def _seeded_sample(scores: Tensor, seeds: Tensor, positions: Tensor, are_probs: bool) -> Tensor:
    _check(scores, seeds, positions, are_probs)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()  # exact, and so is the conversion to fp64 in torch's formula
    num_rows, num_columns = scores.shape
    ids = torch.empty(num_rows, dtype=torch.int64)
    backend.run(
        "seeded_sample",
        scores.device,
        scores=scores.contiguous(),
        seeds=seeds.contiguous(),
        positions=positions.to(torch.int64).contiguous(),
        num_rows=num_rows,
        num_columns=num_columns,
        kind=0 if are_probs else 1 if scores.dtype == torch.float32 else 2,
        ids=ids,
    )
    for row in (ids == OPEN).nonzero()[:, 0].tolist():
        own = slice(row, row + 1)
        ids[own] = oracle.seeded_sample(
            scores[own], seeds[own], positions[own], are_probs=are_probs
        )
    return ids


@torch.library.register_fake("mrl::seeded_sample")
def _seeded_sample_fake(
    scores: Tensor, seeds: Tensor, positions: Tensor, are_probs: bool
) -> Tensor:
    _check(scores, seeds, positions, are_probs)
    return seeds.new_empty(scores.shape[0])
