"""The schedule that leases single prompts to workers.

A lease is the right of one worker to generate the group of one prompt. With leases, engines generate
independently of the trainer's steps. A worker reports the version of its engine's weights and how many
leases it may hold at a time. The worker gets leases as long as the ledger (mrl/scheduling/ledger.py),
which bounds staleness, has room for groups of this version.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mrl.algorithms.signal import has_signal
from mrl.collect.single_turn import start_groups
from mrl.config import Recipe
from mrl.engine_pool.remote.messages import (
    Delivered,
    FinishedGroup,
    FinishedSample,
    LeasedGroup,
)
from mrl.errors import WrongWeights
from mrl.run.pending_prompts import PendingPrompt, in_order, renumbered
from mrl.scheduling.ledger import Ledger
from mrl.scheduling.records import Finished, Lease, Partial, Tally
from mrl.scheduling.schedule import Message, R, Receiver, Schedule
from mrl.scheduling.staleness import versions_of
from mrl.types import Prompt, SampleGroup


@dataclasses.dataclass(frozen=True)
class _Request:
    """A worker's newest request for leases."""

    version: int
    """The version of the weights in the worker's engine."""
    most: int
    """How many leases the worker may hold at a time; 0 while it waits until it can load newer
    weights."""


class LeaseSchedule(Schedule):
    """Leases prompts to workers as far as a ledger, which bounds staleness, allows. Queues the
    groups that the workers finish."""

    num_to_begin = 1
    joins_at_once = True

    def __init__(self, recipe: Recipe, draw: Callable[[int], list[Prompt]]) -> None:
        """`draw(n)` returns the next n prompts. It is called while the coordinator's lock is
        held."""
        config, rollout = recipe.asynchronous, recipe.rollout
        self._draw, self._rollout = draw, rollout
        self._seed, self._size = recipe.seed, rollout.samples_per_prompt
        self.ledger = Ledger(
            session=secrets.token_hex(4),
            prompts_per_step=rollout.prompts_per_step,
            max_staleness=config.max_staleness,
            at_bound=config.at_bound,
        )
        self._requests: dict[int, _Request] = {}
        self._messages: list[Message] = []
        """Messages that are not sent yet."""
        rounds = rollout.dynamic_sampling_rounds if recipe.algorithm.dynamic_sampling else 1
        self._most_replaced = (rounds - 1) * rollout.prompts_per_step
        self._num_replaced = 0
        """How many groups with equal rewards were replaced since the last step took its groups."""
        self._sent: dict[int, set[int]] = {}
        """The versions that were sent to each worker, by the number of its engine."""
        self._retired: set[int] = set()
        """The engines that get no further leases."""

    def retire(self, engine: int) -> None:
        self._retired.add(engine)
        self._requests.pop(engine, None)

    def num_leased(self, engine: int) -> int:
        return sum(lease.worker == engine for lease in self.ledger.leases.values())

    def receivers(self, workers: Collection[R], version: int) -> list[R]:
        """Return the workers to which the weights `version` were not sent yet, and which can
        receive them now. An engine that is leaving gets those alone that its work needs."""
        return [
            worker
            for worker in workers
            if worker.sent < version
            and worker.can_receive
            and (worker.engine not in self._retired or worker.needs >= version)
        ]

    def can_proceed(self, workers: Collection[Receiver], version: int) -> bool:
        """Return True: the trainer waits for groups, never for an engine."""
        return True

    def joined(self, engine: int) -> None:
        self._sent[engine] = set()
        self.ledger.join(engine)

    def lost(self, engine: int) -> None:
        """End the leases of the lost worker of an engine, so that other workers generate these
        groups."""
        self._requests.pop(engine, None)
        self._sent.pop(engine, None)
        self.ledger.lose(engine)
        self.grant()

    def sent(self, engine: int, version: int) -> None:
        self._sent[engine].add(version)

    def handle(self, engine: int, message: Mapping[str, Any], body: bytes) -> bool:
        if message["type"] == "ask":
            self.ask(engine, int(message["version"]), int(message["most"]))
        elif message["type"] == "group":
            self.finish(FinishedGroup.of_frame(message, body))
        elif message["type"] == "sample":
            self.report(FinishedSample.of_frame(message, body))
        else:
            return False
        return True

    def take_messages(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def queued_versions(self) -> list[int]:
        return [group.oldest for group in self.ledger.finished.values()]

    def metrics(self) -> dict[str, float]:
        """Return the ledger's metrics, and `async/engines`, the number of engines to which weights were
        sent."""
        num_engines = sum(bool(versions) for versions in self._sent.values())
        return {**self.ledger.metrics(), "async/engines": float(num_engines)}

    def start(self, step: int) -> None:
        """Set the ledger's next step to `step`, unless the ledger is at a later step already."""
        self.ledger.step = max(self.ledger.step, step)

    def ask(self, engine: int, version: int, most: int) -> None:
        """Record that a worker's engine has the weights `version`, and that the worker may hold
        `most` leases at a time. This replaces what the worker has reported before. Then grant
        leases."""
        if engine not in self._retired:
            self._requests[engine] = _Request(version, most)
        self.grant()

    def grant(self) -> None:
        """Give every worker the leases that it may have now. Workers take turns, with one lease
        each."""
        while sum(self._grant_one(engine) for engine in sorted(self._requests)):
            pass

    def _grant_one(self, engine: int) -> bool:
        request, ledger = self._requests[engine], self.ledger
        if self.num_leased(engine) >= request.most:
            return False
        if not ledger.waiting and (num := ledger.num_to_draw(request.version, 1)):
            ledger.add(start_groups(self._draw(num), self._size))
        leases = ledger.lease(engine, request.version, 1)
        self._messages += [(engine, *self._leased(lease).frame()) for lease in leases]
        return bool(leases)

    def _leased(self, lease: Lease) -> LeasedGroup:
        begun = lease.prompt if lease.partial is None else lease.partial.payload
        group = renumbered(begun, lease.item_id)
        return LeasedGroup(lease.lease_id, group, self._seed * 1_000_003 + lease.item_id)

    def finish(self, finished: FinishedGroup) -> None:
        """Put a finished group into the queue, or drop it if it has no tokens or dynamic sampling
        replaces it. Raises WrongWeights if a token has a version that the worker's engine cannot
        have had."""
        lease_id, group = finished.lease_id, finished.group
        self._check_versions(lease_id, group)
        versions = versions_of(group)
        num_tokens = sum(sample.num_generated for sample in group.samples)
        if not versions:  # nothing was generated, so there is nothing to train on
            self.ledger.drop(lease_id, "empty")
        elif self._is_replaced(group):
            self._num_replaced += self.ledger.drop(lease_id, "zero_variance", num_tokens)
        else:
            self.ledger.finish(
                lease_id,
                Delivered([group], finished.num_failed),
                oldest=min(versions),
                newest=max(versions),
                num_tokens=num_tokens,
            )
        self.grant()

    def report(self, finished: FinishedSample) -> None:
        """Keep a complete sample of an unfinished group. If the worker is lost, the next worker
        need not generate the sample again. Raises WrongWeights if a token has a version that the
        worker's engine cannot have had."""
        lease_id, alone = finished.lease_id, finished.group
        self._check_versions(lease_id, alone)
        lease = self.ledger.leases.get(lease_id)
        if lease is None:
            return
        former = self.ledger.partials.get(lease.item_id)
        begun: SampleGroup = lease.prompt if former is None else former.payload
        samples = list(begun.samples)
        samples[finished.place] = alone.samples[0]
        group = renumbered(dataclasses.replace(begun, samples=samples), lease.item_id)
        if versions := versions_of(group):
            num_tokens = sum(sample.num_generated for sample in samples)
            self.ledger.report(lease_id, Partial(group, min(versions), num_tokens))

    def _check_versions(self, lease_id: str, group: SampleGroup) -> None:
        """Raise WrongWeights if a token has a version that the engine cannot have had under the
        lease."""
        lease = self.ledger.leases.get(lease_id)
        if lease is None:
            return  # a duplicate, which the ledger counts
        newer = {version for version in self._sent[lease.worker] if version > lease.version}
        possible = {lease.version, *newer}
        if lease.partial is not None:
            possible |= versions_of(lease.partial.payload)
        if strange := versions_of(group) - possible:
            raise WrongWeights(
                f"rollout engine {lease.worker} says that weights {_listed(strange)} sampled tokens of "
                f"the prompt {group.prompt.prompt_id!r}, but since it has the lease it can have had "
                f"{_listed(possible)} alone: the stamps of its tokens are wrong"
            )

    def _is_replaced(self, group: SampleGroup) -> bool:
        """Return whether dynamic sampling replaces a group because all of its rewards are equal.

        The number of replaced groups in a step is limited by `rollout.dynamic_sampling_rounds`.
        Beyond the limit, groups with equal rewards are kept.
        """
        is_empty = group.rewards is None or not has_signal(group.rewards)
        return is_empty and self._num_replaced < self._most_replaced

    def take(self, step: int) -> Delivered | None:
        """Take the groups that a step trains on from the queue, and return them with group ids from
        0. Return None if the step has to wait."""
        batch = self.ledger.take(step)
        if batch is None:
            return None
        self._num_replaced = 0
        self.grant()
        whole = Delivered()
        for number, finished in enumerate(batch):
            delivered: Delivered = finished.group
            whole.groups += [renumbered(group, number) for group in delivered.groups]
            whole.num_failed += delivered.num_failed
        return whole

    def waiting(self) -> list[PendingPrompt]:
        """Return the pending prompts, to be saved in a checkpoint. Prompts whose groups are in the
        queue of finished groups come first. All other prompts follow, leased or not."""
        ledger = self.ledger
        queue: list[PendingPrompt] = []
        for item, each in ledger.finished.items():
            delivered: Delivered = each.group
            (group,) = delivered.groups
            queue.append(PendingPrompt(group, item=item, num_failed=delivered.num_failed))
        begun = ledger.prompts | {i: each.payload for i, each in ledger.partials.items()}
        left = sorted(begun.keys() - ledger.finished.keys())
        return [*in_order(queue), *(PendingPrompt(begun[i], item=i) for i in left)]

    def resume(
        self, waiting: Sequence[PendingPrompt], step: int, counts: Mapping[str, Any] | None
    ) -> list[PendingPrompt]:
        """Continue at `step` with the pending prompts `waiting` of a checkpoint. Return those whose
        samples are generated again from the beginning.

        `counts` are the ledger's counts in the checkpoint (`Ledger.counts`); None if the run that
        wrote the checkpoint had no leases.
        """
        if counts is None:  # number the prompts as a ledger would have
            first = step * self._rollout.prompts_per_step
            next_item = first + len(waiting)
            waiting = [dataclasses.replace(one, item=first + i) for i, one in enumerate(waiting)]
            counts = {"tally": Tally().state_dict(), "next_item": next_item, "next_lease": 0}
        prompts, partials = {}, {}
        queue: dict[int, Finished] = {}
        for one in waiting:
            assert one.item is not None
            (prompts[one.item],) = start_groups([one.group.prompt], self._size)
            if not (versions := one.versions) or not one.fits(self._rollout):
                continue
            oldest = min(versions)
            if not one.is_scored:
                partials[one.item] = Partial(one.group, oldest, one.num_tokens)
            elif self.ledger.bound.room(step, [each.oldest for each in queue.values()], oldest):
                group = Delivered([one.group], one.num_failed)
                queue[one.item] = Finished(one.item, group, oldest, one.num_tokens)
        self.ledger.load(counts, step, prompts, queue.values(), partials)
        kept = {*queue, *partials}
        return [one for one in waiting if one.item not in kept]


def default_groups(prompts_per_step: int, num_engines: int) -> int:
    """Return the default of `async.groups_in_flight`, the number of groups that an engine generates
    at a time."""
    return max(1, math.ceil(2 * prompts_per_step / num_engines))


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(versions)))
