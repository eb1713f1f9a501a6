"""REINFORCE++ and its kin: moments over the loss tokens of the step, against fp64 token by token."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.algorithms import list_algorithms, load_algorithm, traits
from mrl.config import AlgorithmConfig, ParallelConfig
from mrl.learn.advantages import compare_rewards, compute_advantages
from mrl.learn.batching import make_train_batches
from mrl.learn.kl_control import KlControl
from mrl.learn.step_data import make_step_data
from mrl.types import SampleGroup
from parallel.dims import ParallelDims
from parallel.mesh import Mesh, init_mesh
from tests.ranks import run_ranks
from tests.sample_groups import group, sample

WHITENED = [
    name
    for name in list_algorithms()
    if traits(load_algorithm(name)).whitens and not traits(load_algorithm(name)).needs_critic
]
CENTRED = ("reinforce_pp_baseline",)
FLOOR = AlgorithmConfig()


def step() -> list[SampleGroup]:
    """Long answers are wrong: over tokens the mean reward is lower than over samples."""
    return [
        group([1.0, 0.0, math.nan], 0, sample(2), sample(19), sample(7)),
        group([0.5, 0.25, 1.0], 1, sample(3), sample(11, "length"), sample(5)),
        group([1.0, 1.0, 1.0], 2, sample(13), sample(1), sample(4)),
    ]


def by_definition(groups: list[SampleGroup], centred: bool) -> list[Tensor]:
    """f64[tokens] of each sample: (A - mean) / std of the tokens of all, each with its sample's A."""
    tokens = []
    for one in groups:
        assert one.rewards is not None
        rewards = one.rewards.double()
        known = rewards[~rewards.isnan()]
        own = rewards - known.mean() if centred else rewards
        tokens += [
            torch.full((int(s.loss_mask.sum()),), float(a), dtype=torch.float64)
            for s, a in zip(one.samples, own, strict=True)
        ]
    everything = torch.cat(tokens)
    std = max(float(everything.std(correction=0)), FLOOR.min_group_std) + FLOOR.advantage_eps
    return [(own - everything.mean()) / std for own in tokens]


def advantages(name: str, groups: list[SampleGroup], config: AlgorithmConfig) -> list[float]:
    algorithm = load_algorithm(name)
    data = make_step_data(groups, algorithm, config, 20)
    return compare_rewards(data.rewards, data.num_loss_tokens, algorithm, config).tolist()


def test_who_whitens() -> None:
    assert WHITENED == ["a3po", "decoupled_ppo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", WHITENED)
def test_moments_are_over_tokens(name: str) -> None:
    config = AlgorithmConfig(name=name)
    data = make_step_data(step(), load_algorithm(name), config, 20)
    expected = by_definition(data.trained_groups, name in CENTRED)
    for got, wanted in zip(advantages(name, step(), config), expected, strict=True):
        assert got == pytest.approx(float(wanted[0]) if len(wanted) else 0.0, rel=1e-6)
    ones = [dataclasses.replace(one, samples=[sample(4)] * 3) for one in step()]
    assert advantages(name, ones, config) != pytest.approx(advantages(name, step(), config))


@pytest.mark.parametrize("name", WHITENED)
def test_groups_that_only_fill_a_step_do_not_move_its_moments(name: str) -> None:
    """Dynamic sampling fills up with zero-variance groups, which leave the loss."""
    config = AlgorithmConfig(name=name, dynamic_sampling=True)
    got = advantages(name, step(), config)
    assert got[:6] == advantages(name, step()[:2], config)
    assert got[6:] == [0.0] * 3


@pytest.mark.parametrize("name", WHITENED)
def test_equal_rewards_give_exactly_nothing(name: str) -> None:
    config = AlgorithmConfig(name=name)
    flat = [group([0.1, 0.1, 0.1], 0, sample(7), sample(3), sample(5))]
    assert advantages(name, flat, config) == [0.0] * 3


def with_and_without_kl() -> tuple[list[Tensor], Tensor]:
    """Token advantages of a KL of 0 in the reward, and the samples' without one."""
    mesh: Mesh = init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)
    algorithm, config = load_algorithm("reinforce_pp"), AlgorithmConfig(name="reinforce_pp")
    kl = config.model_copy(update={"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    data = make_step_data(step(), algorithm, config, 20)
    samples, rewards = data.samples, data.rewards
    numbers = torch.cat(rewards).nan_to_num(0.0).tolist()
    (made,) = make_train_batches([(samples, numbers)], algorithm, mesh, 30, config=kl)
    batches = []
    for batch in made.micro_batches:
        same = torch.zeros(batch.num_tokens)
        batches.append(dataclasses.replace(batch, old_logprobs=same, ref_logprobs=same))
    penalties = KlControl(kl).penalties(batches, len(samples), mesh)
    given = batches, rewards, data.num_loss_tokens, algorithm
    found = compute_advantages(*given, kl, mesh, penalties=penalties)
    plain = compute_advantages(*given, config, mesh)
    tokens = [
        torch.where(b.loss_mask, b.token_advantages, torch.nan)
        for b in found.batches
        if b.token_advantages is not None
    ]
    wanted = [
        b.advantages.repeat_interleave(b.cu_seqlens.diff().long())
        for b in plain.batches
        if b.advantages is not None
    ]
    return [torch.cat(tokens), torch.cat(wanted)], plain.samples


def test_a_kl_of_nothing_changes_nothing(tmp_path: Path) -> None:
    """One definition with the KL in the reward and without it."""
    ((tokens, wanted), samples) = run_ranks(1, with_and_without_kl, folder=tmp_path)[0]
    known = ~tokens.isnan()
    assert int(known.sum()) == 2 + 19 + 3 + 11 + 5 + 13 + 1 + 4
    torch.testing.assert_close(tokens[known], wanted[known], rtol=1e-5, atol=1e-6)
    assert float(samples[2]) == 0.0
