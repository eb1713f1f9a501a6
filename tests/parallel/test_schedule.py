"""The learning rate over the steps, against the schedules of transformers (TRL's) and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from mrl.config import OptimizerConfig
from parallel.optimizer.setup import build_schedule

LR, WARMUP, STEPS = 3e-4, 3, 12


def adam(config: OptimizerConfig) -> torch.optim.Adam:
    """An optimizer whose group has what Megatron writes into its own."""
    group = {"params": [torch.zeros(1, requires_grad=True)], "lr": config.lr}
    return torch.optim.Adam([{**group, "max_lr": config.lr, "min_lr": config.min_lr}])


def rates(
    config: OptimizerConfig, start: int = 0, saved: dict[str, Any] | None = None
) -> list[float]:
    """The learning rate of each step from `start` on."""
    optimizer = adam(config)
    schedule = build_schedule(config, optimizer)
    if saved is not None:
        schedule.num_steps = 0
        schedule.load_state_dict(saved)
    found = []
    for _ in range(start, STEPS + 2):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    return found


def of_style(style: Any, **more: Any) -> OptimizerConfig:
    return OptimizerConfig(
        lr=LR, lr_warmup_steps=WARMUP, lr_decay_style=style, lr_decay_steps=STEPS, **more
    )


@pytest.mark.parametrize(
    ("style", "theirs"),
    [
        ("linear", transformers.get_linear_schedule_with_warmup),
        ("cosine", transformers.get_cosine_schedule_with_warmup),
    ],
)
def test_the_schedules_of_trl(style: str, theirs: Callable[..., Any]) -> None:
    optimizer = adam(OptimizerConfig(lr=LR))
    other = theirs(optimizer, WARMUP, STEPS)
    expected = []
    for _ in range(STEPS + 1):
        expected.append(other.get_last_lr()[0])
        optimizer.step()
        other.step()
    assert rates(of_style(style))[: STEPS + 1] == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_to_the_lowest_rate_and_no_further() -> None:
    low = 1e-5
    found = rates(of_style("cosine", min_lr=low))
    middle = (STEPS - WARMUP) / 3 + WARMUP
    assert found[int(middle)] == pytest.approx(
        low + (LR - low) * (1 + math.cos(math.pi / 3)) / 2, rel=1e-12
    )
    assert found[STEPS:] == [low, low]


def test_wsd_is_constant_and_then_falls() -> None:
    found = rates(of_style("WSD", wsd_decay_steps=4, lr_wsd_decay_style="minus_sqrt"))
    assert found[WARMUP : STEPS - 3] == [LR] * (STEPS - 3 - WARMUP)
    late = [LR * (1 - math.sqrt(k / 4)) for k in range(1, 5)]
    assert found[STEPS - 3 : STEPS + 1] == pytest.approx(late, rel=1e-12, abs=1e-18)


def test_inverse_square_root() -> None:
    found = rates(of_style("inverse-square-root"))
    expected = [LR * math.sqrt(WARMUP / k) for k in range(WARMUP, STEPS + 1)]
    assert found[WARMUP : STEPS + 1] == pytest.approx(expected, rel=1e-12)


def test_without_a_style_the_rate_is_constant_after_the_warm_up() -> None:
    found = rates(OptimizerConfig(lr=LR, lr_warmup_steps=WARMUP))
    assert found == [LR * k / WARMUP for k in range(WARMUP)] + [LR] * (STEPS + 2 - WARMUP)


def test_a_checkpoint_brings_the_step_and_the_recipe_the_rest() -> None:
    config = of_style("cosine")
    schedule = build_schedule(config, adam(config))
    schedule.step(5)
    saved = schedule.state_dict()
    assert rates(config, 5, saved) == rates(config)[5:]
    lower = config.model_copy(update={"lr": LR / 2})
    assert rates(lower, 5, saved) == rates(lower)[5:]
