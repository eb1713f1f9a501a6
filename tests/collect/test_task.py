"""What a task refuses to hand on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.collect.saved import SavedCollector
from mrl.collect.task import Task
from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.folder import saved_step
from mrl.run.rollouts import save_groups
from mrl.sampling_mask import SamplingMask
from mrl.system.clock import Clock
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


def test_saved_rollouts_without_sampling_masks_are_refused_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    save_groups(saved_step(tmp_path, 0), [group([1.0], 0, sample(3))])
    mesh: Any = SimpleNamespace(rank=0, dims=SimpleNamespace(world=1))

    def begin(*, masks: bool) -> int:
        recipe = Recipe.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "output_dir": "o",
                "rollout": {"sampling_mask": masks, "max_response_len": 4},
                "train": {"num_steps": 1},
                "debug": {"load_rollouts": str(tmp_path)},
            }
        )
        collector = SavedCollector(recipe, mesh)
        collector.begin(0, Clock())
        return len(collector.groups)

    assert begin(masks=False) == 1
    with pytest.raises(
        InputError, match=r"step_000000\.safetensors has samples without sampling masks"
    ):
        begin(masks=True)
