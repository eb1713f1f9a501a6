"""This module chooses the prompts that a step starts, and keeps those that the step did not finish.

A prompt is in one place at any time: not drawn yet, in the backlog, trained on, or dropped and counted.
All ranks know the same backlog and draw the same prompts, so they choose alike without communication;
the tokens and routes of a prompt that waits are on the rank that rolled it out.

`drop` (over-sampling alone): prompts with long answers lose, so the samples trained on are too short.
`resume` (APRIL, arXiv 2509.18521): nothing is lost; tokens of older weights need importance weights.
`defer` (RollPacker, arXiv 2509.21009): nothing is lost; slow prompts are collected in one long round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mrl.collect.single_turn import start_groups
from mrl.config import RolloutConfig
from mrl.run.pending_prompts import PendingPrompt, renumbered
from mrl.types import Prompt, SampleGroup

SEED_SHIFT = 48
"""A shift that keeps these seeds above all seeds of steps."""


@dataclass(frozen=True)
class Started:
    """Is a prompt that a step works on, or that waits for a later step."""

    group: SampleGroup
    seed: int
    """The seed of its samples, given by the step that started it first. A deferred prompt keeps it:
    other random numbers, drawn until the prompt is fast, would favour short answers."""


@dataclass(frozen=True)
class StepPrompts:
    """Holds the prompts that a step starts. Group i has the id i."""

    started: list[Started]
    num_wanted: int
    """The step is over when so many groups are whole."""
    is_long_round: bool
    """Whether the step has deferred prompts only, and waits for all of them."""
    remaining: list[Started]
    """What stays in the backlog."""
    num_resumed: int = 0
    """So many of `started`, the first ones, have samples to continue; only the rank that rolled one
    out last has its tokens and routes."""

    def share(self, number: int, num_engines: int) -> tuple[list[Started], int]:
        """Return engine `number`'s part: every num_engines-th, so that each engine resumes some;
        and how many of its groups are wanted."""
        wanted = len(range(number, self.num_wanted, num_engines))
        return self.started[number::num_engines], wanted


def choose_prompts(
    backlog: Sequence[Started],
    draw: Callable[[int], list[Prompt]],
    config: RolloutConfig,
    seed: int,
) -> StepPrompts:
    """Return what the step after `backlog` starts; `draw(n)` gives the next n prompts, with `seed`."""
    wanted = config.prompts_per_step
    old: Sequence[Started] = ()
    is_long_round = False
    if config.partial_rollouts == "resume":
        old = backlog[: config.num_started]
    elif config.partial_rollouts == "defer" and len(backlog) >= wanted:
        old, is_long_round = backlog[:wanted], True
    num_new = 0 if is_long_round else config.num_started - len(old)
    started = [*old, *_fresh(draw(num_new), config.samples_per_prompt, seed)]
    return StepPrompts(
        [_numbered(one, group_id) for group_id, one in enumerate(started)],
        wanted,
        is_long_round,
        list(backlog[len(old) :]),
        num_resumed=len(old) if config.partial_rollouts == "resume" else 0,
    )


def fresh_prompts(
    prompts: Sequence[Prompt], samples_per_prompt: int, seed: int, first_id: int
) -> StepPrompts:
    """Return a further round of a step: these prompts, all of them wanted; group i has id
    `first_id + i`."""
    started = _fresh(prompts, samples_per_prompt, seed)
    numbered = [_numbered(one, first_id + i) for i, one in enumerate(started)]
    return StepPrompts(numbered, len(numbered), is_long_round=False, remaining=[])


def _fresh(prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> list[Started]:
    # At the turn of an epoch a prompt may be drawn twice: its samples must differ then.
    seen: Counter[str] = Counter()
    started = []
    for group in start_groups(prompts, samples_per_prompt):
        started.append(Started(group, seed + (seen[group.prompt.prompt_id] << SEED_SHIFT)))
        seen[group.prompt.prompt_id] += 1
    return started


def left_over(
    prompts: StepPrompts,
    trained: Sequence[SampleGroup],
    partial: Sequence[SampleGroup],
    policy: str,
) -> list[Started]:
    """Return what goes into the backlog: all that `prompts` started but the groups `trained`.

    `partial` are the other groups as the engines left them; only `resume` reads them. Raises
    ValueError where a group is in both, or in neither.
    """
    done = {group.samples[0].group_id for group in trained}
    left = {group_id: one for group_id, one in enumerate(prompts.started) if group_id not in done}
    if policy == "drop":
        return []
    if policy == "defer":
        size = len(prompts.started[0].group.samples)
        return [
            Started(start_groups([one.group.prompt], size)[0], one.seed) for one in left.values()
        ]
    found = {group.samples[0].group_id: group for group in partial}
    if found.keys() != left.keys():
        raise ValueError(
            f"partial groups: got {sorted(found)}, expected {sorted(left)}, what was started and "
            "not trained on"
        )
    return [Started(found[group_id], one.seed) for group_id, one in left.items()]


class Backlog:
    """Keeps the prompts that wait, over the steps of a run."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._waiting: list[Started] = []

    @property
    def waiting(self) -> list[Started]:
        """The prompts that wait, the oldest first."""
        return list(self._waiting)

    def begin_step(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPrompts:
        """Return `choose_prompts`. A step that fails before end_step() leaves the backlog as it was."""
        return choose_prompts(self._waiting, draw, self._config, seed)

    def end_step(
        self,
        prompts: StepPrompts,
        trained: Sequence[SampleGroup],
        partial: Sequence[SampleGroup],
        version: int,
    ) -> dict[str, float]:
        """Keep what was not trained on, alike on every rank; return the step's metrics.

        `trained` and `partial` are those of all engines, `version` is that of the step's weights.
        """
        config = self._config
        if config.num_started == config.prompts_per_step:
            return {}
        left = left_over(prompts, trained, partial, config.partial_rollouts)
        self._waiting = [*prompts.remaining, *left]
        if config.partial_rollouts == "drop":
            return {"rollout/dropped_prompts": float(len(prompts.started) - len(trained))}
        metrics = {"rollout/backlog_prompts": float(len(self._waiting))}
        if config.partial_rollouts == "resume":
            return metrics | older_tokens(trained, version)
        return metrics | {
            "rollout/deferred_prompts": float(len(left)),
            "rollout/is_long_round": float(prompts.is_long_round),
        }

    def records(self, groups: Sequence[SampleGroup]) -> list[PendingPrompt]:
        """Return the pending prompts as a checkpoint holds them; `groups` are their complete groups."""
        pairs = zip(groups, self._waiting, strict=True)
        return [PendingPrompt(group, one.seed) for group, one in pairs]

    def take_up(self, waiting: Iterable[PendingPrompt]) -> list[PendingPrompt]:
        """Continue with the prompts of a checkpoint; return those that do not belong in a backlog.

        Prompts whose partial rollouts do not fit the recipe, which may have changed since, start anew.
        """
        size, policy = self._config.samples_per_prompt, self._config.partial_rollouts
        self._waiting, rest = [], []
        for one in waiting:
            if one.seed is None or policy == "drop":
                rest.append(one)
            elif policy == "resume" and one.fits(self._config):
                self._waiting.append(Started(one.group, one.seed))
            else:
                self._waiting.append(Started(start_groups([one.group.prompt], size)[0], one.seed))
        return rest


def older_tokens(groups: Sequence[SampleGroup], version: int) -> dict[str, float]:
    """Return how much of the groups was generated with weights older than `version`."""
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
    return Started(renumbered(one.group, group_id), one.seed)
