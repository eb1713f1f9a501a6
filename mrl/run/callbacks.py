"""What user code can be told while a run trains: `mrl.train(recipe, callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the name alone must not import torch
    from mrl.types import SampleGroup


class Callback(Protocol):
    """A callback is told of the steps and evaluations of a run. Subclass it and write what you need.

    Every rank calls its own callbacks. An exception in one ends the run as any other does: what was
    saved is kept.
    """

    def on_step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[SampleGroup]
    ) -> bool | None:
        """Receives a step when its line is in metrics.jsonl and before a checkpoint is saved.

        `metrics` are the numbers of that line, the same on every rank but for the times, with NaN
        where the file has null. `groups` are the step's sample groups in prompt order, with `prompt`,
        `texts`, `rewards` f32[G] and `advantages` f32[G]. On several ranks a group is whole on the
        rank that rolled it out (`sample.is_held`); the others have its rewards and lengths, and
        `texts` is None there. Do not change them, nor keep them: they hold the routes.

        Return True to stop the run here, after a checkpoint; a later start continues it.
        """
        return None

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives an evaluation: `eval/NAME/...` of the weights after `step` steps."""
        return None
