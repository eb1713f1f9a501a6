"""A task generates and scores one engine's part of a step or of an evaluation set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mrl.collect.backlog import Started
from mrl.collect.endpoint.rollout import AgentRollout, GroupAgents
from mrl.collect.multi_turn import GroupEnvironments, MultiTurnRollout
from mrl.collect.scoring import Scoring
from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.config import Recipe
from mrl.data.eval_sets import EvalSet
from mrl.engines.base import PolicyEndpoint
from mrl.engines.sampling import sampling_of
from mrl.errors import InputError
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.rewards.runner import check_failures, reward_names
from mrl.rewards.terms import all_terms
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.system.worker_user import WorkerUser
from mrl.types import SampleGroup
from parallel.mesh import Mesh

Rollout = SingleTurnRollout | MultiTurnRollout | AgentRollout
"""Turns prompts into complete sample groups. If the engine is lost, the rollout continues:
`finished` is called again with the endpoint of another engine."""


class Scored(Protocol):
    """The results of generating and scoring the groups of a step or of an evaluation set."""

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Return the complete groups with their rewards, in the order of their ids, and the number
        of samples that could not be scored. Raises RunFailed if these are more than 5% of a step's
        samples."""
        ...

    @property
    def partial(self) -> list[SampleGroup]:
        """The incomplete groups, which a later step can continue."""
        ...


@dataclass
class Task:
    """Generates groups and scores them while further groups are generated. Implements `Scored`."""

    rollout: Rollout
    scoring: Scoring
    clock_name: str
    """The name under which the step's clock records the time of the generation: `rollout` or `eval`."""
    keeps_routes: bool = True
    """Whether complete groups keep their routes. Routes are large, and evaluations do not need
    them."""

    needs_masks: bool = False
    """Whether every sample must have a sampling mask (the tokens that `top_p` and `top_k` kept)."""

    @property
    def is_over(self) -> bool:
        """Whether the task has nothing left to generate."""
        return self.rollout.is_over

    def run(self, endpoint: PolicyEndpoint) -> None:
        """Generate the remaining groups. A complete group is scored while others are generated.

        Raises EngineLost if the engine is lost, and InputError if the engine returns no sampling masks
        although the task needs them.
        """
        for group in self.rollout.finished(endpoint):
            if self.needs_masks and lacks_masks(group):
                raise InputError(
                    "rollout.sampling_mask is on, but the engine returned no sampling masks; turn it "
                    "off, or use rollout.engine=sglang"
                )
            self.scoring.begin(group if self.keeps_routes else _without_routes(group))

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Wait for the rewards of the complete groups. See `Scored`."""
        return self.scoring.finish()

    @property
    def partial(self) -> list[SampleGroup]:
        """The incomplete groups, with the tokens that they have so far."""
        return self.rollout.partial


class EngineTasks:
    """Makes the tasks of one engine, for steps and for evaluation sets. It owns the processes that
    score their groups."""

    def __init__(
        self, plan: Plan, budget: Budget | None = None, user: WorkerUser | None = None
    ) -> None:
        """`budget` and `user`: see `Scoring`."""
        self._plan, self._budget, self._user = plan, budget, user
        self._of_sets: dict[str, Scoring] = {}
        self.scoring = self._scoring(plan.recipe)
        """Scores the groups of steps."""

    def of_step(self, started: Sequence[Started], num_wanted: int) -> Task:
        """Return a task for this engine's prompts of a step."""
        return self._task(self._plan.recipe, self.scoring, started, "rollout", num_wanted)

    def of_evaluation(self, part: int, num_parts: int) -> list[Task]:
        """Return a new task for each evaluation set, in the order of the sets. It has every
        `num_parts`-th prompt of the set, from prompt `part` on."""
        return [self._of_set(each, part, num_parts) for each in self._plan.eval_sets]

    def _of_set(self, eval_set: EvalSet, part: int, num_parts: int) -> Task:
        name, recipe = eval_set.config.name, eval_set.recipe
        if name not in self._of_sets:
            self._of_sets[name] = self._scoring(recipe)
        groups = start_groups(eval_set.prompts, recipe.rollout.samples_per_prompt)
        local = groups[part::num_parts]
        started = [Started(group, recipe.seed) for group in local]
        return self._task(recipe, self._of_sets[name], started, "eval")

    def _scoring(self, recipe: Recipe) -> Scoring:
        return Scoring(recipe, self._plan.tokenizer, self._budget, self._user)

    def _task(
        self,
        recipe: Recipe,
        scoring: Scoring,
        started: Sequence[Started],
        clock_name: str,
        num_wanted: int | None = None,
    ) -> Task:
        scoring.begin_step()
        return Task(
            make_rollout(
                recipe,
                self._plan,
                started,
                scoring.episodes(),
                num_wanted,
            ),
            scoring,
            clock_name,
            keeps_routes=clock_name != "eval",
            needs_masks=recipe.rollout.sampling_mask,
        )

    def close(self) -> None:
        """End the processes of the rewards and environments. May be called more than once."""
        for scoring in (self.scoring, *self._of_sets.values()):
            scoring.close()


