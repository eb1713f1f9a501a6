"""Concurrent calls of generate(), also when weights change while they are open.

The first request of a call is short: when it comes back, the others are in the middle.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollout_helpers import (
    TOLERANCE,
    follows_seeds,
    load_oracle,
    make_buckets,
    make_prompts,
    make_requests,
    score,
    slow_steps,
    trace_of,
)

from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.engines.base import SamplingParams
from mrl.engines.sglang import in_flight
from mrl.types import UNKNOWN_VERSION
from tests.release import release

LONG = 300
SCALE = 1.1
"""Of the new weights to the old ones."""
PROMPT_LEN = 20


@pytest.fixture(scope="module")
def new_weights(toy_weights):
    return [(name, tensor * SCALE) for name, tensor in toy_weights]


@pytest.fixture(scope="module")
def new_oracle(toy_folder, tmp_path_factory):
    """The folder's own tensors: those of `toy_weights` may be parts of them (gpt-oss)."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("new")
    for file in toy_folder.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
        elif file.suffix == ".safetensors":
            scaled = {name: tensor * SCALE for name, tensor in load_file(file).items()}
            save_file(scaled, folder / file.name, {"format": "pt"})
    return load_oracle(folder)


@pytest.fixture
def start(engine):
    """Starts calls beside each other; they are left, and the engine runs, when the test is over."""
    started = []

    def one(requests, **options):
        started.append(engine.endpoint.generate(requests, concurrent=True, **options))
        return started[-1]

    yield one
    for running in started:
        running.close()
    if "paused" in engine.state:
        engine.resume()


def make_call(name, num, *, length=LONG):
    """Return requests of one call: a short one and `num` long ones."""
    seed = 10 + len(name)
    short = make_requests(1, SamplingParams(8, 8), seed=seed)
    long = make_requests(num, SamplingParams(length, length), seed=seed + 100)
    requests = [*short, *long]
    return [dataclasses.replace(r, request_id=f"{name} {k}") for k, r in enumerate(requests)]


def update(engine, weights, version, mode):
    engine.pause(mode)
    engine.endpoint.update_weights(make_buckets(weights, version), version)
    engine.resume()


def spans(found):
    return [(span.version, span.start, span.end) for span in found]


def difference(oracle, request, completion):
    """|log-prob - transformers'| of each token."""
    ids = torch.cat([request.token_ids, completion.output_ids])
    logprobs, _ = score(oracle, ids, len(request.token_ids), 1.0)
    return (completion.logprobs - logprobs).abs()


@follows_seeds
@pytest.mark.parametrize("length", [24, release(200)])
def test_two_threads_get_what_each_would_get_alone(engine, start, oracle, length):
    """The same tokens, and log-probs up to the rounding of other batches."""
    calls = [make_call("a", 4, length=length), make_call("bb", 4, length=length)]
    alone = [{c.request_id: c for c in engine.endpoint.generate(requests)} for requests in calls]

    def run(requests):
        return {c.request_id: c for c in start(requests)}

    with ThreadPoolExecutor(2) as pool:
        beside = list(pool.map(run, calls))
    for requests, expected, found in zip(calls, alone, beside, strict=True):
        assert found.keys() == expected.keys()
        for request in requests:
            completion = found[request.request_id]
            assert torch.equal(completion.output_ids, expected[request.request_id].output_ids)
            assert difference(oracle, request, completion).max() < TOLERANCE
            end = PROMPT_LEN + len(completion.output_ids)
            assert spans(completion.weight_versions) == [(0, PROMPT_LEN, end)]
            if trace := trace_of(completion):
                assert spans(trace.row_versions) == [(0, 0, end - 1)]
    # What runs alone starts with an empty cache, so the bits are those of before.
    again = {c.request_id: c for c in engine.endpoint.generate(calls[0])}
    for name, completion in alone[0].items():
        assert torch.equal(again[name].logprobs, completion.logprobs)


