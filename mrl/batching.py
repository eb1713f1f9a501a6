"""Scored groups -> training batches of this rank: advantages, weights, mini-batches, packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mrl.algorithms.base import Algorithm
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import Sample, SampleGroup, TrainBatch
from parallel.groups import Groups
from parallel.packing import WeightedSample, pack, plan, round_up


def set_advantages(
    groups: Sequence[SampleGroup], algorithm: Algorithm, config: AlgorithmConfig
) -> None:
    """Fill in every group's advantages; a sample without a reward leaves the loss altogether."""
    for group in groups:
        assert group.rewards is not None
        group.advantages = algorithm.advantages(group.rewards, config)
        group.samples = [
            _without_loss(sample) if abstained else sample
            for sample, abstained in zip(group.samples, group.rewards.isnan().tolist(), strict=True)
        ]


def _without_loss(sample: Sample) -> Sample:
    return dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def split_evenly(groups: Sequence[SampleGroup], parts: int) -> list[list[SampleGroup]]:
    """Consecutive groups in `parts` mini-batches of the same number of prompts.

    Raises InputError, with the arithmetic, where they do not divide: nothing is dropped.
    """
    size, rest = divmod(len(groups), parts)
    if rest or not size:
        raise InputError(
            f"train.num_steps_per_rollout: {len(groups)} prompts do not divide into {parts} "
            f"mini-batches ({len(groups)} = {size} x {parts} + {rest})"
        )
    return [list(groups[i * size : (i + 1) * size]) for i in range(parts)]


def make_train_batches(
    parts: Sequence[tuple[Sequence[Sample], Sequence[float]]],
    algorithm: Algorithm,
    groups: Groups,
    micro_batch_tokens: int,
) -> list[TrainBatch]:
    """`make_train_batch` of each mini-batch (samples, advantages) of a step.

    Micro-batches may run in one pass whatever mini-batch they belong to, so where they have to be of
    one length, they all are.
    """
    dims = groups.dims
    plans = [_plan(samples, groups, micro_batch_tokens) for samples, _ in parts]
    longest = max(
        sum(round_up(len(samples[i].token_ids), dims.sequence_multiple) for i in members)
        for (samples, _), shares in zip(parts, plans, strict=True)
        for share in shares
        for members in share
    )
    return [
        _pack_share(
            samples,
            advantages,
            algorithm,
            groups,
            shares[groups.dp_rank],
            min_tokens=longest if dims.equal_micro_batches else 1,
        )
        for (samples, advantages), shares in zip(parts, plans, strict=True)
    ]


def make_train_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    algorithm: Algorithm,
    groups: Groups,
    micro_batch_tokens: int,
) -> TrainBatch:
    """This data-parallel rank's micro-batches of one optimizer step over `samples` of all ranks.

    Every rank computes the same plan, so the normalisers are global before anything is split.
    """
    return make_train_batches([(samples, advantages)], algorithm, groups, micro_batch_tokens)[0]


def _plan(
    samples: Sequence[Sample], groups: Groups, micro_batch_tokens: int
) -> list[list[list[int]]]:
    dims = groups.dims
    return plan(
        [round_up(len(s.token_ids), dims.sequence_multiple) for s in samples],
        dims.dp,
        micro_batch_tokens,
        multiple_of=dims.pp if dims.vpp > 1 else 1,
    )


def _pack_share(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    algorithm: Algorithm,
    groups: Groups,
    share: list[list[int]],
    min_tokens: int,
) -> TrainBatch:
    num_loss_tokens = torch.stack([s.loss_mask.sum() for s in samples])
    total_tokens = int(num_loss_tokens.sum())
    total_samples = int((num_loss_tokens > 0).sum())
    weights = algorithm.sequence_weights(num_loss_tokens, total_tokens, total_samples)
    weighted = [
        WeightedSample(sample, advantage, weight)
        for sample, advantage, weight in zip(samples, advantages, weights.tolist(), strict=True)
    ]
    micro_batches = [
        pack(
            [weighted[i] for i in members],
            groups.dims.token_multiple,
            sequence_multiple=groups.dims.sequence_multiple,
            min_tokens=min_tokens,
        )
        for members in share
    ]
    return TrainBatch(micro_batches, total_tokens, total_samples)