def make_rollout(
    recipe: Recipe,
    plan: Plan,
    started: Sequence[Started],
    episodes: GroupEnvironments | GroupAgents | None,
    num_wanted: int | None = None,
    on_sample: Callable[[SampleGroup, int], None] | None = None,
    options: Mapping[str, bool] = {},
) -> Rollout:
    """Return the rollout of some prompts. `recipe` is the plan's recipe or that of an evaluation
    set.

    `episodes` runs the environments or the agents of conversations. If it is None, a sample is a
    single completion. For `num_wanted` and `on_sample` see `SingleTurnRollout`; conversations ignore
    both. `options` are passed on to `PolicyEndpoint.generate`.
    """
    config = recipe.rollout
    groups, seeds = [one.group for one in started], [one.seed for one in started]
    if episodes is None:
        return SingleTurnRollout(
            groups, sampling_of(config), seeds, num_wanted, on_sample, plan.context_len, options
        )
    step_samples = config.prompts_per_step * config.samples_per_prompt
    if isinstance(episodes, GroupAgents):
        return AgentRollout(
            groups,
            episodes,
            sampling=sampling_of(config),
            context_len=plan.context_len,
            seeds=seeds,
            step_samples=step_samples,
            is_tree=config.endpoint_branches == "tree",
            options=options,
        )
    return MultiTurnRollout(
        groups,
        episodes,
        plan.tokenizer,
        sampling=sampling_of(config),
        max_turns=episodes.runner.config.max_turns,
        context_len=plan.context_len,
        seeds=seeds,
        step_samples=step_samples,
        template_kwargs=recipe.data.chat_template_kwargs,
        options=options,
    )


def lacks_masks(group: SampleGroup) -> bool:
    """Return whether any sample with generated tokens lacks a sampling mask (the tokens that `top_p`
    and `top_k` kept)."""
    return any(s.num_generated and s.sampling_mask is None for s in group.samples)


def _without_routes(group: SampleGroup) -> SampleGroup:
    samples = [dataclasses.replace(sample, routing=None) for sample in group.samples]
    return dataclasses.replace(group, samples=samples)


def share_scored(scored: Scored | None, recipe: Recipe, mesh: Mesh) -> list[SampleGroup]:
    """Return the scored groups of all ranks. A rank has the tokens of its own groups. The groups of
    other ranks are outlines, whose tensors have a shape but no content (`mrl.run.rollouts.outline`).

    A collective. Raises RunFailed if too many samples could not be scored. The limit is a share of
    the samples of a whole step, even if this round has fewer samples.
    """
    local, num_failed = scored.finish() if scored is not None else ([], 0)
    if mesh.dims.world == 1:
        return local
    everything = _share_outlines(local, mesh)
    check_failures(
        reward_names(all_terms(recipe))
        if recipe.environment is None
        else f"environment {recipe.environment.label}",
        sum_over_ranks(num_failed),
        recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
    )
    return sorted(everything, key=lambda group: group.samples[0].group_id)


def share_partial(scored: Scored | None, mesh: Mesh) -> list[SampleGroup]:
    """Return the partial groups of all ranks. A rank has the tokens of its own groups. The groups of
    other ranks are outlines, whose tensors have a shape but no content. A collective."""
    partial = [] if scored is None else scored.partial
    return partial if mesh.dims.world == 1 else _share_outlines(partial, mesh)


def _share_outlines(local: list[SampleGroup], mesh: Mesh) -> list[SampleGroup]:
    """Return the groups of all ranks, in the order of the ranks. Groups of other ranks are outlines
    without tokens and routes. Ranks without groups send nothing."""
    mine = encode_groups(local, with_routes=False, with_tokens=False) if local else b""
    everything: list[SampleGroup] = []
    for rank, part in enumerate(share_bytes(mine)):
        everything += local if rank == mesh.rank else decode_groups(part) if part else []
    return everything
