"""What update_weights(), sleep() and wake() owe."""

from __future__ import annotations

import pytest
import torch
from rollout_helpers import (
    follows_seeds,
    load_oracle,
    make_buckets,
    make_requests,
    named_weights,
    trace_of,
)
from transformers import AutoModelForCausalLM

from mrl.engines.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, SamplingParams
from mrl.types import VersionSpan, WeightBucket
from tests.release import release

ONE = SamplingParams(2, 2)


def test_updated_weights_equal_transformers_with_those(engine, toy_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(toy_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    requests = make_requests(4, SamplingParams(16, 16, temperature=0.0))
    before = {c.request_id: c for c in engine.endpoint.generate(requests)}
    engine.endpoint.update_weights(make_buckets(named_weights(model, tmp_path / "new"), 3), 3)
    assert engine.endpoint.weight_version == 3
    after = {c.request_id: c for c in engine.endpoint.generate(requests)}
    oracle = load_oracle(tmp_path / "new")
    for request in requests:
        expected = request.token_ids
        for _ in range(16):  # the end of the sequence is a token like others: no length is free
            with torch.no_grad():
                best = oracle(expected[None]).logits[0, -1:].argmax(-1)
            expected = torch.cat([expected, best])
        new = after[request.request_id]
        assert torch.equal(new.output_ids, expected[20:])
        assert not torch.equal(new.output_ids, before[request.request_id].output_ids)
        assert new.weight_versions == (VersionSpan(3, 20, 36),)
        if trace := trace_of(new):
            assert trace.row_versions == (VersionSpan(3, 0, 35),)


def test_broken_update_leaves_no_weights(engine, toy_weights):
    """Half of a new model is in when the second bucket fails."""
    half = len(toy_weights) // 2
    good = [(name, tensor + 1) for name, tensor in toy_weights[:half]]
    name, tensor = toy_weights[half + 1]
    for tensors, message in (
        ([(name, tensor[:-1].clone())], r"got shape \[.*\], expected \[.*\]"),
        ([("model.norm.wait", tensor)], "'model.norm.wait', which the checkpoint does not have"),
        (toy_weights[half - 1 : half + 1], "twice"),
        (toy_weights[half + 1 :], r"expected 1 more: model\."),
    ):
        with pytest.raises(ValueError, match=message):
            engine.endpoint.update_weights([WeightBucket(good, 4), WeightBucket(tensors, 4)], 4)
        with pytest.raises(RuntimeError, match="generate: the engine is awake, no weights"):
            engine.endpoint.generate(make_requests(1, ONE))
    with pytest.raises(ValueError, match="version 1, expected 2"):
        engine.endpoint.update_weights(make_buckets(toy_weights, 1), 2)
    with pytest.raises(ValueError, match="got 0 weights"):
        engine.endpoint.update_weights([], 2)
    engine.endpoint.update_weights(make_buckets(toy_weights, 5), 5)
    assert len(list(engine.endpoint.generate(make_requests(1, ONE)))) == 1


def test_states(engine, toy_weights):
    def one():
        (completion,) = engine.endpoint.generate(make_requests(1, ONE))
        return completion

    with pytest.raises(RuntimeError, match="start\\(\\) while it runs"):
        engine.start()
    with pytest.raises(RuntimeError, match=r"resume: .* pause\(\) it first"):
        engine.resume()
    engine.sleep(1)
    assert engine.endpoint.weight_version == 0
    for ask in (one, lambda: engine.endpoint.sequence_logprobs([torch.arange(4)])):
        with pytest.raises(RuntimeError, match="the engine is asleep"):
            ask()
    with pytest.raises(RuntimeError, match="update_weights: the engine is asleep"):
        engine.endpoint.update_weights(make_buckets(toy_weights, 1), 1)
    engine.wake()
    kept = one()
    engine.sleep(2)
    engine.sleep(2)
    assert engine.endpoint.weight_version is None
    engine.wake([WEIGHTS])
    with pytest.raises(RuntimeError, match="asleep \\(kv_cache, cuda_graph\\), no weights"):
        one()
    engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    engine.wake([KV_CACHE])
    with pytest.raises(RuntimeError, match="asleep \\(cuda_graph\\)"):
        one()
    engine.wake([KV_CACHE, CUDA_GRAPH])
    again = one()
    assert torch.equal(again.output_ids, kept.output_ids)
    assert torch.equal(again.logprobs, kept.logprobs)
    with pytest.raises(ValueError, match=r"\['gpu'\], expected some of weights"):
        engine.wake(["gpu"])
    with pytest.raises(ValueError, match="level 3"):
        engine.sleep(3)


@follows_seeds
@pytest.mark.parametrize("num_cycles", [2, release(10)])
def test_many_cycles_give_the_same_bits(engine, toy_weights, num_cycles):
    """Sleep, wake, sync, generate: the last rollout is the first one."""
    requests = make_requests(4, SamplingParams(8, 8))

    def bits():
        done = {c.request_id: c for c in engine.endpoint.generate(requests)}
        return [done[r.request_id].logprobs.tolist() for r in requests]

    first = bits()
    for _ in range(num_cycles):
        engine.sleep(2)
        engine.wake([WEIGHTS])
        engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
        engine.wake()
        assert bits() == first
