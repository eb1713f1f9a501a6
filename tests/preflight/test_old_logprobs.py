"""The engine's log-probs as the old ones: where they are refused, and the ratio against them."""

from __future__ import annotations

import pytest
import torch

from mrl.algorithms import load_algorithm
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.preflight.old_logprobs import check_old_logprobs
from mrl.types import MicroBatch
from parallel.policy import with_rollout_as_old


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"name": "gspo"}, "is about 0.001 in bfloat16, 3.3 times the range"),
        (
            {"name": "gspo", "clip_low": 0.2},
            "clips the mean of logp - old over a sequence at 0.0004",
        ),
        ({"name": "decoupled_ppo"}, "decoupled_ppo has a proximal policy of its own"),
        ({"name": "a3po"}, "a3po has a proximal policy of its own"),
        ({"name": "grpo", "importance": "tis"}, "algorithm.importance is tis"),
        ({"name": "grpo", "masks": [{"name": "token_mask"}]}, "algorithm.masks has token_mask"),
        ({"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"}, "algorithm.kl_in is reward"),
    ],
)
def test_what_it_does_not_go_with(keys: dict, part: str) -> None:
    config = AlgorithmConfig(old_logprobs="rollout", **keys)
    with pytest.raises(InputError) as caught:
        check_old_logprobs(config, load_algorithm(config.name))
    assert part in str(caught.value)
    same = config.model_copy(update={"old_logprobs": "trainer"})
    check_old_logprobs(same, load_algorithm(config.name))


@pytest.mark.parametrize(
    "keys", [{"name": "grpo"}, {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}]
)
def test_what_it_goes_with(keys: dict) -> None:
    config = AlgorithmConfig(old_logprobs="rollout", **keys)
    check_old_logprobs(config, load_algorithm(config.name))


def test_the_ratio_is_against_the_engine() -> None:
    """exp(logp - rollout), so that one loss is the policy gradient weighted by it."""
    rollout = torch.tensor([-1.0, -2.0, -0.5])
    batch = MicroBatch(
        input_ids=torch.arange(3),
        position_ids=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3]).int(),
        loss_mask=torch.ones(3, dtype=torch.bool),
        rollout_logprobs=rollout,
        rewards=torch.zeros(1),
        seq_weight=torch.ones(1),
        advantages=torch.tensor([2.0]),
        old_logprobs=torch.full((3,), torch.nan),
    )
    (ready,) = with_rollout_as_old([batch])
    logprobs = rollout + torch.tensor([0.1, -0.1, 0.05])
    found = load_algorithm("grpo").loss(logprobs, ready, AlgorithmConfig(name="grpo"))
    expected = -2.0 * (logprobs - rollout).double().exp().sum()
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
