"""The end of the context on a real SGLang server: what is asked for is answered, or refused unsent."""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress

import pytest
import torch
from rollout_helpers import make_requests

from mrl.engines.base import Request, RequestFailed, SamplingParams
from mrl.errors import InputError
from mrl.service.sessions.bodies import Bounds, SampleBody, read_body
from tests.tenants.edges import random_body


def test_every_length_up_to_the_contexts_last_token(engine):
    """All of the toy model's 512 positions, prompt and answer; what is beyond is refused unsent."""
    whole = engine.core.launch.context_len
    requests = [
        Request(f"{size}+{new}", torch.full((size,), 9), size, SamplingParams(new, new))
        for size in range(whole - 9, whole)
        for new in {1, whole - size}
    ]
    done = {
        c.request_id: f"{c.finish_reason} {len(c.output_ids)}"
        for c in engine.endpoint.generate(requests)
    }
    assert done == {r.request_id: f"length {r.sampling.max_new_tokens}" for r in requests}
    (logprobs,) = engine.endpoint.sequence_logprobs([torch.full((whole,), 9)])
    assert len(logprobs) == whole
    for request, message in (
        (Request("a", torch.full((whole,), 9), 0, SamplingParams(1)), "exceed the context of 512"),
        (Request("b", torch.tensor([200]), 0, SamplingParams(1)), "token 200, expected 0 to 127"),
        (Request("c", torch.tensor([9]), 0, SamplingParams(1, top_k=1 << 40)), "top_k is 10995"),
    ):
        with pytest.raises(InputError, match=message):
            engine.endpoint.generate([request])
    with pytest.raises(InputError, match="a sequence of 513 tokens, expected 1 to 512"):
        engine.endpoint.sequence_logprobs([torch.full((whole + 1,), 9)])


def test_what_the_server_refuses_is_no_lost_engine(engine, monkeypatch):
    """Here mrl does not know how much SGLang takes."""
    launch = dataclasses.replace(engine.core.launch, context_len=600)
    monkeypatch.setattr(engine.core, "launch", launch)
    begun = engine.process_id
    request = Request("a", torch.full((520,), 9), 0, SamplingParams(1))
    with pytest.raises(RequestFailed, match=r"is longer than the model's context length"):
        list(engine.endpoint.generate([request]))
    request = Request("b", torch.full((515,), 9), 0, SamplingParams(1))
    with pytest.raises(RequestFailed, match=r"b: the engine refused .*exceeds the maximum allowed"):
        list(engine.endpoint.generate([request]))
    assert engine.process_id == begun
    assert len(list(engine.endpoint.generate(make_requests(2, SamplingParams(4))))) == 2


@pytest.mark.release  # tests/adversary/test_engine.py has random samplings in its short form
def test_random_samples_of_sessions_are_refused_or_answered(engine):
    """What `read_body` lets through has the length that was asked for, and ends no engine."""
    launch = engine.core.launch
    draw, bounds, begun = random.Random(2), Bounds(launch.vocab_size, launch.context_len), []
    for number in range(400):
        given = random_body(draw, launch.context_len)
        with suppress(InputError):
            body = read_body({"kind": "sample", **given}, bounds)
            assert isinstance(body, SampleBody)
            sampling, tokens = body.sampling(1.0), torch.tensor(body.prompts[0])
            begun.append(Request(f"{number}", tokens, number, sampling))
    assert len(begun) > 20
    asked = {request.request_id: request.sampling for request in begun}
    for done in engine.endpoint.generate(begun):
        sampling, size = asked[done.request_id], len(done.output_ids)
        assert sampling.min_new_tokens <= size <= sampling.max_new_tokens, sampling
        assert done.finish_reason == "stop" or size == sampling.max_new_tokens, sampling