def test_what_is_refused_while_calls_are_open(engine, start, toy_weights):
    with slow_steps():
        one = start(make_call("a", 2))
        next(one)
        two = start(make_call("bb", 1))
        next(two)
        with pytest.raises(
            RuntimeError, match=r"update_weights: .* generating, .*; pause\(\) it first"
        ):
            engine.endpoint.update_weights(make_buckets(toy_weights, 1), 1)
        for ask in (engine.sleep, lambda: engine.endpoint.sequence_logprobs([torch.arange(4)])):
            with pytest.raises(
                RuntimeError, match=r"the engine is .* generating, .* leave generate\(\)"
            ):
                ask()
        with pytest.raises(RuntimeError, match=r"generate: the engine is .* generating"):
            engine.endpoint.generate(make_call("ccc", 1))
        # An abort reaches the call that has the request, and no other.
        engine.endpoint.abort(["bb 1"])
        assert [c.finish_reason for c in two] == ["abort"]
        engine.endpoint.abort(["a 1"])
    ends = {c.request_id: (c.finish_reason, len(c.output_ids)) for c in one}
    assert ends["a 2"] == ("length", LONG)
    assert ends["a 1"][0] == "abort"


@pytest.mark.release
def test_a_call_that_ends_does_not_resume_the_others(engine, start, new_weights):
    one = start(make_call("a", 2))
    two = start(make_call("bb", 2))
    with slow_steps():
        next(one)
        next(two)
        engine.pause()
    two.close()
    assert "paused, generating" in engine.state
    engine.endpoint.update_weights(make_buckets(new_weights, 1), 1)
    with pytest.raises(ValueError, match="version 1 is in the prefix cache or in flight already"):
        engine.endpoint.update_weights(make_buckets(new_weights, 1), 1)
    engine.resume()
    for completion in one:
        assert [span.version for span in completion.weight_versions] == [0, 1]
    with pytest.raises(RuntimeError, match=r"resume: .* pause\(\) it first"):
        engine.resume()


@pytest.mark.release
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_updates_under_two_calls(engine, start, oracle, new_oracle, new_weights, toy_weights, mode):
    """Two updates in one request: its spans say so, and no new request reads an older prefix."""
    calls = [make_call("a", 3), make_call("bb", 3)]
    running = [start(requests) for requests in calls]
    middle = make_call("ccc", 1)
    with slow_steps():
        for completions in running:
            next(completions)
        update(engine, new_weights, 1, mode)
        late = start(middle)
        next(late)
        update(engine, toy_weights, 2, mode)
    for requests, completions in zip([*calls, middle], [*running, late], strict=True):
        by_id = {r.request_id: r for r in requests}
        for completion in completions:
            tokens, trace = spans(completion.weight_versions), trace_of(completion)
            rows = spans(trace.row_versions) if trace else None
            versions = [1, 2] if requests is middle else [0, 1, 2]
            assert [version for version, _, _ in tokens] == versions
            last = tokens[-1][1]
            if mode == "retract":
                assert rows in (
                    None,
                    [
                        (UNKNOWN_VERSION, 0, last - 1),
                        (2, last - 1, PROMPT_LEN + LONG - 1),
                    ],
                )
                assert completion.num_retractions >= len(versions) - 1
            else:
                assert rows in (
                    None,
                    [(v, max(0, a - 1) * (k > 0), b - 1) for k, (v, a, b) in enumerate(tokens)],
                )
            apart = difference(oracle, by_id[completion.request_id], completion)
            if versions[0] == 0:
                assert apart[: tokens[0][2] - PROMPT_LEN].max() < TOLERANCE
            # Version 2 has the weights of 0. Computed anew, its tokens are those of one model from the
            # first token on; with the old keys and values they are not.
            is_anew = apart[last - PROMPT_LEN :].max() < TOLERANCE
            assert is_anew == (mode == "retract")
    again = [dataclasses.replace(calls[0][1], sampling=SamplingParams(8, 8))]
    (fresh,) = start(again)
    # In place the old prompt stays under the key of 0; taken back, the prompt was computed by 2.
    num_cached = PROMPT_LEN - 1 if mode == "retract" else 0
    if trace := trace_of(fresh):
        assert trace.num_cached_rows == num_cached
        assert spans(trace.row_versions) == [(2, 0, 27)]
    assert difference(oracle, again[0], fresh).max() < TOLERANCE
    (warm,) = start(again)
    if trace := trace_of(warm):
        assert trace.num_cached_rows == PROMPT_LEN - 1
        assert spans(trace.row_versions) == [(2, 0, 27)]
    stale = [dataclasses.replace(again[0], request_id="stale")]
    engine.pause()
    engine.endpoint.update_weights(make_buckets(new_weights, 3), 3)
    engine.resume()
    (fresh,) = start(stale)
    if trace := trace_of(fresh):
        assert trace.num_cached_rows == 0
    assert difference(new_oracle, stale[0], fresh).max() < TOLERANCE


