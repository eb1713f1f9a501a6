"""Sampling masks between mrl and SGLang: what a body asks for, and what an answer may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrl.engines.base import Completion, Request, SamplingParams
from mrl.engines.sglang.body import build_request
from mrl.engines.sglang.decode import Expected, decode_completion
from mrl.engines.sglang.route_memory import RouteReader

MASKS: dict[str, Any] = {
    "output_token_sampling_mask": [[5, 7], [8]],
    "output_token_sampling_logprobs": [-0.5, 0.0],
}


def request(name: str = "r6", *, asks: bool = True) -> Request:
    sampling = SamplingParams(2, top_k=4, sampling_mask=asks)
    return Request(name, torch.tensor([1, 2]), 0, sampling)


def decode(*, asks: bool = True, reason: str = "length", **more: Any) -> Completion:
    meta = {
        "finish_reason": {"type": reason},
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    answer = {"output_ids": [7, 8], "meta_info": {**meta, **more}}
    return decode_completion(
        answer, request(asks=asks), Expected((3,), (3,), None, False, RouteReader())
    )


def test_log_probs_are_those_over_the_mask() -> None:
    found = decode(**MASKS)
    assert found.logprobs.tolist() == [-0.5, 0.0]
    assert found.sampling_mask is not None
    assert found.sampling_mask.counts.tolist() == [2, 1]
    assert found.sampling_mask.token_ids.tolist() == [5, 7, 8]
    whole = decode(asks=False, **MASKS)
    assert whole.logprobs.tolist() == [-1.0, -2.0]
    assert whole.sampling_mask is None


def test_an_abort_loses_the_set_of_the_last_token_with_it() -> None:
    found = decode(reason="abort", **MASKS)
    assert found.logprobs.tolist() == [-0.5]
    assert found.sampling_mask is not None
    assert found.sampling_mask.token_ids.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "no output_token_sampling_mask; .* needs SGLang 0.5.20"),
        ({**MASKS, "output_token_sampling_mask": [[5, 7]]}, "got 1, expected 2"),
        ({**MASKS, "output_token_sampling_logprobs": [0.0]}, "got 1, expected 2"),
        ({**MASKS, "output_token_sampling_mask": [[5, 7], [9]]}, "is not in its sampling mask"),
        ({**MASKS, "output_token_sampling_mask": [[5, 7], None]}, "is not in its sampling mask"),
    ],
)
def test_answers_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"r6: .*{message}"):
        decode(**more)


def test_a_body_asks_for_masks_only_where_a_request_does() -> None:
    one, other = request("a", asks=False), request("b")
    assert "return_sampling_mask" not in build_request([one], ["a"], return_routes=True)
    body = build_request([one, other], ["a", "b"], return_routes=True)
    assert body["return_sampling_mask"] == [False, True]
