"""The entropy bonus from logits to its gradient, against fp64 definitions in the terms of verl.

verl: entropy = logsumexp(z) - sum softmax(z) z, one number of them by `agg_loss`, and the loss less
entropy_coeff times it. S sequences of T tokens over V words.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algorithms import load_algorithm
from mrl.algorithms.entropy import with_entropy_bonus
from mrl.config import AlgorithmConfig
from mrl.kernels import vp_logprob
from mrl.types import LossOutput, MicroBatch

S, T, V, TEMPERATURE, COEF, HORIZON = 5, 7, 13, 0.7, 0.03, 24


def drawn() -> tuple[Tensor, Tensor]:
    """Logits f64[S, T, V] and the loss mask bool[S, T], of which one sequence has no token."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(S, T, generator=rng) < 0.7
    mask[2] = False
    return 2 * torch.randn(S, T, V, generator=rng, dtype=torch.float64), mask


def aggregated(values: Tensor, mask: Tensor, how: str) -> Tensor:
    """One number of f64[S, T], as the modes of verl's `agg_loss` are written."""
    sums, counts = (values * mask).sum(1), mask.sum(1)
    kept = counts > 0
    if how == "token_mean":
        return sums.sum() / mask.sum()
    if how == "seq_mean_token_mean":
        return (sums[kept] / counts[kept]).mean()
    total = sums[kept].mean()
    return total / HORIZON if how == "seq_mean_token_sum_norm" else total


def ours(name: str, how: str, logits: Tensor, mask: Tensor, rows: slice, coef: float) -> LossOutput:
    """Loss of the sequences in `rows` without advantages, so that the bonus is all of it."""
    config = AlgorithmConfig(name=name, aggregation=how, entropy_coef=coef)  # pyright: ignore[reportArgumentType]
    algorithm, counts = load_algorithm(name), mask.sum(1)
    weights = algorithm.sequence_weights(
        counts, int(counts.sum()), int((counts > 0).sum()), config, HORIZON
    )
    part, flat_mask = logits[rows].flatten(0, 1), mask[rows].flatten()
    num = len(mask[rows])
    labels = torch.arange(len(part)) % V
    logprobs, entropy = vp_logprob(part, labels, flat_mask, temperature=TEMPERATURE)
    batch = MicroBatch(
        input_ids=labels,
        position_ids=torch.arange(T).repeat(num),
        cu_seqlens=torch.arange(0, num * T + 1, T).int(),
        loss_mask=flat_mask,
        rollout_logprobs=logprobs.detach(),
        rewards=torch.zeros(num),
        seq_weight=weights[rows],
        advantages=torch.zeros(num),
        old_logprobs=logprobs.detach(),
        entropy=entropy,
    )
    return with_entropy_bonus(algorithm.loss(logprobs, batch, config), batch, algorithm, config)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(
    "how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
def test_value_and_gradient_are_those_of_the_definition_in_any_split(name: str, how: str) -> None:
    logits, mask = drawn()
    exact = logits.clone().requires_grad_()
    scaled = exact / TEMPERATURE
    entropy = scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)
    expected = -COEF * aggregated(entropy, mask, how)
    (gradient,) = torch.autograd.grad(expected, exact)
    for parts in ([slice(0, S)], [slice(0, 2), slice(2, S)]):
        own = logits.float().requires_grad_()
        found = sum(ours(name, how, own, mask, rows, COEF).loss_sum for rows in parts)
        assert isinstance(found, Tensor)
        (got,) = torch.autograd.grad(found, own)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(got.double(), gradient, rtol=1e-5, atol=1e-9)


def test_without_a_coefficient_the_loss_is_the_same_object() -> None:
    logits, mask = drawn()
    found = ours("grpo", "token_mean", logits.float().requires_grad_(), mask, slice(0, S), 0.0)
    again = with_entropy_bonus(found, None, None, AlgorithmConfig())  # pyright: ignore[reportArgumentType]
    assert again is found


def test_the_entropy_has_to_be_there() -> None:
    config = AlgorithmConfig(entropy_coef=0.1)
    batch = MicroBatch(*[torch.zeros(1)] * 7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"MicroBatch\.entropy: got None"):
        with_entropy_bonus(LossOutput(torch.zeros(())), batch, load_algorithm("grpo"), config)