@pytest.mark.release
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_that_wait_through_an_update_read_no_older_prefix(
    engine, start, new_oracle, new_weights, mode
):
    """40 requests of one prompt, for which the cache has no room: those that begin after the update
    compute the prompt anew, though version 0 has left it in the cache."""
    first, second = make_call("a", 1, length=150)
    same = [dataclasses.replace(second, request_id=f"wait {k}", seed=k) for k in range(40)]
    running = start([first, *same])
    with slow_steps():
        next(running)
        update(engine, new_weights, 1, mode)
    waited = 0
    for completion in running:
        if [span.version for span in completion.weight_versions] != [1]:
            continue
        waited += 1
        request = next(r for r in same if r.request_id == completion.request_id)
        assert difference(new_oracle, request, completion).max() < TOLERANCE
        if trace := trace_of(completion):
            assert spans(trace.row_versions)[-1][0] == 1
        if not completion.num_retractions and (trace := trace_of(completion)):
            assert spans(trace.row_versions)[0] == (UNKNOWN_VERSION, 0, PROMPT_LEN - 1)
    assert waited


@pytest.mark.parametrize("planted", [release("marked"), "refused"])
def test_a_stale_prefix_does_not_pass_for_new_weights(
    engine, start, new_weights, monkeypatch, planted
):
    """The cache gives a new request what older weights computed, since there are no keys."""
    running = start(make_call("a", 1), stale_prefixes=planted == "marked")
    if planted == "refused":  # mrl believes that there are keys
        monkeypatch.setattr(in_flight, "version_key", lambda *_: None)
    with slow_steps():
        next(running)
        update(engine, new_weights, 1, "in_place")
        engine.endpoint.abort()
    list(running)
    again = [dataclasses.replace(make_call("a", 1)[0], request_id="again")]
    if planted == "refused":
        with pytest.raises(
            RuntimeError, match=r"again: 19 tokens came from the prefix cache, .* older"
        ):
            list(start(again))
        return
    (stale,) = start(again, stale_prefixes=True)
    if trace := trace_of(stale):
        assert trace.num_cached_rows == PROMPT_LEN - 1
        assert spans(trace.row_versions) == [(UNKNOWN_VERSION, 0, 19), (1, 19, 27)]


@pytest.mark.release
def test_a_wrong_stamp_is_refused(engine, start, toy_weights):
    """The server says another version than was pushed."""
    running = start(make_call("a", 1))
    with slow_steps():
        next(running)
        engine.connection.post(
            "/update_weight_version", {"new_version": "7", "abort_all_requests": False}
        )
    with pytest.raises(RuntimeError, match="sampled with weight version 7, expected 0"):
        list(running)


@pytest.mark.release
def test_rollouts_that_share_an_engine(engine, oracle):
    """Each of two threads wants one group of two; its abort of the rest leaves the other's alone."""
    sampling = SamplingParams(64, 64)

    def run(seed):
        groups = start_groups(make_prompts(2, seed=seed), 2, 10 * seed)
        shared = {"concurrent": True}
        rollout = SingleTurnRollout(groups, sampling, seed, num_wanted=1, options=shared)
        return list(rollout.finished(engine.endpoint)), rollout.partial

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (1, 2)))
    for groups, partial in found:
        assert (len(groups), len(partial)) == (1, 1)
        for sample in groups[0].samples:
            assert sample.num_generated == 64
            logprobs, _ = score(oracle, sample.token_ids, PROMPT_LEN, 1.0)
            assert (sample.rollout_logprobs[PROMPT_LEN:] - logprobs).abs().max() < TOLERANCE
