"""A tenant's run is its recipe's run, on a base model and an engine that it shares with others."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mrl.collect.base import Collector
from mrl.config import Recipe
from mrl.config.service import TenantLimits
from mrl.errors import DiskFailed, InputError
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.disk import bytes_below
from mrl.tenants.house import House
from mrl.tenants.record import engine_name
from mrl.tenants.reward_user import warn_of_open_folder
from mrl.trainer import Trainer
from parallel.lora.shared_base import SwapReport
from parallel.policy import Policy


@dataclasses.dataclass
class TenantTrainer(Trainer):
    """Trains one tenant: the service calls the parts of its steps."""

    house: House = dataclasses.field(kw_only=True)
    weight: float = dataclasses.field(kw_only=True)
    engine_name: str = dataclasses.field(kw_only=True)
    """Its name in the engines."""

    def _make_policy(self, **shared: Any) -> Policy:
        return super()._make_policy(base=self.house.base, name=self.name, **shared)

    def _make_collector(self) -> Collector:
        return self.house.make_collector(self.plan, self.folder, self.engine_name, self.weight)


class Trained:
    """Keeps what the newest turn at the trainer took of a tenant, and looks after its disk."""

    name: str
    folder: RunFolder
    _house: House

    def __init__(self) -> None:
        self.swap = SwapReport(0.0, 0)
        """What it took to bring the tenant to the device for its newest turn."""
        self.update_s = 0.0
        """Seconds of that turn, without the swap."""

    @property
    def trainer_s(self) -> float:
        """Seconds that its newest turn took of the trainer, with the swap before it."""
        return self.swap.seconds + self.update_s

    def metrics(self, queue_age_s: float) -> dict[str, float]:
        """Return what the service notes of its newest turn, which waited for `queue_age_s`."""
        found = {
            "swap_s": self.swap.seconds,
            "swap_bytes": float(self.swap.num_bytes),
            "update_s": self.update_s,
            "queue_age_s": queue_age_s,
        }
        return {f"service/{self.name}/{key}": value for key, value in found.items()}

    def check_disk(self) -> None:
        """Raise DiskFailed where the run folder has grown beyond its limit; rank 0 looks."""
        if self._house.mesh.rank == 0:
            check_disk(self.folder.root, self._house.limits)


class TenantRun(Trained):
    """A `TenantRun` lives from the moment a tenant joins until it is paused, removed or done.

    Every method but the properties is a collective: all ranks call them in the same order.
    """

    def __init__(
        self, name: str, weight: float, recipe: Recipe, world: int, house: House, incarnation: str
    ) -> None:
        """Check the recipe and bring the tenant to its newest checkpoint. `incarnation`: see `Tenant`.

        Raises InputError for a recipe that cannot start, RunFailed where its checkpoint cannot be read.
        """
        self.name, self._house = name, house
        with ExitStack() as undo:
            self.folder = RunFolder(recipe.output_dir)
            undo.callback(self.folder.close)
            if house.mesh.rank == 0:
                self.folder.claim()  # before the check looks for a checkpoint
            # If workers run as another user, none of their code may run here.
            plan = check(recipe, world, imports_rewards=house.limits.reward_user is None)
            if plan.adapter is None:
                raise InputError(
                    "lora: got none, but a tenant trains an adapter; add a lora section"
                )
            if house.mesh.rank == 0:
                self.folder.open(plan.recipe, plan.update, plan.resume_step or 0)
                warn_of_open_folder(self.folder.root, house.limits.reward_user)
            self.trainer = TenantTrainer(
                plan,
                house.mesh,
                self.folder,
                name=name,
                house=house,
                weight=weight,
                engine_name=engine_name(incarnation),
            )
            undo.callback(self.trainer.close)
            self.collector = self.trainer.collector
            undo.callback(self.collector.close)
            self.trainer.begin()  # the policy is mounted since it was made
            undo.pop_all()
        self.plan = plan
        self.clock = Clock()
        super().__init__()
        self._is_evaluated = not plan.recipe.eval.every

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.trainer.step

    def heed(self, waiting_tokens: int) -> None:
        """Be told what waits in a queue of operations, which a recipe has none of."""

    @property
    def wants_turn(self) -> bool:
        """Whether it has something to do: always."""
        return True

    @property
    def trains(self) -> bool:
        """Whether a step of it is to be trained, once it has its samples."""
        return not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether all of its steps are trained."""
        return self.trainer.step >= self.trainer.plan.recipe.train.num_steps

    @property
    def is_over(self) -> bool:
        """Whether its final weights are evaluated too, where the recipe evaluates."""
        return self.is_done and self._is_evaluated

    def begin(self) -> None:
        """Choose the prompts of the next step, or those that evaluate the final weights."""
        if not self.is_done:
            self.clock = self.trainer.begin_step()
        else:
            self.clock = Clock()
            self.collector.begin_evaluation(self.trainer.step)

    def score(self) -> None:
        """Give all ranks the groups of a round that is whole, with their rewards."""
        self.collector.score(self.clock)
        self._is_evaluated |= self.is_done and self.collector.is_over

    def train(self) -> dict[str, float]:
        """Train on the groups that were collected, write the metrics, and save where it is due."""
        self.swap = self.trainer.policy.mount()
        start = time.perf_counter()
        metrics = self.trainer.learn(self.clock)
        self.trainer.record_step(metrics)
        self.update_s = time.perf_counter() - start
        return metrics

    def leave(self) -> None:
        """Save the steps that are done, where no checkpoint has them yet, and end the run."""
        try:
            self.trainer.policy.mount()
            self.trainer.leave()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of everything, without a save. Harmless when repeated."""
        failed = not self.is_done
        with ExitStack() as closing:  # whatever one of them raises, the others are closed
            closing.callback(self.folder.close)
            closing.callback(self.trainer.close)
            closing.callback(self.collector.close)
            closing.callback(lambda: self.trainer.trackers.close(failed=failed))
            closing.callback(self.trainer.checkpoints.rescue)


def check_disk(root: Path, limits: TenantLimits) -> None:
    """Raise DiskFailed where a tenant's run folder has grown beyond its limit."""
    limit = limits.max_disk_bytes
    if limit is None:
        return
    used = bytes_below(root)  # while checkpoints are written and removed in the background
    if used > limit:
        raise DiskFailed(
            f"output_dir {root} holds {used} bytes, and the service allows "
            f"tenants.max_disk_bytes={limit}; remove old checkpoints, then resume the tenant"
        )
