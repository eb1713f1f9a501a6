"""Chooses the prompts that a step starts, and keeps unfinished prompts for later steps.

A prompt has one state at any time: not drawn yet, in the backlog, trained on, or dropped and
counted. All ranks have the same backlog and draw the same prompts, so they make the same choice
without communication. The tokens and routes of a prompt in the backlog are on the rank that
generated them.

`rollout.partial_rollouts` says what happens to prompts that over-sampling started but did not
finish:

- `drop` drops them. Long answers are dropped more often, so the training samples are too short.
- `resume` (APRIL, arXiv 2509.18521) lets a later step continue them. Tokens that older weights
  sampled need importance weights.
- `defer` (RollPacker, arXiv 2509.21009) lets a later step generate them again, in a round that has
  only deferred prompts and waits for all of them.
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
"""Makes the seeds differ if a step draws the same prompt more than once. The seed of the n-th
repetition is the step's seed plus `n << SEED_SHIFT`. This sum differs from the seeds of all
steps."""


@dataclass(frozen=True)
class Started:
    """A prompt for which a step generates samples, or that waits in the backlog for a later step."""

    group: SampleGroup
    seed: int
    """The seed of the group's samples, from the first step that started the prompt. A deferred
    prompt keeps its seed. With a new seed each time, it would be retried until its answers are short
    enough, which would favour short answers."""


@dataclass(frozen=True)
class StepPrompts:
    """The prompts that a round of a step starts. In the first round, the sample group of prompt i has
    the id i; later rounds continue the numbering (`fresh_prompts`)."""

    started: list[Started]
    num_wanted: int
    """Number of groups that must be complete before the round ends."""
    is_long_round: bool
    """Whether the step has only deferred prompts, and waits for all of them."""
    remaining: list[Started]
    """The prompts that stay in the backlog."""
    num_resumed: int = 0
    """The first `num_resumed` prompts in `started` continue the samples of an earlier step. The
    tokens and routes of these samples are only on the rank that generated them."""

    def share(self, number: int, num_engines: int) -> tuple[list[Started], int]:
        """Return the prompts for the engine with index `number`, and how many of their groups must
        be complete before the round ends.

        An engine gets every `num_engines`-th prompt, so that resumed prompts are spread over
        engines.
        """
        wanted = len(range(number, self.num_wanted, num_engines))
        return self.started[number::num_engines], wanted


def fresh_prompts(
    prompts: Sequence[Prompt], samples_per_prompt: int, seed: int, first_id: int
) -> StepPrompts:
    """Return the prompts of another round of a step. The round ends when the groups of all
    `prompts` are complete. The group of prompt i has the id `first_id + i`."""
    started = _fresh(prompts, samples_per_prompt, seed)
    numbered = [_numbered(one, first_id + i) for i, one in enumerate(started)]
    return StepPrompts(numbered, len(numbered), is_long_round=False, remaining=[])


def _fresh(prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> list[Started]:
    # At the end of an epoch a prompt may be drawn twice; its two groups must differ.
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
    """Return the prompts that go into the backlog: those in `prompts.started` without a group in
    `trained`.

    `policy` is `rollout.partial_rollouts`. With `defer`, the prompts start again without tokens.
    Otherwise they keep the tokens of their unfinished groups, which are in `partial`; raises
    ValueError unless `partial` has exactly the groups that are missing in `trained`.
    """
    done = {group.samples[0].group_id for group in trained}
    left = {group_id: one for group_id, one in enumerate(prompts.started) if group_id not in done}
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
    """Keeps the prompts that a step started but did not finish, so that later steps can continue
    or repeat them."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.waiting: list[Started] = []
        """The prompts in the backlog, the oldest first."""

    def begin_step(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPrompts:
        """Return the prompts that the next step starts. `draw(n)` returns the next n prompts of the
        data, which get the seed `seed`.

        The backlog is not changed until end_step().
        """
        config, wanted = self._config, self._config.prompts_per_step
        old: list[Started] = []
        is_long_round = False
        if config.partial_rollouts == "resume":
            old = self.waiting[: config.num_started]
        elif config.partial_rollouts == "defer" and len(self.waiting) >= wanted:
            old, is_long_round = self.waiting[:wanted], True
        num_new = 0 if is_long_round else config.num_started - len(old)
        started = [*old, *_fresh(draw(num_new), config.samples_per_prompt, seed)]
        return StepPrompts(
            [_numbered(one, group_id) for group_id, one in enumerate(started)],
            wanted,
            is_long_round,
            self.waiting[len(old) :],
            num_resumed=len(old) if config.partial_rollouts == "resume" else 0,
        )

    def end_step(
        self,
        prompts: StepPrompts,
        trained: Sequence[SampleGroup],
        partial: Sequence[SampleGroup],
        version: int,
    ) -> dict[str, float]:
        """Keep the prompts that were not trained on, and return the step's metrics.

        `trained` and `partial` are the complete and the unfinished groups of all engines. `version`
        is the version of the step's weights.
        """
        config = self._config
        if config.num_started == config.prompts_per_step:
            return {}
        if config.partial_rollouts == "drop":
            return {"rollout/dropped_prompts": float(len(prompts.started) - len(trained))}
        left = left_over(prompts, trained, partial, config.partial_rollouts)
        self.waiting = [*prompts.remaining, *left]
        metrics = {"rollout/backlog_prompts": float(len(self.waiting))}
        if config.partial_rollouts == "resume":
            return metrics | older_tokens(trained, version)
        return metrics | {
            "rollout/deferred_prompts": float(len(left)),
            "rollout/is_long_round": float(prompts.is_long_round),
        }

    def records(self, groups: Sequence[SampleGroup]) -> list[PendingPrompt]:
        """Return the backlog as pending prompts for a checkpoint. `groups` are the groups of the
        backlog in order, including the tokens and routes that other ranks hold."""
        pairs = zip(groups, self.waiting, strict=True)
        return [PendingPrompt(group, one.seed) for group, one in pairs]

    def take_up(self, waiting: Iterable[PendingPrompt]) -> list[PendingPrompt]:
        """Fill the backlog with the pending prompts of a checkpoint. Return the prompts that were
        not put into the backlog: those without a seed or, if `rollout.partial_rollouts` is `drop`,
        all of them.

        The recipe may have changed. A prompt whose partial rollout does not fit the recipe starts
        again without tokens.
        """
        size, policy = self._config.samples_per_prompt, self._config.partial_rollouts
        self.waiting, rest = [], []
        for one in waiting:
            if one.seed is None or policy == "drop":
                rest.append(one)
            elif policy == "resume" and one.fits(self._config):
                self.waiting.append(Started(one.group, one.seed))
            else:
                self.waiting.append(Started(start_groups([one.group.prompt], size)[0], one.seed))
        return rest


def older_tokens(groups: Sequence[SampleGroup], version: int) -> dict[str, float]:
    """Return two metrics: the number of samples whose tokens come from more than one version of the
    weights, and the share of loss tokens that weights older than `version` sampled."""
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
