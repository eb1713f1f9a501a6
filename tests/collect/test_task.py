"""What a task refuses to hand on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mrl.collect.task import Task
from mrl.errors import InputError
from mrl.sampling_mask import SamplingMask
from mrl.types import SampleGroup
from tests.sample_groups import PROMPT_LEN, group, sample


class Finished:
    """A rollout of one group that is whole, which stands for its scoring, too."""

    is_over = True

    def __init__(self, one: SampleGroup) -> None:
        self.partial: list[SampleGroup] = []
        self.begun: list[SampleGroup] = []
        self._one = one

    def finished(self, engine: Any) -> Any:
        yield self._one

    def begin(self, one: SampleGroup) -> None:
        self.begun.append(one)


def run(one: SampleGroup, *, needs_masks: bool) -> int:
    rollout: Any = Finished(one)
    Task(rollout, rollout, "rollout", needs_masks=needs_masks).run(rollout)
    return len(rollout.begun)


def test_an_engine_that_returns_no_sampling_masks_is_refused_where_they_are_asked_for() -> None:
    bare = group([1.0], 0, sample(3))
    mask = SamplingMask.of([[]] * PROMPT_LEN + [[1, 2, 3, 4]] * 3)
    masked = group([1.0], 0, dataclasses.replace(sample(3), sampling_mask=mask))
    assert run(bare, needs_masks=False) == 1
    assert run(masked, needs_masks=True) == 1
    with pytest.raises(InputError, match="the engine returned no sampling masks"):
        run(bare, needs_masks=True)
