"""A task is one engine's share of what a step or an evaluation generates and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mrl.collect.backlog import Started
from mrl.collect.multi_turn import MultiTurnRollout
from mrl.collect.scoring import Scoring
from mrl.collect.single_turn import SingleTurnRollout
from mrl.config import Recipe, RolloutConfig
from mrl.environments.episodes import Episodes
from mrl.errors import InputError
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.preflight import Plan
from mrl.rewards.runner import check_failures, reward_names
from mrl.rewards.terms import all_terms
from mrl.rollout.base import RolloutEngine, SamplingParams
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup
from parallel.mesh import Mesh


class Rollout(Protocol):
    """Turns prompts into whole sample groups, in one turn or in several.

    It outlives the engine: after EngineLost, `finished` is called again with another engine.
    """

    @property
    def is_over(self) -> bool:
        """Whether `finished` has yielded all groups that were wanted."""
        ...

    def finished(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        """Yield groups as they become whole. Raises as `RolloutEngine.generate` does."""
        ...

    @property
    def partial(self) -> list[SampleGroup]:
        """The groups, with what they have so far, that a later step can continue."""
        ...


class Scored(Protocol):
    """Gives what was generated and scored for a step or an evaluation."""

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Return the groups that are whole, with rewards, in the order of their ids, and how many
        samples failed. Raises RunFailed where more than 5% of a step's samples failed."""
        ...

    @property
    def partial(self) -> list[SampleGroup]:
        """The groups that a later step can continue."""
        ...


