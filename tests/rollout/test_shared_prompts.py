"""Requests of one prompt that reach the scheduler together compute the prompt once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_helpers import TOLERANCE, generate, make_prompts, score, slow_steps

from mrl.engines.base import Request, SamplingParams
from mrl.engines.sglang.compat import path_of
from mrl.engines.sglang.plugins.server.mrl_shared_prompts import (
    MAX_BATCHES,
    MIN_TOKENS,
    Prompts,
    must_wait,
    record,
)
from mrl.types import Prompt

LONG, SHORT = MIN_TOKENS + 8, MIN_TOKENS


def cached_rows(engine: Any, prompts: list[Prompt], *, seed: int) -> list[list[int]]:
    """For each prompt, how many rows its four samples read from the prefix cache."""
    groups = generate(engine, prompts, samples_per_prompt=4, sampling=SamplingParams(6), seed=seed)
    return [sorted(sample.routing.num_cached_rows for sample in group.samples) for group in groups]


def test_a_prompt_is_computed_once(engine):
    prompts = make_prompts(3, seed=21, num_tokens=LONG)
    assert cached_rows(engine, prompts, seed=1) == [[0] + [LONG - 1] * 3] * 3


def test_short_prompts_do_not_wait(engine):
    prompts = make_prompts(3, seed=22, num_tokens=SHORT)
    assert cached_rows(engine, prompts, seed=1) == [[0] * 4] * 3


def test_answers_do_not_depend_on_who_computed_the_prompt(engine, oracle):
    prompts = make_prompts(2, seed=23, num_tokens=LONG)
    groups = generate(engine, prompts, samples_per_prompt=4, sampling=SamplingParams(8), seed=3)
    for group in groups:
        for sample in group.samples:
            expected, _ = score(oracle, sample.token_ids, LONG, 1.0)
            assert (sample.rollout_logprobs[LONG:] - expected).abs().max() < TOLERANCE
        routes = [sample.routing.expert_ids[: LONG - 1] for sample in group.samples]
        assert all(torch.equal(each, routes[0]) for each in routes)


def test_an_abort_ends_those_who_wait_and_the_prompt_can_be_asked_again(engine):
    """All requests of the prompt are aborted before its second batch, which others would join."""
    (prompt,), (other,) = make_prompts(1, seed=24, num_tokens=LONG), make_prompts(1, seed=25)
    short = Request(other.prompt_id, other.token_ids, 0, SamplingParams(1))
    same = [
        Request(f"{prompt.prompt_id} {i}", prompt.token_ids, i, SamplingParams(40, 40))
        for i in range(4)
    ]
    reasons = {}
    with slow_steps():
        for done in engine.endpoint.generate([short, *same]):
            reasons[done.request_id] = done.finish_reason
            engine.endpoint.abort()
    assert reasons.pop(short.request_id) == "length"
    assert set(reasons.values()) == {"abort"}
    assert len(reasons) == 4
    assert cached_rows(engine, [prompt], seed=1)[0][-1] == LONG - 1


def request(
    tokens: tuple[int, ...] = (1, 2, 3),
    key: str = "a",
    *,
    num_cached: int = 0,
    salt: str = "",
    adapter: str | None = None,
) -> Any:
    made = SimpleNamespace(extra_key=key, lora_id=adapter, origin_input_ids=tokens, output_ids=[])
    made.cache_salt, made.return_logprob = salt, False
    setattr(made, path_of("Req.prefix").rpartition(".")[2], num_cached)
    made.ended = False
    made.finished = lambda: made.ended
    return made


def batch(queue: list[Any], *, page_size: int = 1, has_state: bool = False) -> list[Any]:
    """The requests that one batch takes from a queue, if it has room for all of them."""
    adder = SimpleNamespace(tree_cache=SimpleNamespace(disable=False), can_run_list=[])
    adder.page_size, adder.is_hybrid_ssm_cache = page_size, has_state
    for each in queue:
        if not must_wait(adder, each):
            adder.can_run_list.append(each)
            record(adder, each)
    return adder.can_run_list


def prompt_of(first: int) -> tuple[int, ...]:
    return tuple(range(first, first + LONG))


def test_all_that_waited_are_taken_together():
    first, *others = [request(prompt_of(100)) for _ in range(6)]
    assert batch([first, *others]) == [first]
    assert batch(others) == []
    first.output_ids.append(7)
    others = [request(prompt_of(100), num_cached=LONG - 1) for _ in others]
    assert batch(others) == others


def test_nobody_waits_in_vain():
    def queue(first: int) -> list[Any]:
        return [request(prompt_of(first), num_cached=first % 1000) for _ in range(3)]

    for waits, options in [
        (queue(3000 + LONG - 1), {}),  # all is in the cache already
        (queue(2000), {"page_size": LONG}),  # no whole page to share
        (queue(1000), {"has_state": True}),  # would keep its slot of recurrent state
    ]:
        assert batch(waits, **options) == waits
    salted = [request(prompt_of(4000), salt=salt) for salt in "ab"]
    assert batch(salted) == salted
    adapted = [request(prompt_of(5000), adapter=adapter) for adapter in (None, "a", "b")]
    assert batch(adapted) == adapted


def test_requests_for_log_probs_of_their_prompt_compute_it():
    """They neither wait nor are waited for. A request for log-probs of its answer alone may share."""

    def scored(start: int) -> Any:
        made = request(prompt_of(6000))
        made.return_logprob, made.logprob_start_len = True, start
        return made

    first, other = scored(0), request(prompt_of(6000))
    assert batch([first, other]) == [first, other]
    assert batch([whole := scored(LONG - 2)]) == [whole]
    alone, waiting = scored(LONG - 1), scored(-1)
    assert batch([alone, waiting]) == []  # `other` is computing the prompt


def test_who_waits():
    prompts, first = Prompts(), request()
    prompts.begin_batch("first batch")
    assert not prompts.has_other(first)
    prompts.add(first)
    assert prompts.has_other(request())
    assert not prompts.has_other(first)  # a prefill in chunks comes again
    assert not prompts.has_other(request((1, 2, 4)))
    assert not prompts.has_other(request(key="b"))  # such as another version of the weights


@pytest.mark.parametrize("end", ["token", "abort", "never"])
def test_nobody_waits_for_ever(end):
    prompts, first = Prompts(), request()
    prompts.begin_batch(0)
    prompts.add(first)
    for batch in range(1, MAX_BATCHES + 1):
        prompts.begin_batch(batch)
        assert prompts.has_other(request())
        prompts.begin_batch(batch)  # the next request of the same batch
    first.output_ids += [7] * (end == "token")
    first.ended = end == "abort"
    prompts.begin_batch(MAX_BATCHES + 1)
    assert not prompts.has_other(request())
