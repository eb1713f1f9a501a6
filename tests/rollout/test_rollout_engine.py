"""The engine's contract, against a real SGLang server; transformers is the oracle."""

from __future__ import annotations

import os

import pytest
import torch
from rollout_helpers import load_oracle, make_buckets, make_prompts, named_weights, score
from transformers import Qwen3MoeForCausalLM

from mrl.rollout.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, SamplingParams
from mrl.rollout.saved import decode_groups, encode_groups
from mrl.types import VersionSpan, WeightBucket

EOS = 98


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_routes_equal_transformers(engine, oracle, temperature):
    sampling = SamplingParams(32, temperature=temperature)
    groups = engine.generate(
        make_prompts(4), samples_per_prompt=4, sampling=sampling, seed=1, first_group_id=5
    )
    assert [[s.group_id for s in g.samples] for g in groups] == [[i] * 4 for i in range(5, 9)]
    for group in groups:
        for sample in group.samples:
            logprobs, routes = score(oracle, sample, temperature)
            response = sample.rollout_logprobs[sample.prompt_len :]
            assert (response - logprobs).abs().max() < 1e-5
            assert not sample.rollout_logprobs[: sample.prompt_len].any()
            assert sample.loss_mask.tolist() == [
                i >= sample.prompt_len for i in range(len(sample.token_ids))
            ]
            assert torch.equal(sample.token_ids[: sample.prompt_len], group.prompt.token_ids)
            assert sample.routing is not None
            assert sample.routing.layer_numbers == (1, 2, 3, 4)
            assert sample.routing.expert_ids.dtype == torch.uint8
            got = sample.routing.expert_ids.long().sort(-1).values
            assert torch.equal(got, routes.sort(-1).values)


def test_samples_of_a_group_differ_and_follow_the_seed(engine):
    prompts = make_prompts(2)

    def tokens(seed):
        groups = engine.generate(
            prompts, samples_per_prompt=4, sampling=SamplingParams(16, 16), seed=seed
        )
        return [tuple(s.response_ids.tolist()) for g in groups for s in g.samples]

    first = tokens(1)
    assert len(set(first)) == 8
    assert tokens(1) == first
    assert not set(tokens(2)) & set(first)


def test_end_of_sequence_belongs_to_the_response(engine):
    groups = engine.generate(
        make_prompts(16), samples_per_prompt=8, sampling=SamplingParams(32), seed=3
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


def test_response_lengths(engine):
    prompts = make_prompts(16)

    def lengths(sampling):
        groups = engine.generate(prompts, samples_per_prompt=8, sampling=sampling, seed=3)
        return {len(s.response_ids) for g in groups for s in g.samples}

    assert lengths(SamplingParams(16, 16)) == {16}
    assert min(lengths(SamplingParams(16))) < 8
    assert 12 <= min(lengths(SamplingParams(16, min_new_tokens=12))) < 16


def test_stop_token_and_top_p(engine):
    prompts = make_prompts(8)
    stop = tuple(range(40))
    groups = engine.generate(
        prompts, samples_per_prompt=2, sampling=SamplingParams(32, stop_token_ids=stop), seed=1
    )
    samples = [sample for group in groups for sample in group.samples]
    assert all(s.response_ids[-1] in (*stop, EOS) for s in samples if s.finish_reason == "stop")
    assert all(s.response_ids[:-1].min() >= 40 for s in samples if len(s.response_ids) > 1)
    # A nucleus of almost nothing is greedy, whatever the seed.
    narrow = SamplingParams(8, 8, top_p=1e-6)
    a, b = (engine.generate(prompts, samples_per_prompt=1, sampling=narrow, seed=s) for s in (1, 2))
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left.samples[0].token_ids, right.samples[0].token_ids)


