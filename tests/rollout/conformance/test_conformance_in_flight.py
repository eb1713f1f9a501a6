"""What abort(), pause() and resume() owe while requests are in flight.

The first request is short: when it comes back, the others are in the middle.
"""

from __future__ import annotations

import pytest
import torch
from rollout_helpers import (
    TOLERANCE,
    follows_seeds,
    make_buckets,
    make_requests,
    score,
    slow_steps,
    trace_of,
)

from mrl.engines.base import SamplingParams
from mrl.types import UNKNOWN_VERSION

LONG = 120


@pytest.fixture
def requests():
    return [
        *make_requests(1, SamplingParams(8, 8), seed=1),
        *make_requests(5, SamplingParams(LONG, LONG), seed=2),
    ]


@pytest.fixture(scope="module")
def new_weights(toy_weights):
    return [(name, tensor * 1.1) for name, tensor in toy_weights]


def test_abort(engine, requests, oracle):
    running = engine.endpoint.generate(requests)
    with slow_steps():
        assert next(running).request_id == "1-0"
        with pytest.raises(RuntimeError, match="sleep: the engine is awake, generating"):
            engine.sleep()
        engine.endpoint.abort(["2-0", "2-3"])
    rest = {c.request_id: c for c in running}
    assert rest.keys() == {f"2-{i}" for i in range(5)}
    for i in range(5):
        completion = rest[f"2-{i}"]
        assert completion.finish_reason == ("abort" if i in (0, 3) else "length")
        assert (len(completion.output_ids) < LONG) == (i in (0, 3))
        assert len(completion.output_ids) >= 8
        ids = torch.cat([requests[1 + i].token_ids, completion.output_ids])
        logprobs, routes = score(oracle, ids, 20, 1.0)
        assert (completion.logprobs - logprobs).abs().max() < TOLERANCE
        if trace := trace_of(completion):
            assert torch.equal(trace.expert_ids.long().sort(-1).values, routes.sort(-1).values)


def test_abort_of_what_still_waits(engine):
    """More than the cache has room for: some have not begun when all are told to end."""
    many = [
        *make_requests(1, SamplingParams(8, 8), seed=1),
        *make_requests(40, SamplingParams(300, 300), seed=3),
    ]
    running = engine.endpoint.generate(many)
    with slow_steps():
        next(running)
        engine.endpoint.abort()
    lengths = [len(c.output_ids) for c in running if c.finish_reason == "abort"]
    assert len(lengths) == 40
    assert min(lengths) == 0 < max(lengths)


@follows_seeds
def test_leaving_early_leaves_nothing_running(engine, requests):
    (whole,) = engine.endpoint.generate(requests[:1])
    running = engine.endpoint.generate(requests)
    with slow_steps():
        next(running)
        running.close()
    (again,) = engine.endpoint.generate(requests[:1])
    assert torch.equal(again.output_ids, whole.output_ids)
    running = engine.endpoint.generate(requests)
    with slow_steps():
        next(running)
        engine.endpoint.abort()
    assert {c.finish_reason for c in running} == {"abort"}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_update_in_mid_flight(engine, requests, oracle, new_weights, mode):
    """Each token says which weights made it, and each row of routes which weights chose it."""
    running = engine.endpoint.generate(requests)
    with slow_steps():
        next(running)
        with pytest.raises(
            RuntimeError, match=r"update_weights: .* generating, .*; pause\(\) it first"
        ):
            engine.endpoint.update_weights(make_buckets(new_weights, 1), 1)
        engine.pause(mode)
    engine.endpoint.update_weights(make_buckets(new_weights, 1), 1)
    engine.resume()
    completions = list(running)
    assert len(completions) == 5
    for completion in completions:
        request = next(r for r in requests if r.request_id == completion.request_id)
        old, new = completion.weight_versions
        assert (old.version, old.start, new.version, new.end) == (0, 20, 1, 20 + LONG)
        assert old.end == new.start > 20
        split = old.end - 20
        ids = torch.cat([request.token_ids, completion.output_ids])
        before, old_routes = score(oracle, ids, 20, 1.0)
        assert (completion.logprobs - before)[:split].abs().max() < TOLERANCE
        if mode == "in_place":
            assert (completion.logprobs - before)[split:].abs().max() > 1e-3
        if not (trace := trace_of(completion)):
            continue
        routes, versions = trace.expert_ids.long().sort(-1).values, trace.row_versions
        if mode == "retract":
            # What is read from the cache and what is computed anew, SGLang does not say.
            assert [(s.version, s.end) for s in versions] == [
                (UNKNOWN_VERSION, old.end - 1),
                (1, 19 + LONG),
            ]
        else:
            assert [(s.version, s.end) for s in versions] == [(0, old.end - 1), (1, 19 + LONG)]
            rows = slice(0, old.end - 1)
            assert torch.equal(routes[rows], old_routes.sort(-1).values[rows])


def test_rows_of_an_old_cache_say_so(engine, requests, new_weights):
    """SGLang keeps its prefix cache through an update in mid-flight: later readers must be told."""
    running = engine.endpoint.generate(requests)
    with slow_steps():
        next(running)
        engine.pause("in_place")
    engine.endpoint.update_weights(make_buckets(new_weights, 1), 1)
    engine.resume()
    list(running)
    (stale,) = engine.endpoint.generate(requests[:1], reuse_cache=True)
    if trace := trace_of(stale):
        spans = [(s.version, s.start, s.end) for s in trace.row_versions]
        assert trace.num_cached_rows > 0
        assert spans == [(UNKNOWN_VERSION, 0, 19), (1, 19, 27)]  # of 0 or of 1
    (fresh,) = engine.endpoint.generate(requests[:1])
    if trace := trace_of(fresh):
        assert [s.version for s in trace.row_versions] == [1]
