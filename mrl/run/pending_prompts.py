"""Pending prompts: those that were drawn and that no step has trained on.

Every checkpoint holds them in the same format. So a run continues with all of them, whatever placement,
bound and batch size it is resumed with: a collector continues those whose samples it can use, and
generates the others again, before it draws further prompts.
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
"""The finish reason of an incomplete sample."""


@dataclass(frozen=True)
class PendingPrompt:
    """A prompt that was drawn and not trained on, with the samples generated so far."""

    group: SampleGroup
    """The prompt and its samples; it has rewards once the group is complete and scored."""
    seed: int | None = None
    """The seed of its samples; None if the step or lease that starts it sets one."""
    item: int | None = None
    """Its number in the ledger of a run whose engines run freely."""
    num_failed: int = 0
    """How many samples of a scored group failed."""

    @property
    def is_scored(self) -> bool:
        return self.group.rewards is not None

    @property
    def versions(self) -> set[int]:
        """The weight versions that sampled its tokens."""
        spans = (span for sample in self.group.samples for span in sample.weight_versions)
        return {span.version for span in spans}

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated for it."""
        return sum(sample.num_generated for sample in self.group.samples)

    def fits(self, config: RolloutConfig) -> bool:
        """Whether its samples fit a recipe, which may have changed since: their number, the length
        limit of incomplete ones, and the distribution of the log-probs."""
        samples = self.group.samples
        return len(samples) == config.samples_per_prompt and all(
            (sample.sampling_mask is not None) == config.sampling_mask
            and (sample.finish_reason != PARTIAL or sample.num_generated < config.max_response_len)
            for sample in samples
            if sample.num_generated
        )


def pending_state(waiting: Sequence[PendingPrompt]) -> dict[str, Any]:
    """Return JSON-able state, with tokens and routes; most of it is routes."""
    return {
        "groups": _encode([one.group for one in waiting]),
        "seeds": [one.seed for one in waiting],
        "items": [one.item for one in waiting],
        "num_failed": [one.num_failed for one in waiting],
    }


def read_pending(state: Mapping[str, Any]) -> list[PendingPrompt]:
    """Return the pending prompts of a collector's state, in the order in which they are to be trained
    on.

    Also reads older checkpoints, in which each kind of collector had its own format.
    """
    if (found := state.get("waiting")) is None:
        return [*_batches(state), *_backlog(state), *_leases(state)]
    columns = (found["seeds"], found["items"], found["num_failed"])
    return [
        PendingPrompt(group, *rest)
        for group, *rest in zip(_decode(found["groups"]), *columns, strict=True)
    ]


def _batches(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield the batches that engines had generated ahead with a fixed schedule."""
    for _, batch in sorted(state.get("ahead", {}).items(), key=lambda pair: int(pair[0])):
        for place, group in enumerate(_decode(batch["groups"])):
            yield PendingPrompt(group, num_failed=0 if place else int(batch["num_failed"]))


def _backlog(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield what was left over by steps with over-sampling."""
    if backlog := state.get("backlog"):
        for group, seed in zip(_decode(backlog["groups"]), backlog["seeds"], strict=True):
            yield PendingPrompt(group, seed)


def _leases(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield the queue of engines that ran freely, and the prompts that were not leased yet or
    leased."""
    if not (leases := state.get("leases")):
        return
    queue = zip(_decode(leases["queue"]), leases["queue_ids"], leases["num_failed"], strict=True)
    yield from in_order(
        PendingPrompt(group, item=item, num_failed=failed) for group, item, failed in queue
    )
    begun = dict(zip(leases["prompt_ids"], _decode(leases["prompts"]), strict=True))
    begun |= dict(zip(leases["partial_ids"], _decode(leases["partials"]), strict=True))
    for item in leases["ledger"]["waiting"]:
        yield PendingPrompt(begun[item], item=item)


def in_order(scored: Iterable[PendingPrompt]) -> list[PendingPrompt]:
    """Return scored groups in the order in which steps train on them: the oldest tokens first."""
    return sorted(scored, key=lambda one: (min(one.versions, default=0), one.item or 0))


def whole_batches(
    waiting: Sequence[PendingPrompt], step: int, config: RolloutConfig, max_staleness: int
) -> tuple[list[list[PendingPrompt]], list[PendingPrompt]]:
    """Return the batches of `step` and the steps after it, and the prompts that are in no batch.

    Each batch has `prompts_per_step` scored groups, none of whose tokens is more than `max_staleness`
    versions older than its step.
    """
    ready = [one for one in waiting if one.is_scored and one.fits(config)]
    batches: list[list[PendingPrompt]] = []
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
