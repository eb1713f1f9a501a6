"""Formulas of verl 0.9.1 and AReaL 1.0.4, run from their source, against ours, and where they differ.

Dimensions: B samples, T tokens of a response, padded on the right.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import gae, load_algorithm
from mrl.algorithms.a3po import proximal_logprobs
from mrl.config import AlgorithmConfig, MaskConfig
from mrl.learn.advantages import compare_rewards
from mrl.types import MicroBatch
from tests.algorithms.others import folder, functions
from tests.algorithms.test_published import DPPO

pytestmark = pytest.mark.release
LENGTHS = (7, 12, 3, 12, 9, 1)
B, T = len(LENGTHS), max(LENGTHS)


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    root = folder("MRL_TEST_VERL") / "verl"
    means = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    known = {
        "verl_F": functions(root / "utils/torch_functional.py", means),
        "AlgoConfig": type("AlgoConfig", (), {}),
        "ActorConfig": object,
    }
    losses = (
        "agg_loss", "compute_policy_loss_dppo_tv", "compute_gae_advantage_return",
        "compute_reinforce_plus_plus_outcome_advantage", "compute_grpo_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
    )  # fmt: skip
    found = vars(functions(root / "trainer/ppo/core_algos.py", losses, **known))
    weights = ("_parse_rollout_is_threshold", "compute_rollout_correction_weights")
    known["compute_is_metrics"] = lambda **_: {}
    found |= vars(functions(root / "trainer/ppo/rollout_corr_helper.py", weights, **known))
    return SimpleNamespace(**found)


@pytest.fixture(scope="module")
def areal() -> SimpleNamespace:
    root = folder("MRL_TEST_AREAL") / "areal"
    known = {
        "PROX_APPROX_METHOD_LOGLINEAR": "loglinear",
        "PROX_APPROX_METHOD_LINEAR": "linear",
        "PROX_APPROX_METHOD_ROLLOUT": "rollout",
        "PROX_APPROX_METHODS_ALL": ["loglinear"],
    }
    names = ("compute_prox_logp_approximations", "_compute_advantages")
    return functions(root / "trainer/ppo/actor.py", names, **known)


def mask() -> Tensor:
    """f64[B, T], with what an environment said in the middle of two samples."""
    found = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).double()
    found[1, 4:7] = found[3, 2:4] = 0.0
    return found


def draw(*, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(B, T, generator=torch.Generator().manual_seed(seed)).double()


def batch_of(**tensors: Tensor) -> MicroBatch:
    flat = {
        name: (t.float() if t.is_floating_point() else t).flatten()
        for name, t in tensors.items()
        if t.ndim == 2
    }
    given = {name: t for name, t in tensors.items() if t.ndim == 1}
    ids = torch.zeros(B * T, dtype=torch.long)
    usual: dict[str, Any] = {
        "rollout_logprobs": torch.zeros(B * T),
        "rewards": torch.zeros(B),
        "seq_weight": torch.full((B,), 1.0 / float(mask().sum())),
    }
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.arange(T).repeat(B),
        cu_seqlens=torch.arange(0, B * T + 1, T).int(),
        loss_mask=mask().bool().flatten(),
        **usual | flat | given,
    )


@pytest.mark.parametrize("first_update", [True, False])
def test_dppo(verl, first_update) -> None:
    roll = -draw(seed=1, scale=3.0).abs() - 0.05
    old = (roll + draw(seed=2, scale=3.0 if first_update else 0.5)).clamp(max=-1e-3)
    now = old if first_update else (old + draw(seed=3, scale=0.5)).clamp(max=-1e-3)
    now, a = now.float().double().requires_grad_(), draw(seed=4)[:, 0]
    config = SimpleNamespace(
        clip_ratio=0.15, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={},
        get=lambda key, usual: usual,
    )  # fmt: skip
    advantages = a[:, None].expand(B, T)
    given = roll.float().double(), now, advantages, mask()
    theirs, _ = verl.compute_policy_loss_dppo_tv(*given, config=config)
    (wanted,) = torch.autograd.grad(theirs, now)
    ours = now.detach().float().flatten().requires_grad_()
    batch = batch_of(old_logprobs=old, rollout_logprobs=roll, advantages=a.float())
    loss = load_algorithm("cispo").loss(ours, batch, AlgorithmConfig(**DPPO)).loss_sum
    (grad,) = torch.autograd.grad(loss, ours)
    assert bool(((now - roll).exp() > 20).any()) == first_update
    assert float(loss.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(grad.double().view(B, T), wanted, rtol=1e-5, atol=1e-8)


def test_icepop_is_mis_and_the_mask_is_not(verl) -> None:
    old, roll = -draw(seed=1).abs(), -draw(seed=2).abs()
    gap = old.float().double() - roll.float().double()
    weights, _ = verl.compute_rollout_correction_weights(gap, mask(), "token", "0.5_5")
    assert int((weights == 0).sum() - (mask() == 0).sum()) > 0
    grads = {}
    for name, options in {
        "plain": {},
        "icepop": {"importance": "mis"},
        "mask": {"masks": (MaskConfig(name="token_mask"),)},
    }.items():
        now = old.float().flatten().requires_grad_()
        batch = batch_of(old_logprobs=old, rollout_logprobs=roll, advantages=torch.ones(B))
        config = AlgorithmConfig(name="dapo", **options)
        loss = load_algorithm("dapo").loss(now, batch, config).loss_sum
        grads[name] = torch.autograd.grad(loss, now)[0].view(B, T).double()
    torch.testing.assert_close(grads["icepop"], weights * grads["plain"], rtol=1e-5, atol=1e-9)
    assert float((grads["mask"] - grads["icepop"]).abs().max()) > 1e-3


def test_the_weight_of_a_sequence_differs(verl) -> None:
    """verl's is the product over the tokens, ours of their mean."""
    gap = draw(seed=1, scale=0.1)
    theirs, _ = verl.compute_rollout_correction_weights(gap, mask(), "sequence", 1e9)
    counts = mask().sum(1)
    ours = ((gap * mask()).sum(1) / counts).exp()
    torch.testing.assert_close(theirs[:, 0], ours**counts)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp(verl, name) -> None:
    """The same but for the std: theirs is unbiased and has another epsilon."""
    rewards, config = [1.0, 0.0, 0.5, 0.25, 0.0, 1.0], AlgorithmConfig(name=name)
    full = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).double()
    at_end = (
        torch.nn.functional.one_hot(torch.tensor(LENGTHS) - 1, T) * torch.tensor(rewards)[:, None]
    )
    if name == "reinforce_pp":
        gamma = SimpleNamespace(gamma=1.0)
        compute = verl.compute_reinforce_plus_plus_outcome_advantage
        theirs, _ = compute(at_end.double(), full, config=gamma)
    else:
        compute = verl.compute_reinforce_plus_plus_baseline_outcome_advantage
        theirs, _ = compute(at_end.double(), full, index=[0, 0, 0, 1, 1, 1])
    of_groups = [torch.tensor(rewards[:3]), torch.tensor(rewards[3:])]
    advantages = compare_rewards(of_groups, torch.tensor(LENGTHS), load_algorithm(name), config)
    ours = advantages[:, None] * full
    n, kept = sum(LENGTHS), full.bool()
    ratio = theirs[kept] / ours.double()[kept]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-5, atol=0)
    assert float(ratio[0]) == pytest.approx(((n - 1) / n) ** 0.5, rel=1e-3)


