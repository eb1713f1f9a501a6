"""What the guards of an update measure and judge: pure functions, no model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import gspo
from mrl.config import AlgorithmConfig, GuardConfig
from mrl.diagnosis.mismatch import effective_size
from mrl.errors import RunFailed
from mrl.learn.guards import (
    QUANTILE,
    check_first_update,
    drift,
    importance_weights,
    not_finite,
    sequence_clip,
)
from mrl.system.histogram import quantile
from mrl.types import Max, Mean, MicroBatch, Quantiles
from parallel.reduce import merge

NAN = float("nan")


def make_batch(**changes: Any) -> MicroBatch:
    """Three sequences of 4 tokens; the first token of each is a prompt."""
    batch = MicroBatch(
        input_ids=torch.zeros(12, dtype=torch.int64),
        position_ids=torch.arange(4).repeat(3),
        cu_seqlens=torch.tensor([0, 4, 8, 12], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True, True] * 3),
        rollout_logprobs=torch.full((12,), -1.0),
        rewards=torch.ones(3),
        seq_weight=torch.ones(3),
        sample_ids=torch.tensor([5, 9, 2]),
        old_logprobs=torch.full((12,), -1.0),
    )
    return dataclasses.replace(batch, **changes)


def test_sequences_with_a_value_that_is_not_finite_are_found() -> None:
    values = torch.zeros(12)
    values[4] = NAN  # masked: nobody reads it
    values[9] = torch.inf
    assert not_finite(values, make_batch()).tolist() == [False, False, True]


def test_the_effective_size_is_that_of_the_weights_of_the_loss_tokens() -> None:
    apart = torch.zeros(12)
    apart[[1, 2]] = torch.tensor([2.0, 3.0]).log()
    apart[0] = NAN  # masked
    stats: dict[str, Any] = importance_weights(torch.full((12,), -1.0) + apart, make_batch())
    mean, square = (float(stats[key].total / stats[key].count) for key in ("w", "w2"))
    assert (mean, square) == (pytest.approx(12 / 9), pytest.approx(20 / 9))
    assert effective_size(mean, square) == pytest.approx(144 / 180)
    assert effective_size(0.0, 0.0) == 0.0


def test_drift_is_of_two_passes_and_of_the_engine() -> None:
    now = torch.full((12,), -1.0)
    now[1:4] += torch.tensor([0.3, -0.3, 0.006])  # mean 0.002
    now[0] = NAN  # masked
    rollout = torch.full((12,), -1.0)
    rollout[5:8] -= 0.04
    stats = drift(now, make_batch(rollout_logprobs=rollout), clip=0.01)
    value: dict[str, Any] = {
        k: v.total / v.count if isinstance(v, Mean) else v for k, v in stats.items()
    }
    assert float(value["guard/ratio_error"].value) == pytest.approx(0.3, rel=1e-5)
    counts = value[QUANTILE].counts.tolist()
    assert sum(counts) == 9  # the loss tokens
    for q, error in ((0.6, 0.0), (7 / 9, 0.006), (1, 0.3)):
        assert quantile(counts, q) == pytest.approx(error, rel=0.03)
    assert float(value["guard/clip_budget"]) == pytest.approx(0.2 / 3, rel=1e-3)
    assert float(value["guard/clip_budget_rollout"]) == pytest.approx(4 / 3, rel=1e-4)
    assert drift(now, make_batch(), clip=None).keys() == {"guard/ratio_error", QUANTILE}
    # Without a pass before the update there is nothing to compare, except the engine's log-probs.
    alone = drift(now, make_batch(rollout_logprobs=rollout, old_logprobs=None), clip=0.01)
    assert alone.keys() == {"guard/clip_budget_rollout"}
    assert drift(now, make_batch(old_logprobs=None), clip=None) == {}


def test_a_ratio_that_is_not_one_stops_the_run_and_a_used_up_clip_range_warns() -> None:
    said: list[str] = []
    fine = {"guard/ratio_error": 5e-5, "guard/clip_budget": 0.09}
    check_first_update(fine, GuardConfig(), torch.float32, said.append)
    assert said == []
    check_first_update(
        {**fine, "guard/clip_budget": 0.4}, GuardConfig(), torch.float32, said.append
    )
    assert "40% of the clip range" in said[0]
    for bad in ({QUANTILE: 2e-4}, {QUANTILE: NAN}, {"guard/ratio_error": NAN}):
        with pytest.raises(RunFailed, match=r"guards.ratio_tolerance=0.0001"):
            check_first_update({**fine, **bad}, GuardConfig(), torch.float32, said.append)
    check_first_update({QUANTILE: 0.05}, GuardConfig(), torch.bfloat16, said.append)


def judged(errors: Tensor, **guards: float) -> None:
    """`check_first_update` of a rank whose micro-batches' loss tokens are off by `errors`, in bf16."""
    parts = []
    for error in errors.split(len(errors) // 4):
        now = torch.full((len(error),), -1.0) + error
        batch = make_batch(
            loss_mask=torch.ones(len(error), dtype=torch.bool),
            old_logprobs=torch.full((len(error),), -1.0),
        )
        parts.append(drift(now, batch, clip=None, quantile=guards.get("ratio_quantile", 0.999)))
    stats = merge(parts)
    worst, spread = stats["guard/ratio_error"], stats[QUANTILE]
    assert isinstance(worst, Max)
    assert isinstance(spread, Quantiles)
    found = {key: quantile(spread.counts.tolist(), q) for key, q in spread.reported}
    check_first_update(
        {"guard/ratio_error": float(worst.value), **found},
        GuardConfig(**guards),  # pyright: ignore[reportArgumentType]
        torch.bfloat16,
        lambda text: None,
    )


def test_one_token_of_thousands_may_be_off_and_a_shift_of_many_may_not() -> None:
    errors = 0.01 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
    judged(errors)
    outlier = errors.clone()
    outlier[1234] = 3.0  # a router's choice that was a tie
    judged(outlier)
    with pytest.raises(RunFailed, match=r"at most by 3, and guards.ratio_tolerance=0.1"):
        judged(outlier, ratio_quantile=1.0)
    for bad in (errors + 0.2, torch.where(torch.arange(4000) % 200 == 0, 0.5, errors)):
        with pytest.raises(RunFailed, match=r"guards.ratio_quantile=0.999"):
            judged(bad)
    infinite = errors.clone()
    infinite[7] = -torch.inf
    with pytest.raises(RunFailed, match="at most by inf"):
        judged(infinite)
    with pytest.raises(RunFailed):  # of 40 tokens one is many
        judged(outlier[1220:1260])


def test_the_clip_range_is_the_narrower_side_of_a_sequence_ratio() -> None:
    assert sequence_clip(gspo, AlgorithmConfig()) == 3e-4
    assert sequence_clip(gspo, AlgorithmConfig(clip_low=1e-2)) == 4e-4
    from mrl.algorithms import grpo

    assert sequence_clip(grpo, AlgorithmConfig()) is None