@dataclass
class Task:
    """Generates groups and has them scored: a `Scored`."""

    rollout: Rollout
    scoring: Scoring
    clock_name: str
    """The part of the step in which its generation is timed."""
    keeps_routes: bool = True
    """Whether whole groups keep their routes; an evaluation needs none, and they are large."""

    needs_masks: bool = False
    """Whether every sample must have its sampling mask."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to generate."""
        return self.rollout.is_over

    def run(self, engine: RolloutEngine) -> None:
        """Generate what is left; groups are scored while others generate.

        Raises EngineLost, and InputError for an engine without the sampling masks that are asked for.
        """
        for group in self.rollout.finished(engine):
            if self.needs_masks and lacks_masks(group):
                raise InputError(
                    "rollout.sampling_mask is on, but the engine returned no sampling masks; turn it "
                    "off, or use rollout.engine=sglang"
                )
            self.scoring.begin(group if self.keeps_routes else _without_routes(group))

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Wait for the rewards. See `Scored`."""
        return self.scoring.finish()

    @property
    def partial(self) -> list[SampleGroup]:
        """The groups, with what they have so far, that a later step can continue."""
        return self.rollout.partial


def make_task(
    config: RolloutConfig,
    scoring: Scoring,
    groups: Sequence[SampleGroup],
    seeds: Sequence[int],
    num_wanted: int | None = None,
    *,
    tokenizer: Any,
    context_len: int,
    clock_name: str,
    keeps_routes: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Task:
    """Return the task that generates `groups`, as `start_groups` makes them, each with its seed.

    It is over when `num_wanted` groups are whole, by default all. Conversations, which `scoring` with
    environments asks for, end where the context of `context_len` tokens does; `template_kwargs` are
    arguments of their chat template.
    """
    scoring.begin_step()
    rollout: Rollout
    if scoring.environments is None:
        rollout = SingleTurnRollout(
            groups, _sampling(config), seeds, num_wanted, context_len=context_len
        )
    else:
        rollout = _conversations(
            config, scoring.environments, groups, seeds, tokenizer, context_len, template_kwargs
        )
    return Task(rollout, scoring, clock_name, keeps_routes, config.sampling_mask)


def _conversations(
    config: RolloutConfig,
    environments: Episodes,
    groups: Sequence[SampleGroup],
    seeds: Sequence[int],
    tokenizer: Any,
    context_len: int,
    template_kwargs: Mapping[str, Any] | None,
) -> MultiTurnRollout:
    return MultiTurnRollout(
        groups,
        environments,
        tokenizer,
        sampling=_sampling(config),
        max_turns=environments.config.max_turns,
        context_len=context_len,
        seeds=seeds,
        step_samples=config.prompts_per_step * config.samples_per_prompt,
        template_kwargs=template_kwargs,
    )


def _sampling(config: RolloutConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_response_len,
        min_new_tokens=config.min_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=config.stop_token_ids,
        stop=config.stop,
        sampling_mask=config.sampling_mask,
    )


def make_step_task(
    plan: Plan, scoring: Scoring, started: Sequence[Started], num_wanted: int
) -> Task:
    """Return the task that generates one engine's share of a step's prompts."""
    return make_task(
        plan.recipe.rollout,
        scoring,
        [one.group for one in started],
        [one.seed for one in started],
        num_wanted,
        tokenizer=plan.tokenizer,
        context_len=plan.context_len,
        clock_name="rollout",
        template_kwargs=plan.recipe.data.chat_template_kwargs,
    )


def make_rollout(
    plan: Plan,
    started: Sequence[Started],
    episodes: Episodes | None,
    on_sample: Callable[[SampleGroup, int], None],
) -> Rollout:
    """Return the rollout of prompts that belong to no step.

    `episodes` plays their conversations; it is None where a sample is one answer. `on_sample` is that
    of `SingleTurnRollout`; a conversation has none.
    """
    config = plan.recipe.rollout
    groups, seeds = [one.group for one in started], [one.seed for one in started]
    if episodes is None:
        return SingleTurnRollout(
            groups, _sampling(config), seeds, on_sample=on_sample, context_len=plan.context_len
        )
    template_kwargs = plan.recipe.data.chat_template_kwargs
    return _conversations(
        config, episodes, groups, seeds, plan.tokenizer, plan.context_len, template_kwargs
    )


def lacks_masks(group: SampleGroup) -> bool:
    """Return whether a sample that the policy generated has no sampling mask."""
    return any(s.num_generated and s.sampling_mask is None for s in group.samples)


def _without_routes(group: SampleGroup) -> SampleGroup:
    samples = [dataclasses.replace(sample, routing=None) for sample in group.samples]
    return dataclasses.replace(group, samples=samples)


def share_scored(scored: Scored | None, recipe: Recipe, mesh: Mesh) -> list[SampleGroup]:
    """Return all engines' groups of a task, with rewards: whole on the rank that has them, and outlines
    (`mrl.run.rollouts.outline`) on the others.

    A collective. Raises RunFailed where rewards failed for too large a share of a whole step, however
    few samples this round of it has.
    """
    local, num_failed = scored.finish() if scored is not None else ([], 0)
    if mesh.dims.world == 1:
        return local
    everything = _share_outlines(local, mesh)
    check_failures(
        reward_names(all_terms(recipe))
        if recipe.environment is None
        else f"environment {recipe.environment.name!r}",
        sum_over_ranks(num_failed),
        recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
    )
    return sorted(everything, key=lambda group: group.samples[0].group_id)


def share_partial(scored: Scored | None, mesh: Mesh) -> list[SampleGroup]:
    """Return the partial groups of all engines: whole on the rank that has them, and outlines on the
    others. A collective."""
    partial = [] if scored is None else scored.partial
    return partial if mesh.dims.world == 1 else _share_outlines(partial, mesh)


def _share_outlines(local: list[SampleGroup], mesh: Mesh) -> list[SampleGroup]:
    """Return all ranks' groups, by rank. Only ranks that lead an engine have groups and send them."""
    mine = encode_groups(local, with_routes=False, with_tokens=False) if local else b""
    everything: list[SampleGroup] = []
    for rank, part in enumerate(share_bytes(mine)):
        everything += local if rank == mesh.rank else decode_groups(part) if part else []
    return everything
