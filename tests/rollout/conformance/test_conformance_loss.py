"""What an engine owes that dies in the middle: to say so, to leave nothing, and to come back."""

from __future__ import annotations

import psutil
import pytest
import torch
from rollout_helpers import (
    follows_seeds,
    generate,
    make_buckets,
    make_prompts,
)

from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.engines.base import EngineLost, SamplingParams

SAMPLING = SamplingParams(100)
"""No minimum length is set, so groups finish one after the other."""


def running(tree):
    """Leave out zombies: a container's first process may not reap them."""
    return [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@follows_seeds
def test_no_sample_is_lost_or_doubled(engine, toy_weights):
    """Killed after the first group: the rest comes from another engine, token for token."""
    prompts = make_prompts(8, seed=5)
    calm = generate(engine, prompts, samples_per_prompt=2, sampling=SAMPLING, seed=1)
    first = psutil.Process(engine.process_id)
    before = [first, *first.children(recursive=True)]
    rollout = SingleTurnRollout(start_groups(prompts, 2), SAMPLING, 1)
    groups = []
    finished = rollout.finished(engine.endpoint)
    groups.append(next(finished))
    for process in before:
        process.kill()
    with pytest.raises(EngineLost):
        groups.extend(finished)  # keeps what comes before the error
    assert not running(before)
    assert groups
    assert len(groups) + len(rollout.partial) == 8
    for ask in (engine.wake, engine.sleep, lambda: engine.endpoint.generate([])):
        with pytest.raises(EngineLost, match=r"the engine is stopped; start\(\) it first"):
            ask()
    assert engine.endpoint.weight_version is None
    engine.start()
    assert engine.endpoint.weight_version == 0
    engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    groups += rollout.finished(engine.endpoint)
    assert not rollout.partial
    groups.sort(key=lambda group: group.samples[0].group_id)
    for group, undisturbed in zip(groups, calm, strict=True):
        assert group.prompt is undisturbed.prompt
        for sample, other in zip(group.samples, undisturbed.samples, strict=True):
            assert torch.equal(sample.token_ids, other.token_ids)
