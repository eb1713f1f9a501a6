"""Pack samples that share prefixes: the samples of a prompt go into the same micro-batch where that
saves rows.

This takes two steps, because a rank has the tokens and routes of its own samples only. First every
rank computes, from the lengths of all samples and of their prompts, which rank trains which
samples, and whether sharing pays (`plan_shares`). When a rank has its samples, it finds the rows
that they really have in common (`parallel.prefixes`) and packs them (`pack_families`). So a
micro-batch stays within its budget of rows even if some samples have only a part of their prompt's
rows in common.

A sample's number is its index in the list of the S samples of an optimizer step.

Dimensions: S samples of an optimizer step, G samples of a family (samples of one prompt).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.shared_prefixes import MAX_TOKENS_PER_ROW, MIN_GAIN, SharedPrefixes
from mrl.types import Sample, TokenRoutes
from parallel.dims import ParallelDims, round_up
from parallel.mesh import Mesh
from parallel.packing import assign_micro_batches
from parallel.prefixes import common_rows, shared_prefixes


@dataclass(frozen=True)
class Family:
    """Samples that may have rows in common: those of one prompt."""

    members: tuple[int, ...]
    """The numbers of the G samples (see the module docstring), the longest sample first."""
    lengths: tuple[int, ...]
    """The number of rows, including padding, that each sample takes if it shares none."""
    common: Tensor
    """i64[G, G]: the number of leading rows that each pair of samples can share."""

    def own_rows(self, place: int, others: Sequence[int]) -> int:
        """Return how many rows one sample adds to a micro-batch that has the samples `others`.
        `place` and `others` are indices into `members`."""
        shared = int(self.common[place, list(others)].max()) if others else 0
        return self.lengths[place] - shared

    @cached_property
    def num_rows(self) -> int:
        """The number of rows that all samples together take in one micro-batch."""
        return sum(self.lengths) - int(self.common.tril(-1).amax(1).sum())

    def part(self, places: Sequence[int]) -> Family:
        """Return a family of only the samples at `places`, which are indices into `members`."""
        index = torch.tensor(places, dtype=torch.int64)
        return Family(
            tuple(self.members[place] for place in places),
            tuple(self.lengths[place] for place in places),
            self.common[index][:, index],
        )

    def cut(self, num_parts: int) -> list[Family]:
        """Cut the family into at most `num_parts` families of almost equal size."""
        places = range(len(self.members))
        return [self.part(places[first::num_parts]) for first in places[:num_parts]]


def families_of(
    samples: Sequence[Sample], numbers: Sequence[int], multiple_of: int
) -> list[Family]:
    """Group the samples `numbers` by prompt, and return a family for each prompt. It is assumed
    that the samples of a prompt have all of its rows in common. Only lengths are read.

    multiple_of: each sample is padded to a multiple of this number, and the number of rows that two
    samples share is rounded down to such a multiple.
    """
    by_group: dict[int, list[int]] = {}
    for number in numbers:
        by_group.setdefault(samples[number].group_id, []).append(number)
    families = []
    for members in by_group.values():
        ordered = sorted(members, key=lambda i: (-len(samples[i].token_ids), i))
        rows = torch.tensor([max(0, samples[i].prompt_len - 1) for i in ordered])
        lengths = [round_up(len(samples[i].token_ids), multiple_of) for i in ordered]
        common = rows.minimum(rows.unsqueeze(1)) // multiple_of * multiple_of
        families.append(Family(tuple(ordered), tuple(lengths), common))
    return families


def plan_shares(
    samples: Sequence[Sample], dims: ParallelDims, token_budget: int
) -> list[list[int]] | None:
    """Return, for each data-parallel rank, the numbers of the samples that it trains. Return None
    if sharing does not pay.

    Families stay whole, or all are cut into halves, quarters and so on, whichever leaves the
    slowest rank the fewest rows to compute. Sharing pays if the slowest rank computes at least
    MIN_GAIN times fewer rows than without sharing. Only lengths are read, so every rank gets the
    same result.
    """
    multiple = dims.sequence_multiple
    lengths = [round_up(len(sample.token_ids), multiple) for sample in samples]
    unshared = assign_micro_batches(lengths, dims.dp, token_budget)
    apart = [[sum(lengths[i] for i in micro) for micro in share] for share in unshared]
    families = families_of(samples, range(len(samples)), multiple)
    best: tuple[int, list[list[int]]] | None = None
    num_parts, largest = 1, max(len(family.members) for family in families)
    while num_parts < largest:
        parts = [part for family in families for part in family.cut(num_parts)]
        ranks = _balance(parts, dims.dp)
        packs = [pack_families(own, token_budget) for own in ranks]
        rows = _slowest([[pack.num_rows for pack in own] for own in packs], dims)
        if best is None or rows < best[0]:
            best = rows, [[i for part in own for i in part.members] for own in ranks]
        num_parts *= 2
    if best is None or best[0] * MIN_GAIN > _slowest(apart, dims):
        return None
    return best[1]


@dataclass(frozen=True)
class FamilyPack:
    """The families whose samples form a micro-batch."""

    families: list[Family]

    @property
    def members(self) -> list[int]:
        """The numbers of the samples, in packing order."""
        return [i for family in self.families for i in family.members]

    @property
    def num_rows(self) -> int:
        return sum(family.num_rows for family in self.families)

    @property
    def shared(self) -> SharedPrefixes | None:
        """The rows that the samples share; None if they share none."""
        common = torch.block_diag(*(family.common for family in self.families))
        return shared_prefixes(common) if bool(common.tril(-1).any()) else None


def with_common_rows(
    families: Sequence[Family],
    samples: Sequence[Sample],
    routes: Mapping[int, TokenRoutes],
    mesh: Mesh,
) -> list[Family]:
    """Return the families with `common` computed from the samples' tokens and routes. If no two
    samples of a family have rows in common, each of them becomes a family of its own.

    samples: all samples of the step; only those in `families` must have their tokens. routes: maps
    a sample's number to its routes in this rank's layers. A collective of the pipeline stages, each
    of which compares the routes in its own layers.
    """
    found = [
        common_rows(
            [samples[i] for i in family.members],
            [routes.get(i) for i in family.members],
            mesh.dims.sequence_multiple,
        )
        for family in families
    ]
    if mesh.dims.pp > 1 and found:
        flat = torch.cat([common.flatten() for common in found]).to(mesh.device)
        dist.all_reduce(flat, dist.ReduceOp.MIN, group=mesh.pp)
        parts = flat.cpu().split([common.numel() for common in found])
        found = [part.view_as(common) for part, common in zip(parts, found, strict=True)]
    known = [replace(f, common=common) for f, common in zip(families, found, strict=True)]
    return [
        piece
        for family in known
        for piece in ([family] if bool(family.common.any()) else family.cut(len(family.members)))
    ]


def pack_families(families: Sequence[Family], token_budget: int) -> list[FamilyPack]:
    """Pack families into micro-batches of at most `token_budget` rows and MAX_TOKENS_PER_ROW times as
    many tokens.

    The families are packed first-fit from the largest to the smallest. A family that is larger than
    the budget is cut first. A single sample that is larger than the budget gets a micro-batch of
    its own.
    """
    pieces = [
        (piece, piece.num_rows) for family in families for piece in _fill(family, token_budget)
    ]
    pieces.sort(key=lambda pair: (-pair[1], pair[0].members))
    packs: list[list[Family]] = []
    room: list[tuple[int, int]] = []  # rows and tokens
    whole = token_budget, MAX_TOKENS_PER_ROW * token_budget
    for piece, num_rows in pieces:
        num_tokens = sum(piece.lengths)
        fitting = next(
            (b for b, (r, t) in enumerate(room) if r >= num_rows and t >= num_tokens), None
        )
        if fitting is None:
            fitting = len(packs)
            packs.append([])
            room.append(whole)
        packs[fitting].append(piece)
        rows, tokens = room[fitting]
        room[fitting] = rows - num_rows, tokens - num_tokens
    return [FamilyPack(pieces) for pieces in packs]


def _fill(family: Family, token_budget: int) -> list[Family]:
    """Cut a family into pieces that keep the limits of `pack_families`. The pieces are filled one after
    the other, each with every remaining sample that still fits. A sample that exceeds a limit alone is
    a piece of its own."""
    max_tokens = MAX_TOKENS_PER_ROW * token_budget
    if family.num_rows <= token_budget and sum(family.lengths) <= max_tokens:
        return [family]
    pieces: list[list[int]] = []
    left = list(range(len(family.members)))
    while left:
        chosen, num_rows = [left[0]], family.lengths[left[0]]
        num_tokens = num_rows
        for place in left[1:]:
            more, length = family.own_rows(place, chosen), family.lengths[place]
            if num_rows + more <= token_budget and num_tokens + length <= max_tokens:
                chosen.append(place)
                num_rows += more
                num_tokens += length
        pieces.append(chosen)
        left = [place for place in left if place not in chosen]
    return [family.part(places) for places in pieces]


def _balance(families: Sequence[Family], num_ranks: int) -> list[list[Family]]:
    """Return the families of each rank. Each family, from the largest to the smallest, goes to the
    rank with the fewest rows so far."""
    sized = sorted(((-family.num_rows, family.members, family) for family in families),
                   key=lambda entry: entry[:2])  # fmt: skip
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[Family]] = [[] for _ in range(num_ranks)]
    for num_rows, _, family in sized:
        load, rank = heapq.heappop(loads)
        shares[rank].append(family)
        heapq.heappush(loads, (load - num_rows, rank))
    return shares


def _slowest(rows: Sequence[Sequence[int]], dims: ParallelDims) -> int:
    """Return the number of rows that the slowest rank computes. `rows` has, for each rank, the
    number of rows of each of its micro-batches. If all micro-batches must have the same length
    (`ParallelDims.equal_micro_batches`), the result includes the padding to this length."""
    if dims.equal_micro_batches:
        return max(len(own) for own in rows) * max(max(own, default=0) for own in rows)
    return max(sum(own) for own in rows)