def test_a_group_of_one_differs(verl) -> None:
    theirs, _ = verl.compute_grpo_outcome_advantage(torch.ones(1, 1), torch.ones(1, 1), [0])
    (ours,) = load_algorithm("grpo").advantages([torch.ones(1)], AlgorithmConfig())
    assert float(theirs) == pytest.approx(1.0, rel=1e-5)
    assert float(ours) == 0.0


def test_gae_of_turn_rewards(verl) -> None:
    """Discounted, with what an environment said between the turns."""
    values, rewards = draw(seed=1).float(), draw(seed=2).float() * mask()
    _, theirs = verl.compute_gae_advantage_return(
        rewards.double(), values.double(), mask(), gamma=0.9, lam=0.95
    )
    batch = batch_of(token_rewards=rewards)
    config = AlgorithmConfig(name="ppo", gamma=0.9, lam=0.95)
    _, ours = gae.token_advantages(values.flatten(), batch.rewards, None, batch, config)
    kept = mask().bool()
    torch.testing.assert_close(ours.view(B, T)[kept].double(), theirs[kept], rtol=1e-5, atol=1e-6)


def test_a3po_is_areals_code(areal) -> None:
    old, now = -draw(seed=1).abs().float(), -draw(seed=2).abs().float()
    versions = 9 - (torch.arange(B * T).view(B, T) % 6)
    theirs = areal.compute_prox_logp_approximations(old, now, versions, 9, "loglinear")["loglinear"]
    batch = dataclasses.replace(batch_of(rollout_logprobs=old, weight_versions=versions), version=9)
    kept = mask().bool()
    config = AlgorithmConfig(name="a3po")
    ours = proximal_logprobs(now.flatten(), batch, config).view(B, T)
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-6, atol=1e-6)
    paper = config.model_copy(update={"proximal_at_no_lag": "policy"})
    ours = proximal_logprobs(now.flatten(), batch, paper).view(B, T)
    fresh = versions == 9
    torch.testing.assert_close(ours[kept & ~fresh], theirs[kept & ~fresh], rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[kept & fresh], now[kept & fresh])
    assert float((ours - theirs)[kept & fresh].abs().min()) > 1e-6


