"""Pack samples into micro-batches, distributed over data-parallel ranks and bounded by a token
budget.

The assignment is a pure and deterministic function: every rank computes the same assignment from
the same samples, without any communication. All ranks get the same number of micro-batches, because
expert-parallel ranks exchange tokens in every layer. A rank whose samples fill fewer micro-batches
also runs empty micro-batches.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.align import join_routes
from mrl.sampling_mask import SamplingMask, join_masks
from mrl.shared_prefixes import SharedPrefixes
from mrl.types import UNKNOWN_VERSION, MicroBatch, Sample, TokenRoutes
from parallel.dims import round_up

Record = TypeVar("Record", MicroBatch, TokenRoutes)


@dataclass(frozen=True)
class WeightedSample:
    """A sample with its weights in the loss."""

    sample: Sample
    advantage: float | None
    """The advantage; None until `mrl.learn.advantages` computes it from the packed samples. Either
    all samples have an advantage or no sample has."""
    seq_weight: float
    sample_id: int = -1
    """The index of the sample in its step; -1 if it is in no step."""
    nll_weight: float | None = None
    """The weight of the sample's log-likelihood, a term that is added to the policy loss; None if
    the loss has no such term. Either all samples have a weight or no sample has."""
    routes: TokenRoutes | None = None
    """The routes of all tokens except the last, T-1 rows, in this rank's layers; None if the routers
    choose the experts."""
    reward: float = 0.0
    """The shaped reward; 0 if the sample has no reward."""
    credits_turns: bool = False
    """Whether the reward of each turn goes to the last loss token of the turn. Otherwise the whole
    sample has one reward. The value is the same for all samples."""


def assign_micro_batches(
    lengths: Sequence[int], dp_size: int, token_budget: int, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Return the sample indices by [data-parallel rank][micro-batch].

    The samples are assigned from the longest to the shortest, each to the rank that has the fewest
    tokens so far. Each rank packs its samples first-fit into micro-batches of `token_budget` tokens;
    a longer sample gets a micro-batch of its own. Every rank gets the same number of micro-batches,
    at least 1 and a multiple of `multiple_of`; some of them may be empty.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [(0, rank) for rank in range(dp_size)]
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    for i in longest_first:
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rank))
    bins = [_first_fit(share, lengths, token_budget) for share in shares]
    count = max(1, *(len(b) for b in bins))
    count = round_up(count, multiple_of)
    return [b + [[] for _ in range(count - len(b))] for b in bins]


def _first_fit(share: list[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in share:
        fitting = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if fitting is None:
            bins.append([i])
            room.append(token_budget - lengths[i])
        else:
            bins[fitting].append(i)
            room[fitting] -= lengths[i]
    return bins


def pack(
    samples: Sequence[WeightedSample],
    token_multiple: int = 1,
    *,
    sequence_multiple: int = 1,
    min_rows: int = 1,
    version: int | None = None,
    shared: SharedPrefixes | None = None,
) -> MicroBatch:
    """Pack samples into a micro-batch, one after the other. Each sample is padded to a multiple of
    `sequence_multiple` tokens.

    shared: the rows that the samples share; None if every token has a row of its own. If necessary,
    one more sequence of padding makes the number of rows at least `min_rows` and a multiple of
    `token_multiple`. Padding has no loss, and the routers choose its experts. Without samples there
    is only padding. `version` is the version of the trainer's weights.
    """
    lengths = [len(s.sample.token_ids) for s in samples]
    rooms = [round_up(n, sequence_multiple) for n in lengths]
    own = sum(rooms) - (shared.total if shared else 0)
    multiple = math.lcm(token_multiple, sequence_multiple)
    padding = round_up(max(min_rows, own), multiple) - own
    total = sum(rooms) + padding
    if shared is not None and padding:
        leaders = (*shared.leaders, len(samples))
        shared = SharedPrefixes(leaders, (*shared.num_rows, 0))
    if padding:
        lengths.append(padding)
        rooms.append(padding)
    parts = [s.routes for s in samples] + ([None] if padding else [])
    has_routes = any(part is not None for part in parts)
    routes = join_routes(parts, lengths, rooms) if has_routes else None

    def per_token(name: str, dtype: torch.dtype) -> Tensor:
        return laid_out([getattr(s.sample, name) for s in samples], torch.zeros(total, dtype=dtype))

    def laid_out(parts: Sequence[Tensor], values: Tensor) -> Tensor:
        for room, part in zip(values.split(rooms), parts, strict=False):
            room[: len(part)] = part
        return values

    def per_sequence(values: list[float]) -> Tensor:
        return torch.tensor(values + [0.0] * bool(padding), dtype=torch.float32)

    advantages = [s.advantage for s in samples if s.advantage is not None]
    nll_weights = [s.nll_weight for s in samples if s.nll_weight is not None]
    turns = [_token_rewards(s.sample) for s in samples if s.credits_turns]
    cut = [s.sample.finish_reason == "length" for s in samples]
    return MicroBatch(
        input_ids=per_token("token_ids", torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in rooms]),
        cu_seqlens=torch.tensor([0, *rooms]).cumsum(0).int(),
        loss_mask=per_token("loss_mask", torch.bool),
        rollout_logprobs=per_token("rollout_logprobs", torch.float32),
        rewards=per_sequence([s.reward for s in samples]),
        advantages=per_sequence(advantages) if len(advantages) == len(samples) else None,
        seq_weight=per_sequence([s.seq_weight for s in samples]),
        sample_ids=torch.tensor([s.sample_id for s in samples] + [-1] * bool(padding)),
        weight_versions=laid_out(
            [s.sample.token_versions() for s in samples],
            torch.full((total,), UNKNOWN_VERSION, dtype=torch.int32),
        ),
        routes=routes,
        nll_weight=per_sequence(nll_weights) if len(nll_weights) == len(samples) else None,
        version=version,
        truncated=torch.tensor(cut + [False] * bool(padding)),
        token_rewards=laid_out(turns, torch.zeros(total)) if turns else None,
        sampling_mask=_packed_masks([s.sample for s in samples], rooms, total),
        shared=shared,
    )


def num_rows(batch: MicroBatch) -> int:
    """Return the number of rows that the model computes for a micro-batch: its number of tokens,
    minus the number of rows that sequences take from other sequences."""
    return batch.num_tokens - (batch.shared.total if batch.shared else 0)


def _packed_masks(
    samples: Sequence[Sample], rooms: Sequence[int], num_tokens: int
) -> SamplingMask | None:
    """Join the samples' sampling masks. The mask of sample i is padded to `rooms[i]` tokens, and the
    result to `num_tokens`. Return None if no sample has a mask.

    Raises ValueError if some loss tokens have a mask and others have none, because their log-probs
    would then belong to different distributions.
    """
    parts: list[tuple[SamplingMask | None, int]] = []
    for sample, room in zip(samples, rooms, strict=False):
        size = len(sample.token_ids)
        parts += [(sample.sampling_mask, size), (None, room - size)]
    mask = join_masks([*parts, (None, num_tokens - sum(size for _, size in parts))])
    if mask is None:
        return None
    for sample, (own, size) in zip(samples, parts[::2], strict=True):
        counts = torch.zeros(size) if own is None else own.counts
        if bool((sample.loss_mask & (counts == 0)).any()):
            raise ValueError(
                f"a sample of group {sample.group_id} has loss tokens without a sampling mask, while "
                "others have one; expected rollout.sampling_mask the same for all"
            )
    return mask


def _token_rewards(sample: Sample) -> Tensor:
    """Return f32[T] with the reward of each turn at the last loss token before the end of the turn.

    If the turn itself has no loss token, this is a token of an earlier turn, and the rewards of both
    turns are added. A reward without any loss token before it is left out, because no trained
    token earned it.
    """
    places = sample.loss_mask.nonzero().flatten()
    values = torch.zeros(len(sample.loss_mask), dtype=torch.float64)
    for end, reward in sample.turn_rewards:
        before = places[places < end]
        if len(before):
            values[before[-1]] += reward
    return values.float()


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with its tensors and those of its routes on `device`. A sampling mask
    stays on the CPU."""
    return _moved(batch, device)


def _moved(record: Record, device: torch.device) -> Record:
    moved: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if isinstance(value, Tensor):
            moved[f.name] = value.to(device, non_blocking=True)
        elif isinstance(value, TokenRoutes):
            moved[f.name] = _moved(value, device)
    return dataclasses.replace(record, **moved)
