"""Callbacks to user code during training: `mrl.train(recipe, callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the name alone must not import torch
    from mrl.types import SampleGroup


class Callback(Protocol):
    """Methods that a run calls after each step and each evaluation.

    Subclass this class, and override the methods that you need. Every rank calls its own callbacks.
    An exception in a callback ends the run like any other exception; checkpoints that were saved
    remain.
    """

    def on_step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[SampleGroup]
    ) -> bool | None:
        """Handle the end of a step.

        The step's line is already in metrics.jsonl, but a checkpoint of the step is not saved yet.
        `metrics` holds the numbers of that line, with NaN instead of null. All numbers except the
        times are the same on every rank.

        `groups` are the step's sample groups in prompt order, with `prompt`, `texts`, `rewards`
        f32[G] and `advantages` f32[G]. If there are several ranks, only the rank whose engine
        generated a group has the complete group (`sample.is_held`). On all other ranks the group
        has rewards and lengths, but no tokens, and `texts` is None. Do not change the groups. Do
        not keep references to them, because they hold the expert ids of all tokens, which need much
        memory.

        Return True to save a checkpoint and stop the run; a later start continues the run.
        """
        return None

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of an evaluation of the weights after `step` steps.

        The keys of `metrics` are `eval/NAME/...`, where NAME is the name of an eval set.
        """
        return None
