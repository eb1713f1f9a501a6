"""Canaries against a real engine: the right weights pass, others refuse."""

from __future__ import annotations

import pytest
import torch
from rollout_helpers import make_buckets, make_prompts, score

from mrl.errors import NotFinite, RunFailed
from mrl.weight_sync.load import MAX_TOKENS, canary_sequences, check_canaries, default_tolerance


def test_canaries(engine, oracle, toy_weights):
    prompts = [*make_prompts(1, num_tokens=1), *make_prompts(5, num_tokens=100)]
    sequences = canary_sequences(prompts, 4)
    assert [len(ids) for ids in sequences] == [MAX_TOKENS] * 4  # one token says nothing
    expected = [torch.cat([torch.zeros(1), score(oracle, ids, 1, 1.0)[0]]) for ids in sequences]
    assert check_canaries(engine.endpoint, sequences, expected, 1e-3) < 1e-5
    for changed in ("model.layers.2.mlp.gate.weight", "model.layers.3.self_attn.o_proj.weight"):
        # The same numbers in other places: no sum over them sees it.
        weights = [(n, t.flip(0) if n == changed else t) for n, t in toy_weights]
        engine.endpoint.update_weights(make_buckets(weights, 1), 1)
        with pytest.raises(
            RunFailed, match=r"version 1: engine and trainer disagree .* most 0\.001"
        ):
            check_canaries(engine.endpoint, sequences, expected, 1e-3)
    nan = [expected[0] * torch.nan, *expected[1:]]
    with pytest.raises(
        NotFinite, match="trainer's own log-probs of canary prompt 0 are not finite"
    ):
        check_canaries(engine.endpoint, sequences, nan, 1e9)


def test_one_side_in_half_precision_loosens_the_tolerance():
    exact, half = default_tolerance(torch.float32, torch.float32), default_tolerance(torch.bfloat16)
    assert exact < half
    for pair in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        assert default_tolerance(*pair) == half
