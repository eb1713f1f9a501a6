"""Contract of every module in mrl/algorithms, and what each one computes."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mrl.algorithms import list_algorithms, load_algorithm, traits
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import LossOutput, MicroBatch
from tests.algorithms.cases import draw, nll_weights, pack, sequence_weights, without

CONFIG = AlgorithmConfig()
POLICY_GRADIENT = [name for name in list_algorithms() if name != "nll"]
LENGTHS = [5, 2, 9, 4, 12, 3]


def make_step(name: str, seed: int = 0) -> tuple[Tensor, MicroBatch]:
    """Sequences of LENGTHS in one micro-batch; the fourth has no loss token."""
    rng = torch.Generator().manual_seed(seed)
    drawn = [draw(n, rng, scale=0.1, dropped=i == 3) for i, n in enumerate(LENGTHS)]
    weights, nll = sequence_weights(name, drawn, CONFIG), nll_weights(name, drawn, CONFIG)
    return pack(name, drawn, weights, nll)


@pytest.mark.parametrize("name", list_algorithms())
def test_contract(name) -> None:
    algorithm = load_algorithm(name)
    logprobs, batch = make_step(name)
    weights = batch.seq_weight
    assert weights.dtype == torch.float32
    assert weights.shape == (len(LENGTHS),)
    assert weights[3] == 0
    assert bool((weights[[0, 1, 2, 4, 5]] > 0).all())
    nothing = algorithm.sequence_weights(torch.zeros(2, dtype=torch.long), 0, 0, CONFIG, 8)
    assert torch.equal(nothing, torch.zeros(2))

    output = algorithm.loss(logprobs, batch, CONFIG)
    assert isinstance(output, LossOutput)
    assert output.loss_sum.shape == ()
    output.loss_sum.backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad[~batch.loss_mask] == 0).all())
    assert bool((logprobs.grad[batch.loss_mask] != 0).any())
    assert all(not t.requires_grad for stat in output.stats.values() for t in vars(stat).values())


@pytest.mark.parametrize("name", list_algorithms())
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5]], [[4, 0, 3], [5, 2, 1]]])
def test_any_split_is_the_same_bits(name, split) -> None:
    """What the tests against a definition cannot say: gradients do not depend on the packing at all."""
    rng = torch.Generator().manual_seed(1)
    drawn = [draw(n, rng, scale=0.1, dropped=i == 3) for i, n in enumerate(LENGTHS)]
    weights, nll = sequence_weights(name, drawn, CONFIG), nll_weights(name, drawn, CONFIG)
    logprobs, batch = pack(name, drawn, weights, nll)
    whole = load_algorithm(name).loss(logprobs, batch, CONFIG).loss_sum
    grads = torch.autograd.grad(whole, logprobs)[0].split(LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for ids in split:
        chosen = [drawn[i] for i in ids]
        part, part_batch = pack(name, chosen, weights[ids], None if nll is None else nll[ids])
        loss = load_algorithm(name).loss(part, part_batch, CONFIG).loss_sum
        (grad,) = torch.autograd.grad(loss, part)
        total += loss.detach()
        assert torch.equal(grad, torch.cat([grads[i] for i in ids]))
    torch.testing.assert_close(total, whole.detach(), rtol=1e-12, atol=1e-15)


def test_weights_are_the_published_means() -> None:
    counts, total, samples = torch.tensor([2, 0, 8]), 10, 2
    token, mean, summed = [0.1, 0.0, 0.1], [0.25, 0.0, 0.0625], [0.5, 0.0, 0.5]
    expected = {
        "gspo": summed, "gspo_token": summed, "grpo": mean, "sapo": mean, "rloo": summed,
        "dr_grpo": [1 / 32, 0.0, 1 / 32],
    }  # fmt: skip
    for name in list_algorithms():
        weigh = load_algorithm(name).sequence_weights
        got = weigh(counts, total, samples, CONFIG, 16)
        assert torch.equal(got, torch.tensor(expected.get(name, token))), name
    chosen = AlgorithmConfig(aggregation="token_mean")
    for name, published in (("grpo", 0.1), ("gspo", 0.8)):  # the kernel divides GSPO's by 8 tokens
        got = load_algorithm(name).sequence_weights(counts, total, samples, chosen, 16)
        assert got[2] == pytest.approx(published)
    with pytest.raises(ValueError, match="the constant that seq_mean_token_sum_norm"):
        load_algorithm("dr_grpo").sequence_weights(counts, total, samples, CONFIG, 0)


CLIPS = {
    "grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "ppo": (0.2, 0.2),
    "vapo": (0.2, 0.28), "cispo": (1.0, 4.0), "decoupled_ppo": (0.2, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("configured", [False, True])
def test_clip_range_and_statistics(name, configured) -> None:
    config = AlgorithmConfig(clip_low=0.5, clip_high=0.7) if configured else CONFIG
    low, high = (0.5, 0.7) if configured else CLIPS[name]
    edges = [(1 + high, 1.0)] + [(1 - low, -1.0)] * (low < 1)
    for edge, advantage in edges:
        for inside in (True, False):
            ratio = 1 + (edge - 1) * (0.9 if inside else 1.1)
            logprobs, batch = make_step(name)
            batch = dataclasses.replace(
                batch,
                old_logprobs=logprobs.detach() - torch.tensor(ratio).log(),
                rollout_logprobs=logprobs.detach() - torch.tensor(ratio).log(),
                advantages=torch.full((len(LENGTHS),), advantage),
                token_advantages=None
                if batch.token_advantages is None
                else torch.full((sum(LENGTHS),), advantage),
            )
            stats = load_algorithm(name).loss(logprobs, batch, config).stats
            assert {"ratio/mean", "ratio/max", "ratio/clip_frac"} <= set(stats)
            clipped, mean = stats["ratio/clip_frac"], stats["ratio/mean"]
            assert float(clipped.total / clipped.count) == (0.0 if inside else 1.0)
            torch.testing.assert_close(float(mean.total / mean.count), ratio, rtol=1e-6, atol=0)
            torch.testing.assert_close(float(stats["ratio/max"].value), ratio, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", POLICY_GRADIENT)
@pytest.mark.parametrize("kind", ["k1", "k1+", "k3_unbiased"])
def test_kl_to_the_reference_is_the_mean_over_loss_tokens(name, kind) -> None:
    logprobs, batch = make_step(name)
    same = logprobs.detach()
    batch = dataclasses.replace(
        batch, old_logprobs=same, rollout_logprobs=same, ref_logprobs=same - 0.5
    )
    config = AlgorithmConfig(kl_coef=0.1, kl_estimator=kind)
    kl = load_algorithm(name).loss(logprobs, batch, config).stats["kl/ref"]
    expected = 0.5 if kind.startswith("k1") else math.exp(-0.5) - 1 + 0.5
    assert int(kl.count) == int(batch.loss_mask.sum())
    assert float(kl.total / kl.count) == pytest.approx(expected, rel=1e-5)
    in_reward = config.model_copy(update={"kl_in": "reward", "kl_estimator": "k1"})
    assert "kl/ref" not in load_algorithm(name).loss(logprobs, batch, in_reward).stats


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_what_the_loss_needs_is_required(name) -> None:
    algorithm = load_algorithm(name)
    logprobs, batch = make_step(name)
    needed = "old_logprobs" if traits(algorithm).needs_old_logprobs else "version"
    with pytest.raises(ValueError, match=f"{needed}.*got None"):
        algorithm.loss(logprobs, without(batch, **{needed: None}), CONFIG)
    if traits(algorithm).needs_critic:
        with pytest.raises(ValueError, match="token_advantages: got None"):
            algorithm.loss(logprobs, without(batch, token_advantages=None), CONFIG)


def test_gspo_refuses_token_advantages_and_gspo_token_agrees_without() -> None:
    logprobs, batch = make_step("gspo_token")
    with pytest.raises(ValueError, match="expected gspo_token"):
        load_algorithm("gspo").loss(logprobs, batch, CONFIG)
    plain = without(batch, token_advantages=None)
    got = [
        torch.autograd.grad(load_algorithm(n).loss(logprobs, plain, CONFIG).loss_sum, logprobs)[0]
        for n in ("gspo", "gspo_token")
    ]
    assert torch.equal(*got)


@pytest.mark.parametrize(("at_no_lag", "first"), [("rollout", 0.0), ("policy", 1.0)])
def test_a3po_puts_its_proximal_policy_by_the_age_of_each_token(at_no_lag, first) -> None:
    """The proximal policy has seen all versions since a token was sampled, but for the last; at no lag
    AReaL's code takes what sampled the token, and the paper the policy itself."""
    logprobs, batch = make_step("a3po")
    ages = torch.tensor([0, 1, 2, 4, 10])
    share = torch.tensor([first, 0.0, 1 / 2, 3 / 4, 9 / 10])
    n = len(ages)
    batch = dataclasses.replace(
        batch,
        loss_mask=torch.arange(sum(LENGTHS)) < n,
        rollout_logprobs=torch.full((sum(LENGTHS),), -2.0),
        weight_versions=torch.nn.functional.pad(20 - ages, (0, sum(LENGTHS) - n), value=-1).int(),
        version=20,
    )
    now = torch.full_like(logprobs, -1.0)
    config = AlgorithmConfig(name="a3po", proximal_at_no_lag=at_no_lag)
    proximal = load_algorithm("a3po").proximal_logprobs(now, batch, config)
    torch.testing.assert_close(proximal[:n], -2.0 + share)
    assert not proximal[n:].any()