def test_bootstrap_is_areals(areal) -> None:
    """AReaL's tensors are of prompt and response; value t is that of the state after token t."""
    full = torch.nn.functional.pad(mask(), (1, 0))  # a prompt of one token
    lengths = torch.tensor(LENGTHS) + 1
    values, rewards = draw(seed=1).float(), torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0])
    values = torch.cat([values, draw(seed=2)[:, :1].float()], dim=1)  # [B, T + 1]
    config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True)
    trainer = SimpleNamespace(
        config=config, reward_bias=0.0, reward_scaling=1.0, reward_clip=100.0, reward_norm=None,
        kl_ctl=0.0, kl_estimator=lambda a, b: a - b, mask_no_eos_with_zero=False, discount=0.9,
        gae_lambda=0.95, adv_norm=None,
    )  # fmt: skip
    data = {
        "input_ids": torch.zeros(B, T + 1, dtype=torch.long),
        "attention_mask": (torch.arange(T + 1) < lengths[:, None]).long(),
        "loss_mask": full,
        "logprobs": torch.zeros(B, T + 1),
        "rewards": rewards.clone(),
        "values": values.clone(),
        "prox_logp": None,
    }
    theirs = areal._compute_advantages(trainer, data)["advantages"][:, :T]
    after = values[:, 1:]
    batch = batch_of(rewards=rewards, truncated=torch.tensor(LENGTHS) == T)
    batch = dataclasses.replace(batch, bootstrap=gae.bootstrap(after.flatten(), batch))
    own = AlgorithmConfig(name="ppo", gamma=0.9, lam=0.95)
    before = values[:, :T].flatten().contiguous()
    ours, _ = gae.token_advantages(before, rewards, None, batch, own)
    kept = mask().bool()
    torch.testing.assert_close(ours.view(B, T)[kept], theirs[kept], rtol=1e-5, atol=1e-6)
    plain = dataclasses.replace(batch, bootstrap=None)
    bare, _ = gae.token_advantages(before, rewards, None, plain, own)
    cut = kept & (torch.tensor(LENGTHS) == T)[:, None]
    assert float((bare.view(B, T) - theirs)[cut].abs().max()) > 1e-2
