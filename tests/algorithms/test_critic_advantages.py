"""GAE from a critic's values, the adaptive lambda, whitening, KL in the reward, the critic's loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.algorithms import gae, load_algorithm, vapo
from mrl.algorithms.kl import adapted_coef, reward_penalties
from mrl.algorithms.value_loss import critic_loss
from mrl.config import AlgorithmConfig
from mrl.kernels import oracle
from tests.algorithms.cases import draw, nll_weights, pack, sequence_weights

LENGTHS = [7, 3, 12, 4]


def make_batch(dropped: int = 3):
    rng = torch.Generator().manual_seed(0)
    drawn = [draw(n, rng, dropped=i == dropped) for i, n in enumerate(LENGTHS)]
    config = AlgorithmConfig(name="ppo")
    _, batch = pack("ppo", drawn, sequence_weights("ppo", drawn, config))
    return batch, torch.randn(sum(LENGTHS), generator=rng), torch.rand(sum(LENGTHS), generator=rng)


def rewards_by_hand(batch, sequence_rewards, penalties) -> torch.Tensor:
    rewards = torch.where(batch.loss_mask, -penalties, 0.0)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        tokens = [t for t in range(start, end) if batch.loss_mask[t]]
        if tokens:
            rewards[tokens[-1]] += sequence_rewards[i]
    return rewards


@pytest.mark.parametrize(("lam", "lam_critic"), [(None, None), (0.9, None), (0.9, 0.9), (0.9, 1.0)])
def test_gae_is_the_oracles(lam, lam_critic) -> None:
    batch, values, penalties = make_batch()
    config = AlgorithmConfig(name="ppo", gamma=0.97, lam=lam, lam_critic=lam_critic)
    got = gae.token_advantages(values, batch.rewards, penalties, batch, config)
    rewards = rewards_by_hand(batch, batch.rewards, penalties)
    for part, own in ((0, lam or 0.95), (1, lam_critic or lam or 0.95)):
        expected = oracle.packed_gae(
            rewards, values, batch.loss_mask, batch.cu_seqlens, gamma=0.97, lam=own
        )[part]
        torch.testing.assert_close(got[part].double(), expected, rtol=1e-5, atol=1e-6)


def gae_by_hand(
    rewards: list[float], values: list[float], behind: float, gamma: float, lam: float
) -> list[float]:
    """GAE over the loss tokens of one sequence, with the value `behind` the last one."""
    found, later, following = [], 0.0, behind
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * following - value + gamma * lam * later
        following = value
        found.append(later)
    return found[::-1]


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize(("lam", "lam_critic"), [(0.95, 0.95), ("adaptive", 1.0)])
def test_bootstrap_and_turn_rewards_by_hand(turns, cut_off, lam, lam_critic) -> None:
    """The value behind a truncated end counts, and rewards at ends of turns: discounted, in fp64."""
    batch, values, penalties = make_batch()
    after = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    config = AlgorithmConfig(
        name="ppo", gamma=0.9, lam=lam, lam_critic=lam_critic, lam_alpha=0.5,
        bootstrap_truncated=cut_off,
    )  # fmt: skip
    batch = dataclasses.replace(batch, truncated=torch.tensor([True, False, True, True]))
    token_rewards = torch.where(batch.loss_mask & (batch.position_ids % 3 == 2), after.sin(), 0.0)
    if turns:
        batch = dataclasses.replace(batch, token_rewards=token_rewards)
    if cut_off:
        batch = dataclasses.replace(batch, bootstrap=gae.bootstrap(after, batch))
    got = gae.token_advantages(values, batch.rewards, penalties, batch, config)
    start = 0
    for i, length in enumerate(LENGTHS):
        places = [t for t in range(start, start + length) if batch.loss_mask[t]]
        start += length
        if not places:
            continue
        earned = [float(token_rewards[t]) if turns else 0.0 for t in places]
        earned[-1] += 0.0 if turns else float(batch.rewards[i])
        earned = [r - float(penalties[t]) for r, t in zip(earned, places, strict=True)]
        own = [float(values[t]) for t in places]
        behind = float(after[places[-1]]) if cut_off and batch.truncated[i] else 0.0
        policy = max(0.0, 1 - 1 / (0.5 * len(places))) if lam == "adaptive" else lam
        wanted = gae_by_hand(earned, own, behind, 0.9, policy)
        assert got[0][places].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        returns = gae_by_hand(earned, own, behind, 0.9, lam_critic)
        returns = [a + v for a, v in zip(returns, own, strict=True)]
        assert got[1][places].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)


def test_turn_rewards_of_a_group_are_normalised_over_all_of_its_turns() -> None:
    """GRPO with process supervision; where each sample has one turn it is GSPO's own advantage."""
    config = AlgorithmConfig(name="gspo_token")
    token, sequence = load_algorithm("gspo_token"), load_algorithm("gspo")
    turns = [torch.tensor(own) for own in ([1.0, 0.0, 0.5], [0.0], [0.25, 1.0])]
    everything = torch.cat(turns).double()
    spread = everything.std() + config.advantage_eps
    for own, got in zip(turns, token.turn_rewards(turns, config), strict=True):
        wanted = (own.double() - everything.mean()) / spread
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)
    single = torch.tensor([1.0, 0.0, 0.5, 0.0])
    one_each = token.turn_rewards([r.reshape(1) for r in single], config)
    assert torch.equal(torch.cat(one_each), sequence.advantages([single], config)[0])


