"""A job around a ledger, for tests: a trainer, workers that die or are slow, checkpoints.

It knows which weights really sampled every token and holds the ledger to that.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mrl.scheduling.ledger import TOO_OLD, Ledger
from mrl.scheduling.records import Finished, Lease, Partial

TOKENS = 7
"""Tokens of every group; a partial rollout has fewer."""


@dataclass
class Recipe:
    prompts_per_step: int
    max_staleness: int
    at_bound: Any = "wait"

    def ledger(self, session: str) -> Ledger:
        return Ledger(session=session, **vars(self))


@dataclass
class Work:
    """Is a group on a worker. `oldest` is None until its first token is sampled."""

    lease: Lease
    oldest: int | None


@dataclass
class SimWorker:
    version: int
    work: list[Work] = field(default_factory=list)


@dataclass
class Saved:
    counts: str
    prompts: dict[int, Any]
    finished: list[Finished]
    partials: dict[int, Partial]
    step: int
    trained: set[int]


class World:
    """Has one method for everything that can happen; each asserts what its result must be."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.num_sessions = recipe, 0
        self.ledger = recipe.ledger("0")
        self.version, self.is_training = 0, False
        self.workers: dict[int, SimWorker] = {}
        self.ended: list[Work] = []
        """Leases that were taken away or have ended: whoever has them may still send a group."""
        self.trained: set[int] = set()
        self.lease_ids: set[str] = set()
        self.discarded = 0
        self.has_new_recipe = False
        self.saved: list[Saved] = []

    # Workers

    def join(self, number: int) -> None:
        self._kill(number)
        self.ledger.join(number)
        self.workers[number] = SimWorker(self.version)

    def lose(self, number: int) -> None:
        lost = self.ledger.lose(number)
        assert lost == [work.lease for work in self._kill(number)]

    def _kill(self, number: int) -> list[Work]:
        work = self.workers.pop(number).work if number in self.workers else []
        self.ended += work
        return work

    # Prompts and leases

    def draw(self, count: int) -> None:
        before = len(self.ledger.waiting)
        ids = self.ledger.add([f"prompt {self.ledger._next_item + i}" for i in range(count)])
        assert self.ledger.waiting[before:] == ids

    def lease(self, number: int, most: int, *, starts_late: bool = False) -> list[Work]:
        worker, ledger = self.workers[number], self.ledger
        waiting, partials = list(ledger.waiting), dict(ledger.partials)
        room = ledger.capacity(worker.version)
        granted = ledger.lease(number, worker.version, most)
        ids = [lease.item_id for lease in granted]
        assert ids == waiting[: min(most, room)], (
            "the oldest that wait, as many as there is room for"
        )
        new = []
        for lease in granted:
            assert lease.lease_id not in self.lease_ids, "a lease id is used twice"
            assert lease.prompt == f"prompt {lease.item_id}"
            self.lease_ids.add(lease.lease_id)
            oldest = None if starts_late else worker.version
            if lease.partial:
                assert lease.partial == partials[lease.item_id]
                oldest = min(lease.partial.oldest, worker.version)
            elif lease.item_id in partials:
                self.discarded += partials[lease.item_id].num_tokens
            new.append(Work(lease, oldest))
        worker.work += new
        return new

    def report(self, number: int, place: int) -> None:
        worker = self.workers[number]
        work = worker.work[place]
        work.oldest = worker.version if work.oldest is None else work.oldest
        partial = Partial(f"part of {work.lease.item_id}", work.oldest, 3)
        assert self.ledger.report(work.lease.lease_id, partial)
        assert self.ledger.partials[work.lease.item_id] == partial

    def finish(self, number: int, place: int) -> None:
        worker = self.workers[number]
        work = worker.work.pop(place)
        work.oldest = worker.version if work.oldest is None else work.oldest
        self.ended.append(work)
        kept = self._send(work, worker.version)
        assert kept == (work.oldest + self.recipe.max_staleness >= self.ledger.step)
        if not kept:
            assert self.has_new_recipe or self.recipe.at_bound == "drop", "a group came too late"
            self.discarded += TOKENS

    def finish_ended(self, place: int) -> None:
        """Send a group under a lease that was taken away, has ended, or is of an earlier session."""
        before = self.ledger.tally.duplicates
        assert not self._send(self.ended[place], self.version)
        assert self.ledger.tally.duplicates == before + 1
        self.discarded += TOKENS

    def _send(self, work: Work, newest: int) -> bool:
        oldest = self.version if work.oldest is None else work.oldest
        group = (work.lease.item_id, oldest)
        return self.ledger.finish(
            work.lease.lease_id, group, oldest=oldest, newest=newest, num_tokens=TOKENS
        )

    def drop(self, number: int, place: int) -> None:
        work = self.workers[number].work.pop(place)
        self.ended.append(work)
        self.discarded += TOKENS
        before = self.ledger.tally.dropped["zero_variance"]
        assert self.ledger.drop(work.lease.lease_id, "zero_variance", TOKENS)
        assert self.ledger.tally.dropped["zero_variance"] == before + 1

    # The trainer

    def take(self) -> list[Finished] | None:
        dropped = self.ledger.tally.dropped[TOO_OLD]
        before = sorted(each.oldest for each in self.ledger.finished.values())
        batch = self.ledger.take(self.version)
        if batch is None:
            assert self._has_to_wait(before)
            return None
        self.is_training = True
        ids = [group.item_id for group in batch]
        assert len(ids) == self.recipe.prompts_per_step
        assert ids == sorted(ids)
        due_first = before[: self.recipe.prompts_per_step]
        assert sorted(group.oldest for group in batch) == due_first
        assert self.trained.isdisjoint(ids), "trained on twice"
        self.trained.update(ids)
        for group in batch:
            assert group.group == (group.item_id, group.oldest)
            assert self.version - group.oldest <= self.recipe.max_staleness, "beyond the bound"
        if self.recipe.at_bound == "drop":
            self.discarded += TOKENS * (self.ledger.tally.dropped[TOO_OLD] - dropped)
        ages = Counter(self.version - group.oldest for group in batch)
        assert ages == self.ledger.tally.staleness
        return batch

    def _has_to_wait(self, finished: list[int]) -> bool:
        """Whether too few groups are finished, or a batch would leave more than can be in time."""
        recipe, step = self.recipe, self.version
        if len(finished) < recipe.prompts_per_step:
            return True
        leases = self.ledger.leases.values()
        left = finished[recipe.prompts_per_step :] + [each.oldest for each in leases]
        return recipe.at_bound == "wait" and any(
            sum(oldest + recipe.max_staleness <= last for oldest in left)
            > (last - step) * recipe.prompts_per_step
            for last in range(step, step + recipe.max_staleness + 1)
        )

    def update(self) -> None:
        self.version, self.is_training = self.version + 1, False

    def push(self, number: int) -> None:
        self.workers[number].version = self.version

    # Checkpoints

    def save(self) -> None:
        ledger = self.ledger
        self.saved.append(
            Saved(
                json.dumps(ledger.counts()),
                dict(ledger.prompts),
                list(ledger.finished.values()),
                dict(ledger.partials),
                self.version,
                set(self.trained),
            )
        )

    def load(self, place: int, *, keep_partials: bool, recipe: Recipe | None = None) -> None:
        """Resume from a checkpoint, not always the newest one; all workers have to join again."""
        saved = self.saved[place]
        for number in list(self.workers):
            self._kill(number)
        if recipe:
            self.recipe, self.has_new_recipe = recipe, True
        self.num_sessions += 1
        self.ledger = self.recipe.ledger(str(self.num_sessions))
        self.ledger.load(
            json.loads(saved.counts),
            saved.step,
            saved.prompts,
            saved.finished,
            saved.partials if keep_partials else {},
        )
        self.version, self.is_training, self.trained = saved.step, False, set(saved.trained)
        self.discarded = self.ledger.tally.discarded_tokens

    # What holds at any time

    def check(self) -> None:
        ledger, recipe = self.ledger, self.recipe
        leased = [lease.item_id for lease in ledger.leases.values()]
        finished = list(ledger.finished)
        alive = [*ledger.waiting, *leased, *finished]
        assert len(set(alive)) == len(alive), "in two places"
        assert self.trained.isdisjoint(alive)
        assert ledger.waiting == sorted(ledger.waiting), "what comes back is leased first"
        assert set(ledger.prompts) == set(alive)
        assert set(ledger.partials) <= {*ledger.waiting, *leased}
        assert ledger.tally.trained == len(self.trained)
        num_gone = ledger._next_item - len(alive) - len(self.trained)
        assert num_gone == sum(ledger.tally.dropped.values()), "neither trained on nor counted"
        held = {work.lease.lease_id for w in self.workers.values() for work in w.work}
        assert held == set(ledger.leases)
        assert ledger.tally.discarded_tokens == self.discarded or self.has_new_recipe
        # AReaL's formula, as it stands in the issue.
        limit = (recipe.max_staleness + self.version + 1) * recipe.prompts_per_step
        accepted = ledger.step * recipe.prompts_per_step + len(finished)
        assert ledger.capacity(self.version) == max(0, limit - accepted - len(leased))
        if not self.has_new_recipe:
            assert accepted + len(leased) <= limit
        if recipe.at_bound == "wait" and not self.has_new_recipe:
            assert TOO_OLD not in ledger.tally.dropped
            in_flight = [each.oldest for each in ledger.leases.values()]
            in_flight += [each.oldest for each in ledger.finished.values()]
            for step in range(ledger.step - 1, ledger.step + recipe.max_staleness + 1):
                due = sum(oldest + recipe.max_staleness <= step for oldest in in_flight)
                assert due <= (step - ledger.step + 1) * recipe.prompts_per_step

    def check_goes_on(self, *, all_die: bool) -> None:
        """Three further steps come about, whether the workers finish what they have (the newest first,
        which is worst) or all die and another one joins."""
        world = copy.deepcopy(self)
        if all_die:
            for number in list(world.workers):
                world.lose(number)
        if world.is_training:
            world.update()
        world.join(99)
        for _ in range(3):
            world.push(99)
            while world.take() is None:
                world.draw(world.ledger.num_to_draw(world.version, 1))
                granted = world.lease(99, 1)
                busy = [n for n, worker in world.workers.items() if worker.work]
                assert granted or busy, "a deadlock"
                world.finish(busy[-1], -1)
            world.update()
