"""Which prompts a step starts, and what becomes of those that are not whole when it has enough.

A prompt is in one place at any time: not drawn yet, in the backlog, trained on, or dropped and counted.
All ranks know the same backlog and draw the same prompts, so they plan the same step without a word;
the tokens and routes of a prompt that waits are on the rank that rolled it out.

`drop` (over-sampling alone): prompts with long answers lose, so the samples trained on are too short.
`resume` (APRIL, arXiv 2509.18521): nothing is lost; tokens of older weights need importance weights.
`defer` (RollPacker, arXiv 2509.21009): nothing is lost; slow prompts meet in one long round.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.collect.single_turn import start_groups
from mrl.config import RolloutConfig
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import Prompt, SampleGroup

SEED_SHIFT = 48
"""Above all seeds of steps."""


@dataclass(frozen=True)
class Started:
    """A prompt that a step works on, or that waits for a later one."""

    group: SampleGroup
    seed: int
    """For its samples, of the step that started it first. A deferred prompt keeps it: the random
    numbers that made it slow are its own, and others, drawn until it is fast, would favour short
    answers."""


@dataclass(frozen=True)
class StepPlan:
    """What a step starts. Group i has the id i."""

    started: list[Started]
    num_wanted: int
    """The step is over when so many are whole."""
    is_long_round: bool
    """Only deferred prompts, and all of them are wanted."""
    rest: list[Started]
    """What stays in the backlog."""
    num_resumed: int = 0
    """So many, the first ones, have samples that go on; only the rank that rolled one out last has its
    tokens and routes."""

    def share(self, number: int, num_engines: int) -> tuple[list[Started], int]:
        """Engine `number`'s part: every num_engines-th, so that each gets its part of the old ones."""
        wanted = len(range(number, self.num_wanted, num_engines))
        return self.started[number::num_engines], wanted


def plan_step(
    backlog: Sequence[Started],
    draw: Callable[[int], list[Prompt]],
    config: RolloutConfig,
    seed: int,
) -> StepPlan:
    """The step after `backlog`; `draw(n)` gives the next n prompts, `seed` is for these."""
    wanted = config.prompts_per_step
    old: Sequence[Started] = ()
    is_long_round = False
    if config.partial_rollouts == "resume":
        old = backlog[: config.num_started]
    elif config.partial_rollouts == "defer" and len(backlog) >= wanted:
        old, is_long_round = backlog[:wanted], True
    num_new = 0 if is_long_round else config.num_started - len(old)
    started = [*old, *_fresh(draw(num_new), config.samples_per_prompt, seed)]
    return StepPlan(
        [_numbered(one, group_id) for group_id, one in enumerate(started)],
        wanted,
        is_long_round,
        list(backlog[len(old) :]),
        num_resumed=len(old) if config.partial_rollouts == "resume" else 0,
    )


def fresh_plan(
    prompts: Sequence[Prompt], samples_per_prompt: int, seed: int, first_id: int
) -> StepPlan:
    """A round within a step: these prompts alone, all of them wanted; group i has id first_id + i."""
    started = _fresh(prompts, samples_per_prompt, seed)
    numbered = [_numbered(one, first_id + i) for i, one in enumerate(started)]
    return StepPlan(numbered, len(numbered), is_long_round=False, rest=[])


def _fresh(prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> list[Started]:
    # At the turn of an epoch a prompt may be drawn twice: its samples must not be the same ones twice.
    seen: Counter[str] = Counter()
    started = []
    for group in start_groups(prompts, samples_per_prompt):
        started.append(Started(group, seed + (seen[group.prompt.prompt_id] << SEED_SHIFT)))
        seen[group.prompt.prompt_id] += 1
    return started


def unfinished_of(
    plan: StepPlan, trained: Sequence[SampleGroup], partial: Sequence[SampleGroup], policy: str
) -> list[Started]:
    """What goes into the backlog of what `plan` started: all but the groups `trained`.

    `partial` are the others as the engines left them; only `resume` reads them. Raises ValueError
    where a group is in both, or in neither.
    """
    done = {group.samples[0].group_id for group in trained}
    left = {group_id: one for group_id, one in enumerate(plan.started) if group_id not in done}
    if policy == "drop":
        return []
    if policy == "defer":
        size = len(plan.started[0].group.samples)
        return [
            Started(start_groups([one.group.prompt], size)[0], one.seed) for one in left.values()
        ]
    found = {group.samples[0].group_id: group for group in partial}
    if found.keys() != left.keys():
        raise ValueError(
            f"unfinished groups: got {sorted(found)}, expected {sorted(left)}, what was started and "
            "not trained on"
        )
    return [Started(found[group_id], one.seed) for group_id, one in left.items()]


class Backlog:
    """The prompts that wait, over the steps of a run."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._waiting: list[Started] = []

    @property
    def waiting(self) -> list[Started]:
        """Oldest first."""
        return list(self._waiting)

    def begin_step(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPlan:
        """See `plan_step`. A step that fails before end_step() leaves the backlog as it was."""
        return plan_step(self._waiting, draw, self._config, seed)

    def end_step(
        self,
        plan: StepPlan,
        trained: Sequence[SampleGroup],
        partial: Sequence[SampleGroup],
        version: int,
    ) -> dict[str, float]:
        """Take over what was not trained on; the same on every rank. Returns the step's metrics.

        `trained` and `partial` are over all engines, `version` is that of the step's weights.
        """
        config = self._config
        if config.num_started == config.prompts_per_step:
            return {}
        left = unfinished_of(plan, trained, partial, config.partial_rollouts)
        self._waiting = [*plan.rest, *left]
        if config.partial_rollouts == "drop":
            return {"rollout/dropped_prompts": float(len(plan.started) - len(trained))}
        metrics = {"rollout/backlog_prompts": float(len(self._waiting))}
        if config.partial_rollouts == "resume":
            return metrics | older_tokens(trained, version)
        return metrics | {
            "rollout/deferred_prompts": float(len(left)),
            "rollout/is_long_round": float(plan.is_long_round),
        }

    def state_dict(self, groups: Sequence[SampleGroup] | None = None) -> dict[str, Any]:
        """JSON-able. Grows with the tokens and routes of what waits: routes are most of it.

        `groups`: those that wait, all of them whole; by default as this rank holds them.
        """
        if groups is None:
            groups = [one.group for one in self._waiting]
        data = base64.b64encode(encode_groups(groups)).decode() if groups else ""
        return {"seeds": [one.seed for one in self._waiting], "groups": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = decode_groups(base64.b64decode(state["groups"])) if state["groups"] else []
        pairs = zip(groups, state["seeds"], strict=True)
        self._waiting = [Started(group, seed) for group, seed in pairs]


def older_tokens(groups: Sequence[SampleGroup], version: int) -> dict[str, float]:
    """How far groups that are trained on with weights `version` come from older ones."""
    samples = [sample for group in groups for sample in group.samples]
    older = sum(
        int(sample.loss_mask[span.start : span.end].sum())
        for sample in samples
        for span in sample.weight_versions
        if span.version < version
    )
    total = sum(int(sample.loss_mask.sum()) for sample in samples)
    return {
        "rollout/resumed_samples": float(sum(len(s.weight_versions) > 1 for s in samples)),
        "rollout/off_policy_tokens": older / max(total, 1),
    }


def _numbered(one: Started, group_id: int) -> Started:
    samples = [dataclasses.replace(sample, group_id=group_id) for sample in one.group.samples]
    return Started(SampleGroup(one.group.prompt, samples), one.seed)
