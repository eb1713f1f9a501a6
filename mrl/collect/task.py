"""One engine's share of something to generate and to score: of a training step, or of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.collect.multi_turn import Episodes
from mrl.collect.scoring import Scoring
from mrl.collect.single_turn import Round
from mrl.config import Recipe
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.preflight import Plan
from mrl.rewards.runner import check_failures
from mrl.rollout.base import RolloutEngine, SamplingParams
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup
from parallel.mesh import Mesh


@dataclass
class Task:
    """Goes on with another engine where one is lost: what is whole is kept."""

    recipe: Recipe
    """Of this task: its reward or environment, its sampling."""
    work: Round | Episodes
    scoring: Scoring
    clock_name: str
    """The part of the step that its generation is counted in."""
    keeps_routes: bool = True
    """Of whole groups; what is not trained on gives their memory back."""

    @property
    def is_over(self) -> bool:
        return self.work.is_over

    def run(self, engine: RolloutEngine) -> None:
        """Generate what is left; groups are scored while others generate. Raises EngineLost."""
        for group in self.work.finished(engine):
            self.scoring.begin(group if self.keeps_routes else _without_routes(group))

    @property
    def unfinished(self) -> list[SampleGroup]:
        """Groups that are not whole, with what they have so far; none of conversations."""
        return self.work.unfinished if isinstance(self.work, Round) else []


def make_task(
    plan: Plan,
    recipe: Recipe,
    scoring: Scoring,
    groups: Sequence[SampleGroup],
    seeds: Sequence[int],
    num_wanted: int | None = None,
    *,
    clock_name: str,
    keeps_routes: bool = True,
) -> Task:
    """`groups` as `start_groups` makes them, each with its seed; over when `num_wanted` are whole."""
    rollout = recipe.rollout
    sampling = SamplingParams(
        max_new_tokens=rollout.max_response_len,
        min_new_tokens=rollout.min_response_len,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
    )
    scoring.begin_step()
    environments = scoring.environments
    work: Round | Episodes
    if environments is None:
        work = Round(groups, sampling, seeds, num_wanted)
    else:
        work = Episodes(
            groups,
            environments,
            plan.tokenizer,
            sampling=sampling,
            max_turns=environments.config.max_turns,
            context_len=plan.context_len,
            seeds=seeds,
            step_samples=rollout.prompts_per_step * rollout.samples_per_prompt,
        )
    return Task(recipe, work, scoring, clock_name, keeps_routes)


def _without_routes(group: SampleGroup) -> SampleGroup:
    samples = [dataclasses.replace(sample, routing=None) for sample in group.samples]
    return dataclasses.replace(group, samples=samples)


def share_scored(task: Task | None, recipe: Recipe, mesh: Mesh) -> list[SampleGroup]:
    """Everybody's groups of a task on every rank, whole where they were rolled out and outlines
    (`mrl.run.rollouts.outline`) elsewhere. A collective; raises RunFailed where rewards failed for too
    large a share of a whole step, however few samples this round of it has."""
    own, num_failed = task.scoring.finish() if task is not None else ([], 0)
    if mesh.dims.world == 1:
        return own
    everything = _share_outlines(own, mesh)
    check_failures(
        f"reward {recipe.reward!r}"
        if recipe.environment is None
        else f"environment {recipe.environment.name!r}",
        sum_over_ranks(num_failed),
        recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
    )
    return sorted(everything, key=lambda group: group.samples[0].group_id)


def share_unfinished(task: Task | None, mesh: Mesh) -> list[SampleGroup]:
    """What all engines left of a task, whole where it was rolled out and outlines elsewhere. A
    collective."""
    left = [] if task is None else task.unfinished
    return left if mesh.dims.world == 1 else _share_outlines(left, mesh)


def _share_outlines(own: list[SampleGroup], mesh: Mesh) -> list[SampleGroup]:
    """Everybody's groups, by rank. Only ranks that lead an engine have any, and only these send."""
    mine = encode_groups(own, with_routes=False, with_tokens=False) if own else b""
    everything: list[SampleGroup] = []
    for rank, part in enumerate(share_bytes(mine)):
        everything += own if rank == mesh.rank else decode_groups(part) if part else []
    return everything
