"""This module holds the prompts that wait: those that were drawn and that no step has trained on.

They are in every checkpoint in one form. So a run continues with all of them, whatever placement, bound
and batch size it is resumed with: a collector takes up those whose samples it can use, and lets the
others begin anew, before it draws further prompts.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config import RolloutConfig
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup

PARTIAL = "abort"
"""The finish reason of a sample that is not whole."""


@dataclass(frozen=True)
class Waiting:
    """A prompt that was drawn and not trained on, with the samples generated so far."""

    group: SampleGroup
    """The prompt and its samples; they have rewards once the group is whole and scored."""
    seed: int | None = None
    """The seed of its samples; None where the step or lease that starts it sets one."""
    item: int | None = None
    """Its number in the ledger of a run whose engines run freely."""
    num_failed: int = 0
    """How many samples failed, of a group that is scored."""

    @property
    def is_scored(self) -> bool:
        return self.group.rewards is not None

    @property
    def versions(self) -> set[int]:
        """The versions of the weights that sampled its tokens."""
        spans = (span for sample in self.group.samples for span in sample.weight_versions)
        return {span.version for span in spans}

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated of it."""
        return sum(sample.num_generated for sample in self.group.samples)

    def fits(self, config: RolloutConfig) -> bool:
        """Whether its samples are what a recipe asks for, which may have changed since: as many, with
        room for further tokens where they are not whole, and log-probs of the same distribution."""
        samples = self.group.samples
        return len(samples) == config.samples_per_prompt and all(
            (sample.sampling_mask is not None) == config.sampling_mask
            and (sample.finish_reason != PARTIAL or sample.num_generated < config.max_response_len)
            for sample in samples
            if sample.num_generated
        )


def waiting_state(waiting: Sequence[Waiting]) -> dict[str, Any]:
    """Return JSON-able state, with the tokens and routes of what waits; most of it is routes."""
    return {
        "groups": _encode([one.group for one in waiting]),
        "seeds": [one.seed for one in waiting],
        "items": [one.item for one in waiting],
        "num_failed": [one.num_failed for one in waiting],
    }


def read_waiting(state: Mapping[str, Any]) -> list[Waiting]:
    """Return what waits in the state of a collector, in the order in which it is to be trained on.

    Also reads older checkpoints, in which each kind of collector had its own format.
    """
    if (found := state.get("waiting")) is None:
        return [*_batches(state), *_backlog(state), *_leases(state)]
    columns = (found["seeds"], found["items"], found["num_failed"])
    return [
        Waiting(group, *rest)
        for group, *rest in zip(_decode(found["groups"]), *columns, strict=True)
    ]


def _batches(state: Mapping[str, Any]) -> Iterable[Waiting]:
    """Yield the batches that engines had generated ahead by a fixed schedule."""
    for _, batch in sorted(state.get("ahead", {}).items(), key=lambda pair: int(pair[0])):
        for place, group in enumerate(_decode(batch["groups"])):
            yield Waiting(group, num_failed=0 if place else int(batch["num_failed"]))


def _backlog(state: Mapping[str, Any]) -> Iterable[Waiting]:
    """Yield what over-sampled steps had left."""
    if backlog := state.get("backlog"):
        for group, seed in zip(_decode(backlog["groups"]), backlog["seeds"], strict=True):
            yield Waiting(group, seed)


def _leases(state: Mapping[str, Any]) -> Iterable[Waiting]:
    """Yield the queue of engines that ran freely, and the prompts that waited or were leased."""
    if not (leases := state.get("leases")):
        return
    queue = zip(_decode(leases["queue"]), leases["queue_ids"], leases["num_failed"], strict=True)
    yield from in_order(
        Waiting(group, item=item, num_failed=failed) for group, item, failed in queue
    )
    begun = dict(zip(leases["prompt_ids"], _decode(leases["prompts"]), strict=True))
    begun |= dict(zip(leases["partial_ids"], _decode(leases["partials"]), strict=True))
    for item in leases["ledger"]["waiting"]:
        yield Waiting(begun[item], item=item)


def in_order(scored: Iterable[Waiting]) -> list[Waiting]:
    """Return scored groups in the order in which steps train on them: the oldest tokens first."""
    return sorted(scored, key=lambda one: (min(one.versions, default=0), one.item or 0))


def whole_batches(
    waiting: Sequence[Waiting], step: int, config: RolloutConfig, max_staleness: int
) -> tuple[list[list[Waiting]], list[Waiting]]:
    """Return the batches of `step` and the steps after it, and what is in none of them.

    Each batch has `prompts_per_step` scored groups, none of whose tokens is more than `max_staleness`
    versions older than its step.
    """
    ready = [one for one in waiting if one.is_scored and one.fits(config)]
    batches: list[list[Waiting]] = []
    while True:
        oldest = step + len(batches) - max_staleness
        ready = [one for one in ready if min(one.versions, default=oldest) >= oldest]
        if len(ready) < config.prompts_per_step:
            break
        batches.append(ready[: config.prompts_per_step])
        ready = ready[config.prompts_per_step :]
    placed = {id(one) for batch in batches for one in batch}
    return batches, [one for one in waiting if id(one) not in placed]


def renumbered(group: SampleGroup, group_id: int) -> SampleGroup:
    """Return a group whose samples have another group id."""
    samples = [dataclasses.replace(sample, group_id=group_id) for sample in group.samples]
    return dataclasses.replace(group, samples=samples)


def _encode(groups: Sequence[SampleGroup]) -> str:
    return base64.b64encode(encode_groups(groups)).decode() if groups else ""


def _decode(text: str) -> list[SampleGroup]:
    return decode_groups(base64.b64decode(text)) if text else []