def test_nll_is_the_token_mean_and_has_no_advantages() -> None:
    logprobs, batch = make_step("nll")
    loss = load_algorithm("nll").loss(logprobs, batch, CONFIG).loss_sum
    expected = -logprobs.detach()[batch.loss_mask].double().mean()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    with pytest.raises(InputError, match=r"'nll'.*expected an RL algorithm"):
        load_algorithm("nll").advantages([torch.ones(2)], CONFIG)


@pytest.mark.parametrize("name", ["gsp", "base", "__init__", "no.such_module", ".gspo", "a..b", ""])
def test_unknown_name_lists_what_there_is(name) -> None:
    with pytest.raises(InputError, match="expected one of a3po, cispo, dapo"):
        load_algorithm(name)


def test_near_name_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean 'gspo'"):
        load_algorithm("gsppo")


def test_outside_module_is_loaded_and_checked(monkeypatch) -> None:
    module = ModuleType("outside.mine")
    monkeypatch.setitem(sys.modules, "outside", ModuleType("outside"))
    monkeypatch.setitem(sys.modules, "outside.mine", module)
    module.loss = module.advantages = lambda *_: None
    with pytest.raises(InputError, match=r"'outside\.mine' lacks sequence_weights"):
        load_algorithm("outside.mine")
    module.sequence_weights = lambda *_: None
    assert load_algorithm("outside.mine") is module
