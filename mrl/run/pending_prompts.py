"""Pending prompts: prompts that were taken from the data and that no step has trained on yet.

Every checkpoint holds the pending prompts in the same format, so a run keeps them even if it is
resumed with another placement, staleness bound or batch size. Before a collector takes new prompts
from the data, it continues the pending prompts whose samples it can use, and generates the samples
of all other pending prompts again.

In a run with a staleness bound, engines may run freely: ahead of the trainer, without a fixed
schedule. The run then numbers the prompts, and its ledger (`mrl.scheduling`) records which engine
generates the samples of which prompt; each such assignment is called a lease.
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
    """A prompt that no step has trained on yet, with the samples that were generated so far."""

    group: SampleGroup
    """The prompt and its samples. The group has rewards once all samples are complete and scored."""
    seed: int | None = None
    """The seed of the samples; None if it is chosen only when the generation of the samples starts."""
    item: int | None = None
    """The number that the ledger gave the prompt; None if the engines have a fixed schedule."""
    num_failed: int = 0
    """Number of samples of the group that could not be scored; 0 before the group is scored."""

    @property
    def is_scored(self) -> bool:
        return self.group.rewards is not None

    @property
    def versions(self) -> set[int]:
        """The versions of the weights that sampled the tokens of the group's samples."""
        spans = (span for sample in self.group.samples for span in sample.weight_versions)
        return {span.version for span in spans}

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were generated so far, summed over the group's samples."""
        return sum(sample.num_generated for sample in self.group.samples)

    def fits(self, config: RolloutConfig) -> bool:
        """Return whether the samples can be used with `config`.

        The samples may have been generated with another config. Their number must be
        `samples_per_prompt`. An incomplete sample must be shorter than `max_response_len`. A sample
        with tokens must have a sampling mask if and only if `config` asks for sampling masks.
        """
        samples = self.group.samples
        return len(samples) == config.samples_per_prompt and all(
            (sample.sampling_mask is not None) == config.sampling_mask
            and (sample.finish_reason != PARTIAL or sample.num_generated < config.max_response_len)
            for sample in samples
            if sample.num_generated
        )


def pending_state(waiting: Sequence[PendingPrompt]) -> dict[str, Any]:
    """Return the prompts, with tokens and expert ids, as a JSON-serializable dict.

    Most bytes of the dict are expert ids.
    """
    return {
        "groups": _encode([one.group for one in waiting]),
        "seeds": [one.seed for one in waiting],
        "items": [one.item for one in waiting],
        "num_failed": [one.num_failed for one in waiting],
    }


def read_pending(state: Mapping[str, Any]) -> list[PendingPrompt]:
    """Return the pending prompts in a collector's state, in the order in which to train on them.

    The state may be from an older checkpoint, in which each kind of collector had its own format.
    """
    if (found := state.get("waiting")) is None:
        return [*_batches(state), *_backlog(state), *_leases(state)]
    columns = (found["seeds"], found["items"], found["num_failed"])
    return [
        PendingPrompt(group, *rest)
        for group, *rest in zip(_decode(found["groups"]), *columns, strict=True)
    ]


def _batches(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield the pending prompts of an old checkpoint of a run whose engines had a fixed schedule.

    The engines had generated the samples of these prompts ahead of the trainer, in complete
    batches.
    """
    for _, batch in sorted(state.get("ahead", {}).items(), key=lambda pair: int(pair[0])):
        for place, group in enumerate(_decode(batch["groups"])):
            yield PendingPrompt(group, num_failed=0 if place else int(batch["num_failed"]))


def _backlog(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield the pending prompts of an old checkpoint of a run with over-sampling.

    Over-sampling begins more prompts than a step needs. The pending prompts are those that were
    left over for a later step.
    """
    if backlog := state.get("backlog"):
        for group, seed in zip(_decode(backlog["groups"]), backlog["seeds"], strict=True):
            yield PendingPrompt(group, seed)


def _leases(state: Mapping[str, Any]) -> Iterable[PendingPrompt]:
    """Yield the pending prompts of an old checkpoint of a run whose engines ran freely.

    Prompts with scored samples come first, and then all other prompts.
    """
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
    """Return scored groups in the order in which to train on them.

    Groups are ordered by the oldest version of the weights that sampled one of their tokens, oldest
    first. Groups with the same oldest version are ordered by their number in the ledger.
    """
    return sorted(scored, key=lambda one: (min(one.versions, default=0), one.item or 0))


def whole_batches(
    waiting: Sequence[PendingPrompt], step: int, config: RolloutConfig, max_staleness: int
) -> tuple[list[list[PendingPrompt]], list[PendingPrompt]]:
    """Return two lists: full batches for `step` and the steps after it, and all other pending
    prompts.

    A batch is for one step, and has `prompts_per_step` groups that are scored and whose samples can
    be used with `config` (`PendingPrompt.fits`). All tokens of the batch for step S were sampled by
    weights of version S - `max_staleness` or newer. The batches end before the first step for which
    too few such groups remain.
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
    """Return a copy of the group in which all samples have this `group_id`."""
    samples = [dataclasses.replace(sample, group_id=group_id) for sample in group.samples]
    return dataclasses.replace(group, samples=samples)


def _encode(groups: Sequence[SampleGroup]) -> str:
    return base64.b64encode(encode_groups(groups)).decode() if groups else ""


def _decode(text: str) -> list[SampleGroup]:
    return decode_groups(base64.b64decode(text)) if text else []
