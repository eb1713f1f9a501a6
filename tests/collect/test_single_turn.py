"""A rollout in one turn: samples that are whole before their group, and requests beside others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
import torch

from mrl.collect.single_turn import SingleTurnRollout, _continued, start_groups
from mrl.engines.base import Completion, EngineLost, Request, RolloutEngine, SamplingParams
from mrl.types import SampleGroup, VersionSpan
from tests.sample_groups import PROMPT_LEN, prompt


class Answers:
    """An engine that answers two tokens to requests in the order that is given, and is lost then."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self.asked: list[list[Request]] = []
        self.options: list[dict[str, bool]] = []
        self.aborted: list[list[str]] = []

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        self.asked.append(list(requests))
        self.options.append(options)
        for place in self.order:
            spans = (VersionSpan(0, PROMPT_LEN, PROMPT_LEN + 2),)
            tokens = torch.tensor([place, place])
            rid = requests[place].request_id
            yield Completion(rid, tokens, torch.zeros(2), "stop", spans, None)
        raise EngineLost("gone")

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.append(list(request_ids))


def test_samples_that_are_whole_before_their_group_are_told_and_not_asked_for_again() -> None:
    told: list[tuple[int, list[int]]] = []

    def on_sample(group: SampleGroup, k: int) -> None:
        told.append((k, group.samples[k].response_ids.tolist()))

    groups = start_groups([prompt(0)], 3)
    rollout = SingleTurnRollout(groups, SamplingParams(4), 0, on_sample=on_sample)
    first, second = Answers([2, 0]), Answers([0])
    found: list[SampleGroup] = []
    for engine in (first, second):
        try:
            found += rollout.finished(cast(RolloutEngine, engine))
        except EngineLost:
            continue
    assert told == [(2, [2, 2]), (0, [0, 0])]  # the last one comes with the group
    assert [len(asked) for engine in (first, second) for asked in engine.asked] == [3, 1]
    assert rollout.is_over
    (group,) = found
    assert [s.response_ids.tolist() for s in group.samples] == [[0, 0], [0, 0], [2, 2]]


def test_a_partial_sample_without_room_is_cut_off_and_says_so() -> None:
    """A run may continue with shorter answers, or with a shorter context."""

    def begun() -> list[SampleGroup]:
        groups = start_groups([prompt(0)], 2)
        spans = (VersionSpan(0, PROMPT_LEN, PROMPT_LEN + 2),)
        for k, sample in enumerate(groups[0].samples):
            rid = f"{k}"
            part = Completion(rid, torch.tensor([1, 2]), torch.zeros(2), "abort", spans, None)
            groups[0].samples[k] = _continued(sample, part)
        return groups

    for room in ({"sampling": SamplingParams(2)}, {"context_len": PROMPT_LEN + 2}):
        rollout = SingleTurnRollout(begun(), seed=0, **{"sampling": SamplingParams(9), **room})
        (group,) = rollout.finished(cast(RolloutEngine, Answers([])))
        assert [s.finish_reason for s in group.samples] == ["length", "length"]
        assert [s.response_ids.tolist() for s in group.samples] == [[1, 2], [1, 2]]
    engine = Answers([0, 1])
    rollout = SingleTurnRollout(begun(), SamplingParams(9), 0, context_len=PROMPT_LEN + 5)
    with suppress(EngineLost):
        list(rollout.finished(cast(RolloutEngine, engine)))
    assert [request.sampling.max_new_tokens for request in engine.asked[0]] == [3, 3]


@pytest.mark.parametrize("options", [{}, {"concurrent": True, "stale_prefixes": True}])
def test_a_rollout_that_is_over_ends_its_own_requests_alone(options: dict[str, bool]) -> None:
    """Other callers may share the engine, so nothing ends all of its requests."""
    groups = start_groups([prompt(0), prompt(1), prompt(2)], 2)
    engine = Answers([0, 2, 1, 3])
    rollout = SingleTurnRollout(groups, SamplingParams(4), 0, num_wanted=1, options=options)
    found: list[SampleGroup] = []
    with suppress(EngineLost):
        found += rollout.finished(cast(Any, engine))
    assert [group.prompt.prompt_id for group in found] == ["0"]
    names = [request.request_id for request in engine.asked[0]]
    assert engine.options == [options]
    assert engine.aborted == [names[3:]]
    assert len(rollout.partial) == 2
