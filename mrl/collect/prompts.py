"""Supplies the prompts of a run, from the data and from earlier steps that did not finish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.collect.backlog import Backlog, StepPrompts
from mrl.collect.base import Assignment, Pool
from mrl.data.cursor import PromptCursor
from mrl.preflight import Plan
from mrl.run.pending_prompts import PendingPrompt, pending_state
from mrl.system.clock import Clock
from mrl.types import Prompt, SampleGroup
from parallel.mesh import Mesh


class PromptSupply:
    """Holds the position in the data, the prompts that are to be drawn again, and the backlog of
    prompts that earlier steps did not finish. All ranks have the same state, so they make the same
    choices without communication."""

    def __init__(self, plan: Plan) -> None:
        recipe = plan.recipe
        self._seed = recipe.seed
        self.cursor = PromptCursor(plan.sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
        self.first: list[Prompt] = []
        """Prompts of a checkpoint whose samples are generated again. They are drawn before further
        data."""
        self.backlog = Backlog(recipe.rollout)

    def draw(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts."""
        found, self.first = self.first[:num], self.first[num:]
        return found + self.cursor.next(num - len(found))

    def step_prompts(self, step: int) -> StepPrompts:
        """Return the prompts of a step's first round, from the backlog and from `draw`."""
        return self.backlog.begin_step(self.draw, step_seed(self._seed, step))

    def take_up(self, waiting: list[PendingPrompt]) -> list[PendingPrompt]:
        """Put the pending prompts of a checkpoint into the backlog or, if their samples are
        generated again, into `first`. Return those that were put into `first`."""
        rest = self.backlog.take_up(waiting)
        self.first = [*(one.group.prompt for one in rest), *self.first]
        return rest

    def pending(
        self, ahead: Sequence[PendingPrompt], backlog: Sequence[SampleGroup]
    ) -> dict[str, Any]:
        """Return JSON-serializable state: the position in the data and all pending prompts.

        `ahead` are pending prompts that were rolled out before their step. `backlog` are the groups
        of the backlog, with the tokens and routes from all ranks.
        """
        first = [PendingPrompt(SampleGroup(prompt, [])) for prompt in self.first]
        waiting = [*ahead, *first, *self.backlog.records(backlog)]
        return {**self.cursor.state_dict(), "waiting": pending_state(waiting)}


class SynchronousSteps:
    """Draws the prompts of a step when the step begins. See `mrl.collect.base.StepSchedule`."""

    def __init__(self, supply: PromptSupply, pool: Pool[Any], mesh: Mesh) -> None:
        self._supply, self._pool, self._mesh = supply, pool, mesh

    def begin_step(self, step: int) -> tuple[StepPrompts, Assignment]:
        prompts = self._supply.step_prompts(step)
        return prompts, self._pool.assign(prompts, step)

    def assign(self, prompts: StepPrompts, step: int) -> Assignment:
        return self._pool.assign(prompts, step)

    def wait_for_room(self, step: int, clock: Clock) -> None:
        """Return at once, because the engines have no other work."""

    def state_dict(self, step: int) -> dict[str, Any]:
        groups = self._pool.gather([one.group for one in self._supply.backlog.waiting])
        return {} if self._mesh.rank else self._supply.pending([], groups)

    def take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        return self._supply.take_up(waiting)


def step_seed(seed: int, step: int) -> int:
    """Return the seed for the prompts that step `step` draws in a run with the recipe's `seed`."""
    return seed * 1_000_003 + step