def test_update_weights_equals_transformers_with_those_weights(engine, toy_folder, tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(toy_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    prompts = make_prompts(4)
    greedy = SamplingParams(16, 16, temperature=0.0)
    before = engine.generate(prompts, samples_per_prompt=1, sampling=greedy, seed=0)
    engine.update_weights(make_buckets(named_weights(model, tmp_path / "new"), 3), 3)
    assert engine.weight_version == 3
    after = engine.generate(prompts, samples_per_prompt=1, sampling=greedy, seed=0)
    oracle = load_oracle(tmp_path / "new")
    for prompt, old, new in zip(prompts, before, after, strict=True):
        expected = oracle.generate(
            prompt.token_ids[None], max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        assert torch.equal(new.samples[0].token_ids, expected[0])
        assert not torch.equal(new.samples[0].token_ids, old.samples[0].token_ids)
        assert new.samples[0].weight_versions == (VersionSpan(3, 20, 36),)
        assert new.samples[0].routing.weight_version == 3


def test_broken_update_leaves_no_weights(engine, toy_weights):
    """Half of a new model is in when the second bucket fails."""
    good = [(name, tensor + 1) for name, tensor in toy_weights[:50]]
    name, tensor = toy_weights[60]
    for tensors, message in (
        ([(name, tensor[:-1].clone())], r"got shape \[.*\], expected \[.*\]"),
        ([("model.norm.wait", tensor)], "'model.norm.wait', which the checkpoint has not"),
        (toy_weights[49:51], "twice"),
        (toy_weights[51:], r"expected 1 more: model\."),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights([WeightBucket(good, 4), WeightBucket(tensors, 4)], 4)
        with pytest.raises(RuntimeError, match="generate: the engine is awake, no weights"):
            engine.generate(
                make_prompts(1), samples_per_prompt=1, sampling=SamplingParams(2, 2), seed=0
            )
    with pytest.raises(ValueError, match="version 1, expected 2"):
        engine.update_weights(make_buckets(toy_weights, 1), 2)
    with pytest.raises(ValueError, match="got 0 weights"):
        engine.update_weights([], 2)
    engine.update_weights(make_buckets(toy_weights, 5), 5)
    engine.generate(make_prompts(1), samples_per_prompt=1, sampling=SamplingParams(2, 2), seed=0)


def test_updates_leak_no_shared_memory(engine, toy_weights):
    """torch names its files torch_<pid>_...; other processes of this machine have some too."""
    pids = [os.getpid(), *(process.pid for process in engine._server.process.tree())]
    ours = tuple(f"torch_{pid}_" for pid in pids)
    for version in range(20):
        engine.update_weights(make_buckets(toy_weights, version), version)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]


def test_stale_weights_are_refused(engine):
    engine._server.post("/update_weight_version", {"new_version": "99", "abort_all_requests": True})
    with pytest.raises(RuntimeError, match="weight version 99, expected 0"):
        engine.generate(
            make_prompts(1), samples_per_prompt=1, sampling=SamplingParams(2, 2), seed=0
        )


def test_states(engine, toy_weights):
    def generate():
        return engine.generate(
            make_prompts(1), samples_per_prompt=1, sampling=SamplingParams(2, 2), seed=0
        )

    with pytest.raises(RuntimeError, match="start\\(\\) while it runs"):
        engine.start()
    engine.sleep(1)
    assert engine.weight_version == 0
    with pytest.raises(RuntimeError, match="generate: the engine is asleep"):
        generate()
    with pytest.raises(RuntimeError, match="update_weights: the engine is asleep"):
        engine.update_weights(make_buckets(toy_weights, 1), 1)
    engine.wake()
    kept = generate()[0].samples[0]
    engine.sleep(2)
    engine.sleep(2)
    assert engine.weight_version is None
    engine.wake([WEIGHTS])
    with pytest.raises(RuntimeError, match="asleep \\(kv_cache, cuda_graph\\), no weights"):
        generate()
    engine.update_weights(make_buckets(toy_weights, 0), 0)
    engine.wake([KV_CACHE])
    with pytest.raises(RuntimeError, match="asleep \\(cuda_graph\\)"):
        generate()
    engine.wake([KV_CACHE, CUDA_GRAPH])
    again = generate()[0].samples[0]
    assert torch.equal(again.token_ids, kept.token_ids)
    assert torch.equal(again.rollout_logprobs, kept.rollout_logprobs)
    with pytest.raises(ValueError, match=r"\['gpu'\], expected some of weights"):
        engine.wake(["gpu"])
    with pytest.raises(ValueError, match="level 3"):
        engine.sleep(3)


def test_prompts_that_cannot_fit(engine):
    long = make_prompts(1, num_tokens=500)
    with pytest.raises(ValueError, match=r"x:0: 500 prompt tokens \+ 32 new tokens .* of 512"):
        engine.generate(long, samples_per_prompt=1, sampling=SamplingParams(32), seed=0)
    empty = make_prompts(1, num_tokens=0)
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate(empty, samples_per_prompt=1, sampling=SamplingParams(32), seed=0)


def test_time_limit_of_a_request(engine, monkeypatch):
    hurried = engine._config.model_copy(update={"request_timeout_s": 0.3})
    long = SamplingParams(480, 480)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_config", hurried)
        with pytest.raises(TimeoutError, match=r"request_timeout_s=0\.3 s for 32 samples"):
            engine.generate(make_prompts(4), samples_per_prompt=8, sampling=long, seed=0)
    short = SamplingParams(2, 2)
    assert engine.generate(make_prompts(1), samples_per_prompt=1, sampling=short, seed=0)


def test_rollouts_survive_encoding(engine):
    groups = engine.generate(
        make_prompts(2), samples_per_prompt=2, sampling=SamplingParams(8), seed=0
    )
    for group, copy in zip(groups, decode_groups(encode_groups(groups)), strict=True):
        for sample, twin in zip(group.samples, copy.samples, strict=True):
            assert torch.equal(sample.routing.expert_ids, twin.routing.expert_ids)
            assert torch.equal(sample.rollout_logprobs, twin.rollout_logprobs)
            assert sample.weight_versions == twin.weight_versions
