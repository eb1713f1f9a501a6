"""The run of a tenant's recipe, on a base model and engines that it shares with other tenants."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mrl.collect.collector import Collector
from mrl.config import Recipe
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.service.record import engine_name, name_of
from mrl.service.reward_user import warn_of_open_folder
from mrl.service.shared import SharedResources
from mrl.system.clock import Clock
from mrl.trainer import Trainer
from parallel.lora.shared_base import SwapReport


@dataclass
class TurnCost:
    """What a tenant's newest update cost the trainer."""

    swap: SwapReport = field(default=SwapReport(0.0, 0))
    """The cost of bringing the tenant's state to the device before the update."""
    update_s: float = 0.0
    """Seconds of the update, without the swap."""

    @property
    def trainer_s(self) -> float:
        """Seconds of the update and of the swap before it."""
        return self.swap.seconds + self.update_s

    def metrics(self, name: str, queue_age_s: float) -> dict[str, float]:
        """Return the metrics of the update of tenant `name`. `queue_age_s`: the seconds that the
        tenant waited for the update."""
        found = {
            "swap_s": self.swap.seconds,
            "swap_bytes": float(self.swap.num_bytes),
            "update_s": self.update_s,
            "queue_age_s": queue_age_s,
        }
        return {f"service/{name}/{key}": value for key, value in found.items()}


class TenantRun:
    """The run of a tenant's recipe, from when the tenant joins until it is paused, removed or done.

    Every method is a collective, which all ranks call in the same order; properties are not.
    """

    wants_turn = True
    """Whether the tenant has something to do, which is always the case with a recipe."""

    def __init__(
        self, incarnation: str, weight: float, recipe: Recipe, shared: SharedResources[Any]
    ) -> None:
        """Check the recipe and load the tenant's newest checkpoint, if there is one. `incarnation`:
        the tenant's id (`Tenant.incarnation`). `weight`: the tenant's scheduling weight
        (`Tenant.weight`).

        Raises InputError if a run cannot start with this recipe, and RunFailed if the checkpoint
        cannot be read.
        """
        self.name, self.cost = name_of(incarnation), TurnCost()
        reward_user = shared.config.tenants.reward_user
        with ExitStack() as undo:
            self.folder = RunFolder(recipe.output_dir)
            undo.callback(self.folder.close)
            if shared.mesh.rank == 0:
                self.folder.claim()  # before the check looks for a checkpoint
            # Code of rewards must not run in this process if they run as another user.
            plan = check(recipe, shared.engines.world, imports_rewards=reward_user is None)
            if shared.mesh.rank == 0:
                self.folder.open(plan.recipe, plan.update, plan.resume_step or 0)
                warn_of_open_folder(self.folder.root, reward_user)
            self.trainer = Trainer(
                plan,
                shared.mesh,
                self.folder,
                name=self.name,
                base=shared.base,
                make_collector=partial(
                    shared.engines.make_collector, name=engine_name(incarnation), weight=weight
                ),
            )
            undo.callback(self.trainer.close)
            assert isinstance(self.trainer.collector, Collector)
            self.collector = self.trainer.collector
            undo.callback(self.collector.close)
            self.trainer.begin()  # the constructor has mounted the policy
            undo.pop_all()
        self.clock = Clock()
        self._is_evaluated = not plan.recipe.eval.every
        rollout = plan.recipe.rollout
        longest = max(len(each.token_ids) for each in plan.prompts) + rollout.max_response_len
        self.tokens_of_step = rollout.prompts_per_step * rollout.samples_per_prompt * longest
        """Upper bound on the number of tokens in the samples of one step, including prompts."""

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.trainer.step

    def note_waiting(self, waiting_tokens: int) -> None:
        """Do nothing: a recipe has no queue of operations."""

    @property
    def trains(self) -> bool:
        """Whether the tenant's next samples are for an update rather than for the evaluation of the
        final weights."""
        return not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether all training steps of the recipe are done."""
        return self.trainer.step >= self.trainer.plan.recipe.train.num_steps

    @property
    def is_over(self) -> bool:
        """Whether all training steps are done and, if the recipe has evaluations, the final weights
        have been evaluated."""
        return self.is_done and self._is_evaluated

    def begin(self) -> None:
        """Choose the prompts of the next step or, after the last step, of the evaluation of the
        final weights."""
        if not self.is_done:
            self.clock = self.trainer.begin_step()
        else:
            self.clock = Clock()
            self.collector.begin_evaluation(self.trainer.step)

    def score(self) -> None:
        """Share the collected sample groups and their rewards with all ranks. Does nothing if some
        samples are still missing because an engine was lost."""
        self.collector.score(self.clock)
        self._is_evaluated |= self.is_done and self.collector.is_over

    def train(self) -> None:
        """Train on the collected sample groups, write the metrics, and save a checkpoint if one is
        due."""
        self.cost.swap = self.trainer.policy.mount()
        start = time.perf_counter()
        self.trainer.record_step(self.trainer.learn(self.clock))
        self.cost.update_s = time.perf_counter() - start

    def leave(self) -> None:
        """Save a checkpoint unless the present step has one already, and close the run."""
        try:
            self.trainer.policy.mount()
            self.trainer.leave()
        finally:
            self.close()

    def close(self) -> None:
        """Release everything without saving a checkpoint. Harmless when repeated."""
        with ExitStack() as closing:  # all are closed, even if one raises
            closing.callback(self.folder.close)
            closing.callback(self.trainer.close)
            closing.callback(self.collector.close)
            closing.callback(lambda: self.trainer.trackers.close(failed=not self.is_done))
            closing.callback(self.trainer.checkpoints.rescue)