def test_vapo_takes_a_lambda_by_length_and_1_for_the_critic() -> None:
    batch, values, _ = make_batch()
    config = AlgorithmConfig(name="vapo", lam_alpha=0.5)
    advantages, returns = vapo.token_advantages(values, batch.rewards, None, batch, config)
    counts = [int(part.sum()) for part in batch.loss_mask.split(LENGTHS)]
    lams = torch.tensor([max(0.0, 1 - 1 / (0.5 * n)) if n else 0.0 for n in counts])
    torch.testing.assert_close(gae.adaptive_lambda(batch.loss_mask, batch.cu_seqlens, 0.5), lams)
    rewards = rewards_by_hand(batch, batch.rewards, torch.zeros_like(values))
    common = rewards, values, batch.loss_mask, batch.cu_seqlens
    expected = oracle.packed_gae(*common, gamma=1.0, lam=lams)[0]
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-6)
    # With gamma and lambda 1 a return is the reward itself, whatever the critic says.
    expected = batch.rewards.repeat_interleave(torch.tensor(LENGTHS)) * batch.loss_mask
    torch.testing.assert_close(returns, expected, rtol=1e-5, atol=1e-6)


def test_whitened_by_the_moments_of_all_ranks() -> None:
    batch, values, _ = make_batch()
    halves = batch.loss_mask.clone(), batch.loss_mask.clone()
    halves[0][10:], halves[1][:10] = False, False
    parts = [values[half].double() for half in halves]
    total = sum(torch.stack([torch.ones_like(v), v, v.square()]).sum(1) for v in parts)
    assert isinstance(total, torch.Tensor)
    mean, std = gae.mean_and_std(total)
    white = gae.whiten(values, mean, std + gae.WHITEN_EPS)[batch.loss_mask]
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert gae.mean_and_std(torch.zeros(3)) == (0.0, 0.0)


def test_reinforce_pp_gives_each_token_the_reward_less_the_penalties_from_it_on() -> None:
    batch, _, penalties = make_batch()
    reinforce = load_algorithm("reinforce_pp")
    config = AlgorithmConfig(name="reinforce_pp")
    got, _ = reinforce.token_advantages(
        torch.zeros(sum(LENGTHS)), batch.rewards, penalties, batch, config
    )
    rewards = rewards_by_hand(batch, batch.rewards, penalties)
    for own, earned, mask in zip(
        got.split(LENGTHS), rewards.split(LENGTHS), batch.loss_mask.split(LENGTHS), strict=True
    ):
        from_here_on = earned.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(own, from_here_on * mask, rtol=1e-5, atol=1e-6)


def test_positive_samples_share_the_likelihood_term() -> None:
    """VAPO's eq. 11: the mean over the tokens of the right samples only, in all micro-batches."""
    rng = torch.Generator().manual_seed(3)
    drawn = [
        dataclasses.replace(draw(n, rng), reward=reward)
        for n, reward in zip([6, 5, 9], [1.0, 0.0, 1.0], strict=True)
    ]
    counts = [int(d.mask.sum()) for d in drawn]
    weights = nll_weights("vapo", drawn, AlgorithmConfig(name="vapo", nll_coef=0.3))
    assert weights is not None
    right = counts[0] + counts[2]
    torch.testing.assert_close(weights, torch.tensor([0.3 / right, 0.0, 0.3 / right]))


def test_the_critic_learns_returns_within_its_clip() -> None:
    batch, values, returns = make_batch()
    batch = dataclasses.replace(batch, old_values=values - 0.5, returns=returns)
    leaf = values.clone().requires_grad_()
    clipped = critic_loss(leaf, batch, AlgorithmConfig(value_clip=0.2))
    free = critic_loss(leaf, batch, AlgorithmConfig(value_clip=None))
    mask = batch.loss_mask
    expected = ((values - returns)[mask].double().square() / 2).mean()  # token mean
    torch.testing.assert_close(free.loss_sum.detach(), expected, rtol=1e-6, atol=0)
    moved = (values - 0.5 + 0.2 - returns)[mask].double().square()
    expected = (moved.maximum((values - returns)[mask].double().square()) / 2).mean()
    torch.testing.assert_close(clipped.loss_sum.detach(), expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="old_values, returns: got None"):
        critic_loss(leaf, dataclasses.replace(batch, returns=None), AlgorithmConfig())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_penalties_in_the_reward(kind) -> None:
    batch, _, _ = make_batch()
    config = AlgorithmConfig(name="ppo", kl_coef=0.3, kl_in="reward", kl_estimator=kind)
    got = reward_penalties(batch.old_logprobs, batch, config)
    d = (batch.ref_logprobs - batch.old_logprobs)[batch.loss_mask]
    terms = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kind]
    torch.testing.assert_close(got[batch.loss_mask], 0.3 * terms, rtol=1e-4, atol=1e-6)
    assert not got[~batch.loss_mask].any()
    with pytest.raises(ValueError, match="expected k1, k2 or k3"):
        reward_penalties(batch.old_logprobs, batch, AlgorithmConfig(kl_estimator="k3+"))


def test_the_coefficient_follows_its_target() -> None:
    config = AlgorithmConfig(kl_coef=0.1, kl_target=0.01, kl_horizon=1000)
    assert adapted_coef(0.1, 0.011, 100, config) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted_coef(0.1, 5.0, 100, config) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted_coef(0.1, 0.0, 100, config) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted_coef(0.1, 0.0, 10**6, config) == pytest.approx(0.1 * 0.8)
    assert adapted_coef(0.1, 5.0, 100, AlgorithmConfig(kl_coef=0.1)) == 0.1
