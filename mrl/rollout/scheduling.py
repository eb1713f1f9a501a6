"""From prompts to sample groups: which requests an engine gets, and what becomes of its completions.

A group is work in progress until each of its G samples is whole. Such a group is a `SampleGroup` as
well: a sample that has not finished says `abort` and holds the tokens so far, maybe the prompt alone.

T all tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from mrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, sample_seed
from mrl.types import Prompt, Sample, SampleGroup

UNFINISHED = "abort"


def start_groups(
    prompts: Sequence[Prompt], samples_per_prompt: int, first_group_id: int = 0
) -> list[SampleGroup]:
    """One group a prompt without a single token generated; group i has id `first_group_id + i`."""
    return [
        SampleGroup(prompt, [_empty_sample(first_group_id + i, prompt)] * samples_per_prompt)
        for i, prompt in enumerate(prompts)
    ]


def is_finished(group: SampleGroup) -> bool:
    """Whether every sample of the group is whole."""
    return all(sample.finish_reason != UNFINISHED for sample in group.samples)


class Round:
    """One engine's share of a step. `finished()` may be called again with another engine."""

    def __init__(self, groups: Sequence[SampleGroup], sampling: SamplingParams, seed: int) -> None:
        """Sample k of a prompt is drawn with `sample_seed(seed, prompt_id, k)`, whatever happens."""
        self._groups = {group.samples[0].group_id: group for group in groups}
        self._sampling = sampling
        self._seed = seed

    @property
    def unfinished(self) -> list[SampleGroup]:
        """Groups that finished() has not yielded, with what they have so far."""
        return list(self._groups.values())

    def finished(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        """Groups as they become whole. Raises as generate() does; `unfinished` is right after that."""
        requests = self._requests()
        places = {request.request_id: place for place, request in requests.items()}
        for completion in engine.generate(list(requests.values())):
            group_id, index = places[completion.request_id]
            group = self._groups[group_id]
            group.samples[index] = _continued(group.samples[index], completion)
            if is_finished(group):
                del self._groups[group_id]
                yield group

    def _requests(self) -> dict[tuple[int, int], Request]:
        """By (group id, number of the sample): what is still to be generated."""
        requests = {}
        for group_id, group in self._groups.items():
            for k, sample in enumerate(group.samples):
                if sample.finish_reason != UNFINISHED:
                    continue
                requests[group_id, k] = Request(
                    request_id=f"{group.prompt.source} sample {k}",
                    token_ids=sample.token_ids,
                    seed=sample_seed(self._seed, group.prompt.prompt_id, k),
                    sampling=self._sampling,
                )
        return requests


def _empty_sample(group_id: int, prompt: Prompt) -> Sample:
    num_tokens = prompt.token_ids.numel()
    return Sample(
        group_id=group_id,
        token_ids=prompt.token_ids,
        prompt_len=num_tokens,
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(num_tokens),
        weight_versions=(),
        finish_reason=UNFINISHED,
    )


def _continued(sample: Sample, completion: Completion) -> Sample:
    """The sample with the completion of its tokens so far."""
    num_new = completion.output_ids.numel()
    if not num_new:
        return dataclasses.replace(sample, finish_reason=completion.finish_reason)
    return dataclasses.replace(
        sample,
        token_ids=torch.cat([sample.token_ids, completion.output_ids]),
        loss_mask=torch.cat([sample.loss_mask, torch.ones(num_new, dtype=torch.bool)]),
        rollout_logprobs=torch.cat([sample.rollout_logprobs, completion.logprobs]),
        weight_versions=(*sample.weight_versions, *completion.weight_versions),
        finish_reason=completion.finish_reason,
        routing=completion.routing,
    )
