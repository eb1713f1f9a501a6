"""What generate() and sequence_logprobs() owe, against transformers as the oracle.

Bugs that others shipped are named where they would show (../shared/facts/routing_replay.md).
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollout_helpers import (
    TOLERANCE,
    follows_seeds,
    generate,
    make_prompts,
    make_requests,
    moe_layers,
    score,
    trace_of,
)
from transformers import AutoTokenizer

from mrl.engines.base import Request, SamplingParams
from mrl.types import VersionSpan
from tests.release import release

EOS = 98


def check_completion(oracle, request, completion, temperature=1.0, least=0):
    """Log-probs and every row of routes are those of the model."""
    ids = torch.cat([request.token_ids, completion.output_ids])
    logprobs, routes = score(oracle, ids, len(request.token_ids), temperature, least)
    assert (completion.logprobs - logprobs).abs().max() < TOLERANCE
    if trace := trace_of(completion):
        assert trace.layer_numbers == moe_layers(oracle)
        assert trace.expert_ids.dtype == torch.uint8
        # All rows but the last token's: neither the prompt's last (sglang 20964) nor any other is lost
        # (ms-swift 9799), zero (sglang 23885) or another's (sglang 26975).
        assert torch.equal(trace.expert_ids.long().sort(-1).values, routes.sort(-1).values)


@pytest.mark.parametrize("temperature", [release(1.0), 0.7])
def test_logprobs_and_routes_equal_transformers(engine, oracle, temperature):
    requests = make_requests(8, SamplingParams(32, temperature=temperature))
    completions = {c.request_id: c for c in engine.endpoint.generate(requests)}
    assert completions.keys() == {r.request_id for r in requests}
    for request in requests:
        completion = completions[request.request_id]
        check_completion(oracle, request, completion, temperature)
        end = 20 + len(completion.output_ids)
        assert completion.weight_versions == (VersionSpan(0, 20, end),)
        if trace := trace_of(completion):
            assert trace.row_versions == (VersionSpan(0, 0, end - 1),)


def test_routes_of_cached_prefixes(engine, oracle):
    """Rows that the prefix cache filled are counted, and are the model's (sglang 26975)."""
    first = make_requests(2, SamplingParams(8, 8))
    done = {c.request_id: c for c in engine.endpoint.generate(first)}
    longer = [
        Request(
            r.request_id, torch.cat([r.token_ids, done[r.request_id].output_ids]), 7, r.sampling
        )
        for r in first
    ]
    for completion in engine.endpoint.generate(longer, reuse_cache=True):
        request = next(r for r in longer if r.request_id == completion.request_id)
        if trace := trace_of(completion):
            assert trace.num_cached_rows >= 20
        check_completion(oracle, request, completion)
    for completion in engine.endpoint.generate(longer[:1]):
        if trace := trace_of(completion):
            assert trace.num_cached_rows == 0


def test_long_prompts(engine, oracle):
    """More prompt tokens at once than a prefill chunk usually holds (sglang 26860)."""
    requests = make_requests(8, SamplingParams(4, 4), num_tokens=500)
    for completion in engine.endpoint.generate(requests):
        request = next(r for r in requests if r.request_id == completion.request_id)
        check_completion(oracle, request, completion)


def test_routes_after_want_of_memory(engine, oracle):
    """A request that the engine took back and computed anew says so (miles 3277)."""
    # Not of one exact length: SGLang would reserve all of it, and take none back.
    requests = make_requests(32, SamplingParams(160, 159))
    completions = list(engine.endpoint.generate(requests))
    assert len(completions) == 32
    retracted = [c for c in completions if c.num_retractions]
    assert retracted
    others = [c for c in completions if not c.num_retractions]
    assert others
    for completion in [*retracted[:6], *others[:4]]:
        request = next(r for r in requests if r.request_id == completion.request_id)
        # SGLang counts the tokens before a retraction no more: the last one cannot be the end, too.
        least = 160 if completion.num_retractions else 159
        check_completion(oracle, request, completion, least=least)
        if trace := trace_of(completion):
            assert bool(trace.num_recomputed_rows) == bool(completion.num_retractions)


def test_score_equals_transformers(engine, oracle):
    sequences = [p.token_ids for p in make_prompts(3, num_tokens=40)]
    last = oracle.config.vocab_size - 1  # an id that SGLang reports under another name
    sequences.append(torch.tensor([last, 5, last, 0, last, 7]))
    for sequence, got in zip(sequences, engine.endpoint.sequence_logprobs(sequences), strict=True):
        expected, _ = score(oracle, sequence, 1, 1.0)
        assert got[0] == 0
        assert (got[1:] - expected).abs().max() < TOLERANCE
    (completion,) = engine.endpoint.generate(make_requests(1, SamplingParams(2, 2), num_tokens=40))
    if trace := trace_of(completion):
        assert trace.num_cached_rows == 0


@follows_seeds
def test_seeds(engine):
    prompts = make_prompts(2)

    def tokens(seed):
        groups = generate(
            engine, prompts, samples_per_prompt=4, sampling=SamplingParams(16, 16), seed=seed
        )
        return [tuple(s.response_ids.tolist()) for g in groups for s in g.samples]

    first = tokens(1)
    assert len(set(first)) == 8
    assert tokens(1) == first
    assert not set(tokens(2)) & set(first)


