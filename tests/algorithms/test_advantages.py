"""Rewards of a step to advantages: by hand, and what holds for every algorithm."""

from __future__ import annotations

import pytest
import torch

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.dapo import overlong_penalty
from mrl.config import AlgorithmConfig

CONFIG = AlgorithmConfig()
NAMES = [name for name in list_algorithms() if name != "nll"]
NAN = float("nan")
STEP = [torch.tensor([1.0, 0.0, NAN, 0.0]), torch.tensor([3.0, 1.0])]
EXPECTED = {
    "grpo": [[2 / 3, -1 / 3, 0, -1 / 3], [1, -1], (3**-0.5, 2**0.5)],
    "dr_grpo": [[2 / 3, -1 / 3, 0, -1 / 3], [1, -1], None],
    "rloo": [[1, -0.5, 0, -0.5], [2, -2], None],
    "ppo": [[1, 0, 0, 0], [3, 1], None],
}
SAME_AS = {
    "grpo": ("dapo", "gspo", "gspo_token", "cispo", "sapo"),
    "dr_grpo": ("reinforce_pp_baseline",),
    "ppo": ("vapo", "reinforce_pp", "decoupled_ppo", "a3po"),
}


@pytest.mark.parametrize("name", NAMES)
def test_advantages_by_hand(name) -> None:
    """One sample of the first group has no reward: it has 0 and counts for nobody.

    What the loop whitens afterwards (`WHITENS`) is in tests/learn/test_whitening.py.
    """
    own = next((first for first, others in SAME_AS.items() if name in others), name)
    *groups, spreads = EXPECTED[own]
    got = load_algorithm(name).advantages(STEP, CONFIG)
    for i, (advantages, group) in enumerate(zip(got, groups, strict=True)):
        scale = 1.0 if spreads is None else float(spreads[i]) + CONFIG.advantage_eps
        torch.testing.assert_close(advantages, torch.tensor(group).float() / scale)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if load_algorithm(name).advantages is not raw_rewards]
)
def test_no_signal_is_exactly_zero(name) -> None:
    """The mean of seven times 0.1 is rounded; the others get theirs where the loop whitens."""
    step = [torch.tensor(r) for r in ([0.1] * 7, [NAN] * 3, [NAN, 0.1], [0.1])]
    for rewards, got in zip(step, load_algorithm(name).advantages(step, CONFIG), strict=True):
        assert torch.equal(got, torch.zeros_like(rewards))


@pytest.mark.parametrize("name", NAMES)
def test_a_nearly_equal_group_does_not_explode(name) -> None:
    """Rewards 1 and 1.0004 would be as far apart as 0 and 1 without the floor."""
    step = [torch.tensor([1.0, 1.0004])]
    (got,) = load_algorithm(name).advantages(step, CONFIG)
    (bare,) = load_algorithm(name).advantages(step, AlgorithmConfig(min_group_std=0.0))
    assert float(got.diff().abs()) <= 0.5
    if float(bare.diff().abs()) > 1:  # those that divide by a std
        assert float(got.diff().abs()) == pytest.approx(0.0004 / 1.1e-3, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_rewards_are_refused(name) -> None:
    with pytest.raises(ValueError, match=r"rewards: got .*inf"):
        load_algorithm(name).advantages([torch.tensor([1.0, torch.inf])], CONFIG)


def test_overlong_penalty() -> None:
    lengths = torch.tensor([1, 12, 14, 16, 20, 24])
    expected = torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    assert torch.equal(overlong_penalty(lengths, max_len=20, buffer_len=8), expected)
    with pytest.raises(ValueError, match="expected 1 to max_len = 20"):
        overlong_penalty(lengths, 20, 21)
