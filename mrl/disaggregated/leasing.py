"""This module gives out leases to the workers of a free-running run, by the rules of the ledger.

The server holds its lock around every call. A worker says which weights its engine has and how many
groups it may hold; it gets leases whenever the bound has room for that version.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mrl.algorithms.signal import has_signal
from mrl.collect.single_turn import start_groups
from mrl.config import Recipe
from mrl.disaggregated.admission import Bound
from mrl.disaggregated.ledger import Ledger
from mrl.disaggregated.records import Lease, Partial
from mrl.disaggregated.tally import Tally
from mrl.disaggregated.work import Delivered
from mrl.errors import WrongWeights
from mrl.run.pending_prompts import PendingPrompt, in_order, renumbered
from mrl.run.rollouts import encode_groups
from mrl.types import Prompt, SampleGroup

Send = Callable[[int, dict[str, Any], bytes], None]
"""Sends a message and a body to the worker of an engine."""
_COUNTS = ("tally", "next_item", "next_lease")
"""The keys of a ledger's state that do not hold prompts."""


@dataclasses.dataclass(frozen=True)
class _Asking:
    """What a worker has asked for."""

    version: int
    most: int
    """Groups that it may hold at a time; 0 while it is through with its version."""


class Leasing:
    """Keeps the ledger of a run and answers what workers ask. It has no lock of its own."""

    def __init__(self, recipe: Recipe, draw: Callable[[int], list[Prompt]], send: Send) -> None:
        """`draw(n)` gives the next n prompts."""
        config, rollout = recipe.asynchronous, recipe.rollout
        self._draw, self._send = draw, send
        self._seed, self._size = recipe.seed, rollout.samples_per_prompt
        self._rollout = rollout
        self._bound = Bound(rollout.prompts_per_step, config.max_staleness)
        self.ledger = Ledger(
            session=secrets.token_hex(4),
            prompts_per_step=rollout.prompts_per_step,
            max_staleness=config.max_staleness,
            max_in_flight=2**31,
            at_bound=config.at_bound,
        )
        self._asking: dict[int, _Asking] = {}
        rounds = rollout.dynamic_sampling_rounds if recipe.algorithm.dynamic_sampling else 1
        self._most_replaced = (rounds - 1) * rollout.prompts_per_step
        self._replaced = 0
        """Zero-variance groups in whose place others were begun, for the next step."""
        self._given: dict[int, set[int]] = {}
        """The versions that were sent to the worker of each engine."""

    def join(self, engine: int, incarnation: int, now: float) -> None:
        """Admit a worker; one that was there before loses its leases."""
        self._asking.pop(engine, None)
        self._given[engine] = set()
        self.ledger.join(engine, incarnation, now)

    def lose(self, engine: int) -> None:
        """Let others generate what a lost worker held."""
        self._asking.pop(engine, None)
        self.ledger.lose(engine)
        self.grant()

    def give(self, engine: int, version: int) -> None:
        """Note that a worker gets the weights `version`."""
        self._given[engine].add(version)

    def ask(self, engine: int, version: int, most: int) -> None:
        """Note which weights an engine has, and how many groups its worker may hold."""
        self._asking[engine] = _Asking(version, most)
        self.grant()

    def grant(self) -> None:
        """Give every worker what it may have now, in turns of one lease."""
        while sum(self._grant_one(engine) for engine in sorted(self._asking)):
            pass

    def _grant_one(self, engine: int) -> bool:
        asking, ledger = self._asking.get(engine), self.ledger
        if asking is None:
            return False
        held = sum(lease.worker == engine for lease in ledger.leases)
        if held >= asking.most:
            return False
        if not ledger.waiting and (num := ledger.num_to_draw(asking.version, 1)):
            self._enter(num)
        leases = ledger.lease(engine, asking.version, 1)
        for lease in leases:
            self._tell(engine, lease)
        return bool(leases)

    def _enter(self, num: int) -> None:
        groups = start_groups(self._draw(num), self._size)
        self.ledger.add(groups)

    def _tell(self, engine: int, lease: Lease) -> None:
        begun = lease.prompt if lease.partial is None else lease.partial.payload
        group = renumbered(begun, lease.item_id)
        seed = self._seed * 1_000_003 + lease.item_id
        message = {"type": "lease", "lease_id": lease.lease_id, "seed": seed}
        self._send(engine, message, encode_groups([group]))

    def finish(self, lease_id: str, group: SampleGroup, num_failed: int) -> None:
        """Take in a finished group. Raises WrongWeights where its stamps cannot be."""
        self._check_stamps(lease_id, group)
        spans = [span for sample in group.samples for span in sample.weight_versions]
        num_tokens = sum(sample.num_generated for sample in group.samples)
        if not spans:  # nothing was generated: there is nothing to train on
            self.ledger.drop(lease_id, "empty")
        elif self._is_replaced(group):
            self._replaced += self.ledger.drop(lease_id, "zero_variance", num_tokens)
        else:
            versions = [span.version for span in spans]
            self.ledger.finish(
                lease_id,
                Delivered([group], num_failed),
                oldest=min(versions),
                newest=max(versions),
                num_tokens=num_tokens,
            )
        self.grant()

    def report(self, lease_id: str, place: int, alone: SampleGroup) -> None:
        """Keep a whole sample of a group that is not whole, should its worker be lost.

        `alone` holds the sample, which is the one at `place` in its group. Raises WrongWeights where
        its stamps cannot be.
        """
        self._check_stamps(lease_id, alone)
        lease = self.ledger.find(lease_id)
        if lease is None:
            return
        former = self.ledger.partials.get(lease.item_id)
        begun: SampleGroup = lease.prompt if former is None else former.payload
        samples = list(begun.samples)
        samples[place] = alone.samples[0]
        group = renumbered(dataclasses.replace(begun, samples=samples), lease.item_id)
        if versions := _versions([group]):
            num_tokens = sum(sample.num_generated for sample in samples)
            self.ledger.report(lease_id, Partial(group, min(versions), num_tokens))

    def _check_stamps(self, lease_id: str, group: SampleGroup) -> None:
        """Raise WrongWeights where weights that the lease's engine cannot have sampled a token."""
        lease = self.ledger.find(lease_id)
        if lease is None:
            return  # a duplicate, which the ledger counts
        begun = [] if lease.partial is None else [lease.partial.payload]
        newer = {each for each in self._given[lease.worker] if each > lease.version}
        possible = {lease.version, *newer, *_versions(begun)}
        if strange := _versions([group]) - possible:
            raise WrongWeights(
                f"rollout engine {lease.worker} says that weights {_listed(strange)} sampled tokens of "
                f"the prompt {group.prompt.prompt_id!r}, but since it has the lease it can have had "
                f"{_listed(possible)} alone: the stamps of its tokens are wrong"
            )

    def _is_replaced(self, group: SampleGroup) -> bool:
        """Whether dynamic sampling replaces a group, as all of its rewards are equal; after as many as
        the recipe's rounds allow, groups of that kind fill up the step."""
        is_empty = group.rewards is None or not has_signal(group.rewards)
        return is_empty and self._replaced < self._most_replaced

    def take(self, step: int) -> Delivered | None:
        """Return the groups that a step trains on, numbered from 0; None where it has to wait."""
        batch = self.ledger.take(step)
        if batch is None:
            return None
        self._replaced = 0
        self.grant()
        whole = Delivered()
        for number, finished in enumerate(batch):
            delivered: Delivered = finished.group
            whole.groups += [renumbered(group, number) for group in delivered.groups]
            whole.num_failed += delivered.num_failed
        return whole

    def counts(self) -> dict[str, Any]:
        """Return the ledger's counts over the whole run, JSON-able."""
        state = self.ledger.state_dict()
        return {name: state[name] for name in _COUNTS}

    def waiting(self) -> list[PendingPrompt]:
        """Return the groups in the queue, and then the prompts that are leased or not leased yet."""
        ledger = self.ledger
        queue: list[PendingPrompt] = []
        for each in ledger.finished:
            delivered: Delivered = each.group
            (group,) = delivered.groups
            queue.append(PendingPrompt(group, item=each.item_id, num_failed=delivered.num_failed))
        done = {one.item for one in queue}
        begun = ledger.prompts | {i: each.payload for i, each in ledger.partials.items()}
        left = [i for i in sorted(begun) if i not in done]
        return [*in_order(queue), *(PendingPrompt(begun[i], item=i) for i in left)]

    def take_up(
        self, waiting: Sequence[PendingPrompt], step: int, counts: Mapping[str, Any] | None
    ) -> list[PendingPrompt]:
        """Continue at `step` with the pending prompts of a checkpoint; return those that start over.

        `counts` are those of the ledger that wrote it; None if engines did not run freely.
        """
        if counts is None:  # number the prompts, as a ledger would have
            first = step * self._rollout.prompts_per_step
            next_item = first + len(waiting)
            waiting = [dataclasses.replace(one, item=first + i) for i, one in enumerate(waiting)]
            counts = {"tally": Tally().state_dict(), "next_item": next_item, "next_lease": 0}
        prompts, queue, partials, oldest = {}, {}, {}, []
        for one in waiting:
            assert one.item is not None
            (prompts[one.item],) = start_groups([one.group.prompt], self._size)
            if not one.versions or not one.fits(self._rollout):
                continue
            if not one.is_scored:
                partials[one.item] = Partial(one.group, min(one.versions), one.num_tokens)
            elif self._bound.room(step, oldest, min(one.versions)):
                oldest.append(min(one.versions))
                queue[one.item] = one
        state = {
            **counts,
            "step": step,
            "waiting": [i for i in prompts if i not in queue],
            "finished": [_outline(one) for one in queue.values()],
        }
        groups = {i: Delivered([one.group], one.num_failed) for i, one in queue.items()}
        self.ledger.load_state_dict(state, prompts, groups, partials)
        kept = {*queue, *partials}
        return [one for one in waiting if one.item not in kept]


def default_groups(prompts_per_step: int, num_engines: int) -> int:
    """Return how many groups an engine holds at a time where the recipe does not say."""
    return max(1, math.ceil(2 * prompts_per_step / num_engines))


def _versions(groups: Iterable[SampleGroup]) -> set[int]:
    """Return the versions that sampled tokens of some groups."""
    return {
        span.version
        for group in groups
        for sample in group.samples
        for span in sample.weight_versions
    }


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(versions)))


def _outline(scored: PendingPrompt) -> dict[str, Any]:
    """Return the entry of a queued group in the ledger's state."""
    versions = scored.versions
    return {
        "id": scored.item,
        "oldest": min(versions),
        "newest": max(versions),
        "num_tokens": scored.num_tokens,
    }
