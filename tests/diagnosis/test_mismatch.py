"""The formulas of the dashboard against numbers worked out by hand in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mrl.diagnosis.mismatch import effective_share, gap_statistics, mismatch_statistics
from mrl.system.histogram import log_histogram, quantile
from mrl.types import Max, Mean, MicroBatch, Statistics
from parallel.pass_output import PassOutput
from parallel.reduce import merge


def plain(stats: Statistics) -> dict[str, float]:
    found = {}
    for key, value in stats.items():
        if isinstance(value, Mean):
            found[key] = float(value.total) / float(value.count)
        elif isinstance(value, Max):
            found[key] = float(value.value)
    return found


RATIOS = [1.0, 2.5, 0.4, 1.0]
"""p/q of four loss tokens; a fifth, off the loss, has a ratio that would show."""


def gap() -> Statistics:
    rollout = torch.tensor([-1.0, -2.0, -0.5, -3.0, -9.0])
    old = rollout + torch.tensor([*RATIOS, 1e6]).log()
    return gap_statistics(old, rollout, torch.tensor([True, True, True, True, False]))


def test_gap_statistics() -> None:
    found = plain(gap())
    up, down = math.log(2.5), math.log(0.4)
    assert found["mismatch/logprob_abs_mean"] == pytest.approx((up - down) / 4, rel=1e-6)
    assert found["mismatch/logprob_abs_max"] == pytest.approx(up, rel=1e-6)
    assert found["mismatch/k1"] == pytest.approx(-(up + down) / 4, abs=1e-7)
    assert found["mismatch/k3"] == pytest.approx((1.5 - up + -0.6 - down) / 4, rel=1e-6)
    assert found["mismatch/chi2"] == pytest.approx((1.5**2 + 0.6**2) / 4, rel=1e-6)
    assert found["mismatch/extreme_share"] == 0.5
    percentiles = gap()["mismatch/percentiles"]
    assert percentiles.reported[3] == ("mismatch/p999", 0.999)
    assert int(percentiles.counts.sum()) == 4


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    expected = sum(RATIOS) ** 2 / (len(RATIOS) * sum(ratio**2 for ratio in RATIOS))
    assert effective_share(plain(gap()))["mismatch/ess"] == pytest.approx(expected, rel=1e-6)
    same = gap_statistics(torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert effective_share(plain(same)) == {"mismatch/ess": 1.0}
    assert effective_share({"loss/policy": 1.0}) == {}


def test_micro_batches_add_up() -> None:
    whole = merge([gap(), gap()])
    assert plain(whole) == plain(gap())
    assert int(whole["mismatch/percentiles"].counts.sum()) == 8


def test_no_token_of_the_loss_is_nothing_measured() -> None:
    stats = gap_statistics(torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert float(stats["mismatch/k3"].count) == 0
    assert math.isnan(quantile(stats["mismatch/percentiles"].counts.tolist(), 0.5))


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99, 0.999])
def test_quantiles_are_right_to_their_resolution(q: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator).mul(4).exp() * 1e-5
    mask = torch.rand(20_000, generator=generator) < 0.7
    counts = log_histogram(values, mask).tolist()
    exact = float(np.quantile(values[mask].double().numpy(), q, method="inverted_cdf"))
    assert quantile(counts, q) == pytest.approx(exact, rel=0.0222)


def test_histogram_ends() -> None:
    values = torch.tensor([0.0, 1e-20, float("inf"), float("nan"), 1e30])
    counts = log_histogram(values, torch.ones(5, dtype=torch.bool))
    assert counts[0] == 2
    assert counts[-1] == 3
    assert quantile(counts.tolist(), 0.4) == 0.0
    assert quantile(counts.tolist(), 0.41) > 1e7


def test_staleness_is_of_tokens_that_the_policy_chose() -> None:
    batch = MicroBatch(
        input_ids=torch.zeros(5, dtype=torch.int64),
        position_ids=torch.arange(5),
        cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True, True, False]),
        rollout_logprobs=torch.zeros(5),
        rewards=torch.ones(1),
        seq_weight=torch.ones(1),
        weight_versions=torch.tensor([-1, 7, 9, 9, 2], dtype=torch.int32),
    )
    output = PassOutput(logprobs=[torch.zeros(5)], entropies=[torch.arange(5.0)])
    found = plain(mismatch_statistics([batch], output, version=9))
    assert found["staleness/mean"] == pytest.approx(2 / 3)
    assert found["staleness/max"] == 2
    assert found["entropy"] == 2
    assert mismatch_statistics([batch], PassOutput(), version=9) == {}