@follows_seeds
def test_a_continued_request_goes_on_as_it_would_have(engine):
    """A token is a function of the weights, what is before it, and the seed."""
    (request,) = make_requests(1, SamplingParams(24, 24))
    (whole,) = engine.endpoint.generate([request])
    half = Request(
        "half", torch.cat([request.token_ids, whole.output_ids[:10]]), 0, SamplingParams(14, 14)
    )
    (rest,) = engine.endpoint.generate([half])
    assert torch.equal(rest.output_ids, whole.output_ids[10:])


def test_end_of_sequence_belongs_to_the_response(engine):
    groups = generate(
        engine, make_prompts(8), samples_per_prompt=8, sampling=SamplingParams(32), seed=3
    )
    samples = [sample for group in groups for sample in group.samples]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert stopped
    assert len(stopped) < len(samples)
    for sample in samples:
        ends = (sample.response_ids == EOS).nonzero().flatten().tolist()
        if sample.finish_reason == "stop":
            assert ends == [len(sample.response_ids) - 1]
            assert sample.loss_mask[-1]
            assert sample.rollout_logprobs[-1] < 0
        else:
            assert ends == []
            assert len(sample.response_ids) == 32


def test_lengths_stop_tokens_and_top_p(engine):
    prompts = make_prompts(8)

    def lengths(sampling):
        groups = generate(engine, prompts, samples_per_prompt=8, sampling=sampling, seed=3)
        return {len(s.response_ids) for g in groups for s in g.samples}

    assert lengths(SamplingParams(16, 16)) == {16}
    assert min(lengths(SamplingParams(16))) < 16
    assert 4 <= min(lengths(SamplingParams(16, min_new_tokens=4))) < 16
    stop = tuple(range(40))
    completions = list(
        engine.endpoint.generate(make_requests(16, SamplingParams(32, stop_token_ids=stop)))
    )
    assert all(c.output_ids[-1] in (*stop, EOS) for c in completions if c.finish_reason == "stop")
    assert all(c.output_ids[:-1].min() >= 40 for c in completions if len(c.output_ids) > 1)
    # A nucleus of almost nothing is greedy, whatever the seed.
    narrow = SamplingParams(8, 8, top_p=1e-6)
    a, b = (
        generate(engine, prompts[:8], samples_per_prompt=1, sampling=narrow, seed=s) for s in (1, 2)
    )
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left.samples[0].token_ids, right.samples[0].token_ids)


@follows_seeds
def test_the_k_likeliest_and_log_probs_of_the_whole_distribution(engine, oracle):
    (request,) = make_requests(1, SamplingParams(12, 12, top_k=1))
    other = dataclasses.replace(request, request_id="other", seed=99)
    first, second = engine.endpoint.generate([request, other])
    assert torch.equal(first.output_ids, second.output_ids)
    check_completion(oracle, request, first)  # of the one token that is left it would be 0
    once = SamplingParams(1, 1, top_k=3)
    many = [
        dataclasses.replace(request, request_id=str(i), seed=i, sampling=once) for i in range(64)
    ]
    drawn = {int(completion.output_ids[0]) for completion in engine.endpoint.generate(many)}
    logits = oracle(request.token_ids[None]).logits[0, -1]
    assert drawn == set(logits.topk(3).indices.tolist())


@follows_seeds
def test_a_stop_text_belongs_to_the_response(engine, oracle, toy_folder):
    """The tokens that it matches are kept, with log-probs and routes, and nothing follows them."""
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    requests = make_requests(16, SamplingParams(24, 24))
    free = {c.request_id: c.output_ids for c in engine.endpoint.generate(requests)}
    text = tokenizer.decode(free[requests[0].request_id][9:11])
    stopping = {
        r.request_id: dataclasses.replace(r, sampling=SamplingParams(24, stop=(text,)))
        for r in requests
    }
    found = list(engine.endpoint.generate(list(stopping.values())))
    for completion in found:
        ids = completion.output_ids
        assert torch.equal(ids, free[completion.request_id][: len(ids)])
        check_completion(oracle, stopping[completion.request_id], completion)
        assert text not in tokenizer.decode(ids[:-1])
        assert (text in tokenizer.decode(ids)) == (
            completion.finish_reason == "stop" and ids[-1] != EOS
        )
    assert any(text in tokenizer.decode(completion.output_ids) for completion in found)


def test_refused_requests(engine):
    (good,) = make_requests(1, SamplingParams(2, 2))
    long = make_requests(1, SamplingParams(32), num_tokens=500)
    with pytest.raises(ValueError, match=r"0-0: 500 prompt tokens \+ 32 new tokens .* of 512"):
        engine.endpoint.generate(long)
    with pytest.raises(ValueError, match="0-0: the prompt has no tokens"):
        engine.endpoint.generate(make_requests(1, SamplingParams(2), num_tokens=0))
    with pytest.raises(ValueError, match="0-0: two requests have this id"):
        engine.endpoint.generate([good, good])
    assert len(list(engine.endpoint.generate([good]))) == 1
    assert list(engine.endpoint.generate([])) == []


@follows_seeds
def test_engines_side_by_side(engines):
    """The same requests give the same tokens on every engine, all of them at work."""
    requests = make_requests(8, SamplingParams(24, 24))

    def roll_out(engine):
        return {c.request_id: c for c in engine.endpoint.generate(requests)}

    with ThreadPoolExecutor(len(engines)) as pool:
        results = list(pool.map(roll_out, engines))
    alone = roll_out(engines[0])
    for result in results:
        for name, completion in alone.items():
            assert torch.equal(result[name].output_ids, completion.output_ids)
            assert torch.equal(result[name].logprobs, completion.logprobs)
            if trace := trace_of(completion):
                assert torch.equal(result[name].routing.expert_ids, trace.expert_ids)
