"""What a recipe is under a published name: IcePop and DPPO by their definitions, in fp64."""

from __future__ import annotations

import pytest
import torch

from mrl.algorithms import check_algorithm, load_algorithm
from mrl.algorithms.describe import describe
from mrl.config import AlgorithmConfig, MaskConfig
from tests.algorithms.cases import Drawn, draw, pack, sequence_weights

DPPO = {
    "name": "cispo",
    "clip_high": 19,
    "importance": "tis",
    "importance_high": 20,
    "masks": (MaskConfig(name="dppo"),),
}
"""The recipe of docs/algorithms.md."""
LENGTHS = (9, 17, 31, 5)


def drawn(*, first_update: bool) -> list[Drawn]:
    rng = torch.Generator().manual_seed(3)
    sequences = [draw(n, rng, scale=0.8) for n in LENGTHS]
    if not first_update:
        return sequences
    sequences = [draw(n, rng, scale=3.0) for n in LENGTHS]  # so that some ratios are above 20
    return [Drawn(**{**vars(d), "logprobs": d.old}) for d in sequences]


def by_definition(sequences: list[Drawn]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Mean over tokens of -M min(pi / mu, 20) A log pi, M = 0 where |pi - mu| > 0.15 moves on."""
    leaves = [d.logprobs.double().requires_grad_() for d in sequences]
    terms = []
    for leaf, d in zip(leaves, sequences, strict=True):
        logp, roll = leaf[d.mask], d.rollout.double()[d.mask]
        moved = (logp.exp() - roll.exp()).detach()
        kept = moved <= 0.15 if d.advantage > 0 else moved >= -0.15
        ratio = (logp - roll).exp().detach().clamp(max=20.0)
        terms.append(-kept.double() * ratio * d.advantage * logp)
    value = torch.cat(terms).mean()
    return value.detach(), list(torch.autograd.grad(value, leaves))


@pytest.mark.parametrize("first_update", [True, False])
def test_dppo_is_its_published_definition(first_update) -> None:
    config, sequences = AlgorithmConfig(**DPPO), drawn(first_update=first_update)
    check_algorithm(config)
    ratios = torch.cat([(d.logprobs - d.rollout)[d.mask].exp() for d in sequences])
    assert bool((ratios > 20).any()) == first_update
    logprobs, batch = pack("cispo", sequences, sequence_weights("cispo", sequences, config))
    output = load_algorithm("cispo").loss(logprobs, batch, config)
    (grad,) = torch.autograd.grad(output.loss_sum, logprobs)
    value, expected = by_definition(sequences)
    assert 0 < float(output.stats["mask/dppo"].total) < len(ratios)
    torch.testing.assert_close(output.loss_sum.detach(), value, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), torch.cat(expected), rtol=1e-5, atol=1e-9)
    without = config.model_copy(update={"importance": "none", "importance_high": None})
    other = load_algorithm("cispo").loss(logprobs, batch, without).loss_sum.detach()
    assert float((other - value).abs() / value.abs()) > 1e-2  # against the trainer's own log-probs


def test_icepop_is_mis_and_not_a_mask() -> None:
    """Each token weighs k = exp(old - roll) where k is in [0.5, 5], and 0 elsewhere."""
    sequences = drawn(first_update=True)
    weight = torch.cat([(d.old - d.rollout).double().exp() for d in sequences])
    mask = torch.cat([d.mask for d in sequences])
    inside = mask & (weight >= 0.5) & (weight <= 5.0)
    assert 0 < int(inside.sum()) < int(mask.sum())
    grads = {}
    for name, options in {
        "plain": {},
        "icepop": {"importance": "mis"},
        "mask": {"masks": (MaskConfig(name="token_mask"),)},
    }.items():
        config = AlgorithmConfig(name="grpo", **options)
        logprobs, batch = pack("grpo", sequences, sequence_weights("grpo", sequences, config))
        loss = load_algorithm("grpo").loss(logprobs, batch, config).loss_sum
        (grads[name],) = torch.autograd.grad(loss, logprobs)
    kept = torch.where(inside, grads["plain"], 0.0).double()
    weighted = torch.where(inside, weight, 0.0) * kept
    torch.testing.assert_close(grads["icepop"].double(), weighted, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(grads["mask"].double(), kept, rtol=1e-5, atol=1e-9)


def test_a_recipe_says_what_it_is() -> None:
    icepop = AlgorithmConfig(name="gspo", importance="mis")
    assert describe(icepop) == "gspo, mis of each token in [0.5, 5] (IcePop, arXiv 2510.18855)"
    assert "together DPPO, arXiv 2602.04879" in describe(AlgorithmConfig(**DPPO))
    for other in ({"importance": "none"}, {"clip_high": 4}, {"name": "dapo"}, {"masks": ()}):
        assert "DPPO" not in describe(AlgorithmConfig(**DPPO | other))
    assert "trains as gspo does" in describe(AlgorithmConfig(name="gspo_token"))
    turns = AlgorithmConfig(name="gspo_token", turn_rewards=True)
    assert describe(turns) == "gspo_token, rewards credited to their turns"
    assert describe(AlgorithmConfig()) == "gspo"
