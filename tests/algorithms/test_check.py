"""What a recipe's `algorithm` branch may not ask for, said in one line before the start."""

from __future__ import annotations

import pytest
import torch

from mrl.algorithms import check_algorithm, list_algorithms, load_algorithm, traits
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import MicroBatch


@pytest.mark.parametrize("name", list_algorithms())
def test_every_algorithm_takes_its_defaults(name) -> None:
    check_algorithm(AlgorithmConfig(name=name))


@pytest.mark.parametrize(
    "given",
    [
        {"name": "ppo", "lam": 0.9, "lam_critic": 1.0, "value_clip": None, "whiten": False},
        {"name": "ppo", "lam": "adaptive", "lam_alpha": 0.1, "kl_coef": 0.1, "kl_in": "reward"},
        {"name": "vapo", "nll_coef": 0.2, "dual_clip": 3.0, "lam_alpha": 0.1},
        {"name": "cispo", "min_group_std": 0.0, "advantage_eps": 1e-6},
        {"name": "vapo", "bootstrap_truncated": True, "turn_rewards": True, "gamma": 0.99},
        {"name": "gspo_token", "turn_rewards": True, "dual_clip": 1.01},
        {"name": "grpo", "clip_high": 0.1, "dual_clip": 1.15},
        {"name": "a3po", "proximal_at_no_lag": "policy"},
        {"name": "sapo", "tau_positive": 1.5, "importance": "tis", "aggregation": "token_mean"},
        {"name": "gspo", "masks": [{"name": "opsm", "high": 0.5}, {"name": "token_mask"}]},
        {"name": "grpo", "kl_coef": 0.1, "kl_target": 0.01, "kl_estimator": "k3_unbiased"},
    ],
)
def test_what_makes_sense_passes(given) -> None:
    check_algorithm(AlgorithmConfig(**given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "sapo", "clip_low": 0.1}, "clip_low is 0.1, but sapo does not read it"),
        ({"name": "cispo", "dual_clip": 3}, "dual_clip is 3.0, but cispo does not read it"),
        ({"name": "gspo", "lam": 0.9}, "lam is 0.9, but gspo does not read it"),
        ({"name": "ppo", "nll_coef": 0.1}, "nll_coef is 0.1, but ppo does not read it"),
        ({"name": "grpo", "value_clip": None}, "value_clip is None, but grpo does not read it"),
        (
            {"name": "grpo", "clip_high": 2, "dual_clip": 2.5},
            "dual_clip is 2.5, expected above 1 + clip_high = 3",
        ),
        (
            {"name": "grpo", "dual_clip": 1.2},
            "above 1 + clip_high = 1.2 (the published clip_high of",
        ),
        (
            {"name": "dapo", "dual_clip": 1.25},
            "dual_clip is 1.25, expected above 1 + clip_high = 1.28",
        ),
        ({"name": "gspo", "dual_clip": 1.0003}, "expected above 1 + clip_high = 1.0004"),
        ({"name": "a3po", "dual_clip": 1.1}, "(the published clip_high of a3po); 3 is usual"),
        ({"kl_in": "reward"}, "kl_in is reward, but algorithm.kl_coef is 0"),
        ({"kl_target": 0.1}, "kl_target is 0.1, but algorithm.kl_coef is 0"),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3+"},
            "kl_estimator is k3+, which changes only the gradient",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator is k1, but algorithm.kl_coef is 0"),
        (
            {"kl_coef": 0.1, "kl_horizon": 5},
            "kl_horizon is 5, but algorithm.kl_target is not given",
        ),
        ({"name": "rloo", "min_group_std": 0.1}, "min_group_std is 0.1, but rloo does not read it"),
        ({"name": "ppo", "advantage_eps": 0.1}, "advantage_eps is 0.1, but ppo does not read it"),
        ({"name": "ppo", "lam": 1.5}, "lam is 1.5, expected 0 to 1"),
        ({"name": "ppo", "lam": 0.9, "lam_alpha": 0.1}, "lam_alpha is 0.1, but lam is 0.9"),
        (
            {"name": "ppo", "lam_alpha": 0.1},
            "lam_alpha is 0.1, but lam is 0.95 (the published lam of ppo); set lam to adaptive",
        ),
        ({"masks": [{"name": "opsm"}]}, "opsm: got low None, high None, expected high alone"),
        (
            {"masks": [{"name": "dppo", "high": 2}]},
            "dppo: got low 0.15, high 2, expected at most 1",
        ),
        (
            {"masks": [{"name": "token_mask", "low": 1.2}]},
            "token_mask: got the range [1.2, 5], expected a range that contains 1",
        ),
        ({"masks": [{"name": "token_mask"}, {"name": "token_mask"}]}, "token_mask twice"),
        (
            {"name": "grpo", "turn_rewards": True},
            "turn_rewards is True, but grpo does not read it",
        ),
        (
            {"name": "reinforce_pp", "bootstrap_truncated": True},
            "bootstrap_truncated is True, but reinforce_pp does not read it",
        ),
        (
            {"name": "decoupled_ppo", "proximal_at_no_lag": "policy"},
            "proximal_at_no_lag is policy, but decoupled_ppo does not read it",
        ),
        ({"name": "gsppo"}, "did you mean 'gspo'"),
    ],
)
def test_what_makes_none_is_refused_in_one_line(given, reason) -> None:
    with pytest.raises(InputError) as caught:
        check_algorithm(AlgorithmConfig(**given))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def one_token(old: float, *, with_critic: bool) -> MicroBatch:
    """A sequence of one token, a version old, with log-prob `old` everywhere and advantage 1."""
    one, logprobs = torch.ones(1), torch.tensor([old])
    return MicroBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.tensor([True]),
        rollout_logprobs=logprobs,
        rewards=one,
        seq_weight=one,
        advantages=one,
        weight_versions=torch.tensor([1], dtype=torch.int32),
        version=2,
        old_logprobs=logprobs,
        token_advantages=one if with_critic else None,
        nll_weight=torch.zeros(1) if with_critic else None,
    )


@pytest.mark.parametrize("name", list_algorithms())
def test_a_dual_clip_is_compared_with_the_range_that_the_loss_uses(name) -> None:
    """`CLIP_HIGH` of each algorithm is what its loss clips with: its gradient for A > 0 ends there."""
    found = traits(load_algorithm(name))
    if found.reads is None or "dual_clip" not in found.reads:
        return
    assert found.clip_high is not None
    for offset, is_clipped in ((-1e-5, False), (1e-5, True)):
        ratio = torch.tensor(1 + found.clip_high + offset, dtype=torch.float64)
        logprobs = torch.tensor([float(ratio.log()) - 1.0]).requires_grad_()
        config = AlgorithmConfig(name=name, nll_coef=0.0 if name == "vapo" else None)
        batch = one_token(-1.0, with_critic=found.needs_critic)
        load_algorithm(name).loss(logprobs, batch, config).loss_sum.backward()
        assert logprobs.grad is not None
        assert (float(logprobs.grad) == 0) == is_clipped
