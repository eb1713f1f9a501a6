"""A single-turn rollout turns prompts into requests, and an engine's completions into sample
groups.

A group is partial until all of its samples are complete. A partial group is a `SampleGroup`, too:
an incomplete sample has the finish reason `abort` and the tokens that were generated so far.

Dimensions: P prompt tokens, C tokens generated so far, T = P + C tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from moe.trace import join_traces, joined_spans
from mrl.engines.base import Completion, PolicyEndpoint, Request, sample_seed
from mrl.engines.sampling import SamplingParams
from mrl.run.pending_prompts import PARTIAL
from mrl.sampling_mask import join_masks
from mrl.system.heartbeat import beat, drop_samples, expect_samples, finish_samples
from mrl.types import Prompt, Sample, SampleGroup


def start_groups(
    prompts: Sequence[Prompt], samples_per_prompt: int, first_group_id: int = 0
) -> list[SampleGroup]:
    """Return one group per prompt, without generated tokens. Group i has the id `first_group_id +
    i`."""
    return [
        SampleGroup(prompt, [_empty_sample(first_group_id + i, prompt)] * samples_per_prompt)
        for i, prompt in enumerate(prompts)
    ]


def is_finished(group: SampleGroup) -> bool:
    """Return whether all samples of the group are complete."""
    return all(sample.finish_reason != PARTIAL for sample in group.samples)


class SingleTurnRollout:
    """Generates one engine's part of a step, with one completion per sample. It is a
    `mrl.collect.task.Rollout`."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        sampling: SamplingParams | Sequence[SamplingParams],
        seed: int | Sequence[int],
        num_wanted: int | None = None,
        on_sample: Callable[[SampleGroup, int], None] | None = None,
        context_len: int | None = None,
        options: Mapping[str, bool] = {},
    ) -> None:
        """`seed` and `sampling` are single values for all groups, or have one value for each group.

        Sample k of a prompt always uses the seed `sample_seed(seed, prompt_id, k)`.

        The rollout is over when `num_wanted` groups are complete, by default all groups. The
        requests of all other groups are aborted then, and these groups stay in `partial`.

        The limits in `sampling` apply to complete samples. For a sample that has C tokens already,
        the limits of the request are smaller by C. A sample has at most `context_len` tokens. If a
        partial sample has no room for another token, which happens when a run continues with shorter
        limits, it ends with the finish reason `length`.

        `on_sample(group, k)` is called when sample k of a group is complete but other samples of
        the group are not. `options` are passed on to `PolicyEndpoint.generate`.
        """
        self._groups = {group.samples[0].group_id: group for group in groups}
        seeds = [seed] * len(groups) if isinstance(seed, int) else seed
        self._seeds = dict(zip(self._groups, seeds, strict=True))
        samplings = [sampling] * len(groups) if isinstance(sampling, SamplingParams) else sampling
        self._samplings = dict(zip(self._groups, samplings, strict=True))
        self._num_left = len(groups) if num_wanted is None else num_wanted
        self._on_sample = on_sample
        self._context_len = context_len
        self._options = options
        expect_samples(self._num_partial)

    @property
    def partial(self) -> list[SampleGroup]:
        """The groups that finished() has not yielded, with the tokens that they have so far."""
        return list(self._groups.values())

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded `num_wanted` groups."""
        return self._num_left == 0

    @property
    def _num_partial(self) -> int:
        """The number of samples that are not complete, of the groups in `partial`."""
        samples = (sample for group in self._groups.values() for sample in group.samples)
        return sum(sample.finish_reason == PARTIAL for sample in samples)

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete. Raises the errors of generate(); `partial` stays
        valid after an error."""
        yield from self._finished(endpoint)
        drop_samples(self._num_partial)

    def _finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        for group_id, group in list(self._groups.items()):
            self._cut_off(group_id)
            if is_finished(group) and not self.is_over:
                yield self._take(group_id)
        requests = {} if self.is_over else self._requests()
        indices = {request.request_id: index for index, request in requests.items()}
        if not requests:
            return
        for completion in endpoint.generate(list(requests.values()), **self._options):
            beat()
            group_id, k = indices.pop(completion.request_id)
            group = self._groups[group_id]
            group.samples[k] = _continued(group.samples[k], completion)
            finish_samples(group.samples[k].finish_reason != PARTIAL)
            if not is_finished(group):
                if self._on_sample is not None and group.samples[k].finish_reason != PARTIAL:
                    self._on_sample(group, k)
            elif not self.is_over:
                yield self._take(group_id)
                # Yield the group before abort(), which may find that the engine is lost.
                if self.is_over and self._groups:
                    endpoint.abort(sorted(indices))  # the other samples come back incomplete

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
        """End the partial samples of a group that have no room for another token."""
        samples = self._groups[group_id].samples
        for k, sample in enumerate(samples):
            is_partial = sample.finish_reason == PARTIAL and len(sample.response_ids) > 0
            if is_partial and self._room(group_id, sample) < 1:
                samples[k] = dataclasses.replace(sample, finish_reason="length")
                finish_samples()

    def _requests(self) -> dict[tuple[int, int], Request]:
        """Return the requests for all incomplete samples, by (group id, index of the sample)."""
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
    """Return the sampling parameters with which the engine adds at most `room` tokens to a sample
    that already has `num_done` generated tokens."""
    if not num_done:
        return sampling  # unchanged, so that the engine refuses a prompt that is too long
    rest = dataclasses.replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_done,
        min_new_tokens=max(0, sampling.min_new_tokens - num_done),
    )
    return rest.at_most(room)


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
    """Return the sample with the completion appended to its tokens."""
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
