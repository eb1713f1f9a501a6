"""A single-turn rollout makes requests of prompts, and sample groups of an engine's completions.

A group is partial until each of its G samples is whole. A partial group is a `SampleGroup` as well: a
sample that is not whole has the finish reason `abort` and holds the tokens so far.

P prompt tokens, C tokens generated so far, T = P + C all tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from moe.trace import join_traces, joined_spans
from mrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, sample_seed
from mrl.run.pending_prompts import PARTIAL
from mrl.sampling_mask import join_masks
from mrl.system.heartbeat import beat
from mrl.types import Prompt, Sample, SampleGroup


def start_groups(
    prompts: Sequence[Prompt], samples_per_prompt: int, first_group_id: int = 0
) -> list[SampleGroup]:
    """Return one group per prompt, with no token generated yet; group i has id `first_group_id + i`."""
    return [
        SampleGroup(prompt, [_empty_sample(first_group_id + i, prompt)] * samples_per_prompt)
        for i, prompt in enumerate(prompts)
    ]


def is_finished(group: SampleGroup) -> bool:
    """Return whether every sample of the group is whole."""
    return all(sample.finish_reason != PARTIAL for sample in group.samples)


class SingleTurnRollout:
    """Generates one engine's share of a step, one completion a sample: a `mrl.collect.task.Rollout`."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        sampling: SamplingParams | Sequence[SamplingParams],
        seed: int | Sequence[int],
        num_wanted: int | None = None,
        on_sample: Callable[[SampleGroup, int], None] | None = None,
        context_len: int | None = None,
    ) -> None:
        """Sample k of a group is drawn with `sample_seed(seed, prompt_id, k)`, whatever happens.

        `seed` and `sampling` are one for all groups, or one for each. The rollout is over when
        `num_wanted` groups are whole, by default all; the others are aborted then, and stay in
        `partial`. `sampling` describes whole samples: of a sample that has C tokens already, C less
        are requested, and at most as many as fit in a context of `context_len`; if none fit, as in a
        run that continues with shorter limits, the sample ends with the finish reason `length`.
        `on_sample(group, k)` is called when sample k of a group is whole and others of
        the group are not.
        """
        self._groups = {group.samples[0].group_id: group for group in groups}
        seeds = [seed] * len(groups) if isinstance(seed, int) else seed
        self._seeds = dict(zip(self._groups, seeds, strict=True))
        samplings = [sampling] * len(groups) if isinstance(sampling, SamplingParams) else sampling
        self._samplings = dict(zip(self._groups, samplings, strict=True))
        self._num_left = len(groups) if num_wanted is None else num_wanted
        self._on_sample = on_sample
        self._context_len = context_len

    @property
    def partial(self) -> list[SampleGroup]:
        """Groups that finished() has not yielded, with what they have so far."""
        return list(self._groups.values())

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all that were wanted."""
        return self._num_left == 0

    def finished(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        """Yield groups as they become whole. Raises as generate() does; `partial` stays right."""
        for group_id, group in list(self._groups.items()):
            self._cut_off(group_id)
            if is_finished(group) and not self.is_over:
                yield self._take(group_id)
        requests = {} if self.is_over else self._requests()
        indices = {request.request_id: index for index, request in requests.items()}
        for completion in engine.generate(list(requests.values())) if requests else ():
            beat()
            group_id, k = indices[completion.request_id]
            group = self._groups[group_id]
            group.samples[k] = _continued(group.samples[k], completion)
            if not is_finished(group):
                if self._on_sample is not None and group.samples[k].finish_reason != PARTIAL:
                    self._on_sample(group, k)
            elif not self.is_over:
                yield self._take(group_id)
                if (
                    self.is_over and self._groups
                ):  # yielded first: no loss of the engine can undo it
                    engine.abort()  # the others come back with what they have

    def _take(self, group_id: int) -> SampleGroup:
        self._num_left -= 1
        return self._groups.pop(group_id)

    def _room(self, group_id: int, sample: Sample) -> int:
        """Return how many more tokens the sample may have."""
        room = self._samplings[group_id].max_new_tokens - len(sample.response_ids)
        if self._context_len is None:
            return room
        return min(room, self._context_len - len(sample.token_ids))

    def _cut_off(self, group_id: int) -> None:
        """End the partial samples of a group that may have no more tokens."""
        samples = self._groups[group_id].samples
        for k, sample in enumerate(samples):
            is_partial = sample.finish_reason == PARTIAL and len(sample.response_ids) > 0
            if is_partial and self._room(group_id, sample) < 1:
                samples[k] = dataclasses.replace(sample, finish_reason="length")

    def _requests(self) -> dict[tuple[int, int], Request]:
        """Return what is still to be generated, by (group id, index of the sample)."""
        requests = {}
        for group_id, group in self._groups.items():
            for k, sample in enumerate(group.samples):
                if sample.finish_reason != PARTIAL:
                    continue
                requests[group_id, k] = Request(
                    request_id=f"{group.prompt.source} group {group_id} sample {k}",
                    token_ids=sample.token_ids,
                    seed=sample_seed(self._seeds[group_id], group.prompt.prompt_id, k),
                    sampling=_remaining(
                        self._samplings[group_id],
                        len(sample.response_ids),
                        self._room(group_id, sample),
                    ),
                )
        return requests


def _remaining(sampling: SamplingParams, num_done: int, room: int) -> SamplingParams:
    """Return the sampling parameters that continue a sample of `num_done` tokens by at most `room`."""
    if not num_done:
        return sampling  # whole: a prompt that is too long for it is refused
    at_least = min(room, max(0, sampling.min_new_tokens - num_done))
    return dataclasses.replace(sampling, max_new_tokens=room, min_new_tokens=at_least)


def _empty_sample(group_id: int, prompt: Prompt) -> Sample:
    num_tokens = prompt.token_ids.numel()
    return Sample(
        group_id=group_id,
        token_ids=prompt.token_ids,
        prompt_len=num_tokens,
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(num_tokens),
        weight_versions=(),
        finish_reason=PARTIAL,
    )


def _continued(sample: Sample, completion: Completion) -> Sample:
    """Return the sample with the completion of its tokens so far appended."""
    num_new = completion.output_ids.numel()
    if not num_new:
        return dataclasses.replace(sample, finish_reason=completion.finish_reason)
    old, new = sample.routing, completion.routing
    return dataclasses.replace(
        sample,
        token_ids=torch.cat([sample.token_ids, completion.output_ids]),
        loss_mask=torch.cat([sample.loss_mask, torch.ones(num_new, dtype=torch.bool)]),
        rollout_logprobs=torch.cat([sample.rollout_logprobs, completion.logprobs]),
        weight_versions=joined_spans(sample.weight_versions, completion.weight_versions),
        finish_reason=completion.finish_reason,
        routing=new if old is None or new is None else join_traces(old, new),
        sampling_mask=join_masks(
            [(sample.sampling_mask, len(sample.token_ids)), (completion.sampling_mask, num_new)]
        ),
    )
