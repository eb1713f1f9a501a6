"""Groups of samples with common prompts, as an engine with a prefix cache returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mrl.types import Sample
from tests.parallel.conftest import EXPERTS, VOCAB, make_sample


def make_groups(
    prompt_lens: Sequence[int] = (13, 9),
    responses: Sequence[int] = (5, 9, 4, 7),
    seed: int = 0,
    vocab: int = VOCAB,
) -> list[Sample]:
    """One group per prompt, with one sample per response. Tokens and routes of the prompt are equal,
    except the route of its last token."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for group_id, prompt_len in enumerate(prompt_lens):
        first = make_sample(generator, prompt_len + responses[0], prompt_len, group_id)
        samples.append(first)
        for length in responses[1:]:
            one = make_sample(generator, prompt_len + length, prompt_len, group_id)
            samples.append(with_prefix(one, first, prompt_len))
    return [dataclasses.replace(s, token_ids=s.token_ids % vocab) for s in samples]


def with_prefix(sample: Sample, other: Sample, num_tokens: int) -> Sample:
    """Return the sample with the first tokens of another one, and the routes of all of these tokens
    but the last."""
    tokens = sample.token_ids.clone()
    tokens[:num_tokens] = other.token_ids[:num_tokens]
    assert sample.routing is not None
    assert other.routing is not None
    routes = sample.routing.expert_ids.clone()
    routes[: num_tokens - 1] = other.routing.expert_ids[: num_tokens - 1]
    trace = dataclasses.replace(sample.routing, expert_ids=routes)
    return dataclasses.replace(sample, token_ids=tokens, routing=trace)


def with_route(sample: Sample, row: int) -> Sample:
    """Return the sample with other experts in one row of one layer."""
    assert sample.routing is not None
    routes = sample.routing.expert_ids.clone()
    routes[row, -1] = (routes[row, -1] + 1) % EXPERTS
    trace = dataclasses.replace(sample.routing, expert_ids=routes)
    return dataclasses.replace(sample, routing=trace)


def with_token(sample: Sample, place: int) -> Sample:
    """Return the sample with another token at one place."""
    tokens = sample.token_ids.clone()
    tokens[place] = (tokens[place] + 1) % VOCAB
    return dataclasses.replace(sample, token_ids=tokens)


def make_mixed_groups() -> list[Sample]:
    """Three groups: a plain one; one in which a route, in the last layer alone, and a token split a
    sample off; and a conversation with a branch that has none of the common answer in its loss."""
    samples = make_groups((30, 21, 25), (5, 9, 4, 7))
    samples[5] = with_route(samples[5], 11)
    samples[6] = with_token(samples[6], 14)
    first = samples[9]  # 34 tokens, of which the last 9 are in the loss
    samples[10] = with_prefix(samples[10], first, 28)  # the same first 3 tokens of the answer
    samples[11] = as_branch(first, samples[11], 31)
    return samples


def as_branch(sample: Sample, other: Sample, num_tokens: int) -> Sample:
    """Return a sample that continues the first tokens of another one as its prompt."""
    generator = torch.Generator().manual_seed(num_tokens)
    branch = make_sample(generator, num_tokens + 4, num_tokens, other.group_id)
    return with_prefix(branch, sample, num_tokens)
