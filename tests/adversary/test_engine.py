"""Requests at every limit of one real engine: answered as asked, or refused before they are sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines import load_engine
from mrl.engines.base import Completion, EngineConfig, Request, RolloutEngine, SamplingParams
from mrl.toy_model import write_toy_model
from tests.release import release

CONTEXT_LEN, VOCAB_SIZE, EOS = 48, 128, 98
MAX_TOTAL_TOKENS = 40
"""Tokens of a KV cache that is smaller than the context."""
NUM_SHORT, NUM_LONG = 25, 600
"""Random samplings of the short form and of the long one."""


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    engine = started(model, tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()


def started(model: Path, folder: Path, **config: Any) -> RolloutEngine:
    settings = {
        "context_len": CONTEXT_LEN,
        "max_response_len": 8,
        "max_total_tokens": 4096,
        "batch_invariant": True,
        "start_timeout_s": 240.0,
    }
    engine = load_engine("sglang")(
        EngineConfig(
            model=ModelConfig(path=str(model), dtype="float32"),
            rollout=RolloutConfig.model_validate({**settings, **config}),
            log_path=folder / "engine.log",
        )
    )
    engine.start()
    return engine


def request(name: str, num_tokens: int, sampling: SamplingParams, seed: int = 0) -> Request:
    rng = torch.Generator().manual_seed(num_tokens)
    return Request(name, torch.randint(4, 100, (num_tokens,), generator=rng), seed, sampling)


def exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens, num_tokens)


def lengths_around(limit: int, reach: int) -> list[tuple[int, int]]:
    """Prompt and answer lengths whose sum is at most `reach` tokens on either side of the limit."""
    prompts = {1, 2, limit // 2, *range(max(1, limit - 10), limit + 2)}
    sums = range(limit - reach, limit + reach + 1)
    return [(p, total - p) for p in sorted(prompts) for total in sums if total > p]


def check_lengths(engine: RolloutEngine, limit: int, reach: int) -> None:
    """Assert that what fits has the length that was asked, and that the rest is refused unsent."""
    before, pairs = engine.process_id, lengths_around(limit, reach)
    fits = [(p, m) for p, m in pairs if p + m <= limit]
    requests = [request(f"{p}+{m}", p, exactly(m)) for p, m in fits]
    found = {each.request_id: each for each in engine.endpoint.generate(requests)}
    for p, m in fits:
        answer = found[f"{p}+{m}"]
        assert (len(answer.output_ids), answer.finish_reason) == (m, "length"), (p, m)
    for p, m in pairs:
        if p + m > limit:
            with pytest.raises(ValueError, match=f"{p}[ +].*{limit}|{limit}.*{p}"):
                list(engine.endpoint.generate([request("long", p, exactly(m))]))
    assert engine.process_id == before


@pytest.mark.release  # rollout/test_context_end.py has the last tokens
def test_prompts_and_answers_of_every_length_around_the_context(engine: RolloutEngine) -> None:
    check_lengths(engine, CONTEXT_LEN, reach=2)


@pytest.mark.release
def test_prompts_and_answers_of_every_length_within_the_context(engine: RolloutEngine) -> None:
    check_lengths(engine, CONTEXT_LEN, reach=CONTEXT_LEN - 1)


@pytest.mark.release
@pytest.mark.parametrize("max_total_tokens", [24, MAX_TOTAL_TOKENS, 47, 52, 55, 56])
def test_a_cache_smaller_than_the_context(
    model: Path, tmp_path: Path, max_total_tokens: int
) -> None:
    """What the engine says is its limit holds: all that is below is answered."""
    engine = started(model, tmp_path, max_total_tokens=max_total_tokens)
    try:
        limit = longest(engine)
        assert max_total_tokens - 16 <= limit <= min(CONTEXT_LEN, max_total_tokens)
        check_lengths(engine, limit, reach=min(9, limit - 1))
    finally:
        engine.stop()


def longest(engine: RolloutEngine) -> int:
    """Return the most tokens, prompt and answer, that the engine takes."""
    for total in range(CONTEXT_LEN + 1, 1, -1):
        try:
            list(engine.endpoint.generate([request("probe", 1, exactly(total - 1))]))
        except ValueError:
            continue
        return total
    raise AssertionError("the engine takes nothing")


def wild_sampling(chance: random.Random) -> dict[str, Any]:
    """Return arguments of SamplingParams, each usual, at a limit, or beyond it."""
    new = chance.choice([1, 2, 8, CONTEXT_LEN - 8])
    eos, last = EOS, VOCAB_SIZE - 1
    choices: dict[str, list[Any]] = {
        "min_new_tokens": [1, new - 1, new, new + 1],
        "temperature": [0.0, 1e-45, 1e-6, 0.3, 100.0, 1e30, 3.4e38, 1e300, -1.0],
        "top_p": [1e-45, 1e-6, 0.5, 0.999999, 1.0000001, 0.0],
        "top_k": [1, 2, last, VOCAB_SIZE, VOCAB_SIZE + 1, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 40, 0],
        "stop_token_ids": [
            (0,), (eos,), (last,), (VOCAB_SIZE,), (200_000,), ((1 << 31) - 1,), (1 << 40,), (-1,),
            tuple(range(VOCAB_SIZE)), tuple(range(VOCAB_SIZE // 2)), (5, 5, 5),
        ],
        "stop": [
            ("a",), ("\0",), ("é" * 999,), (" ",), tuple("abcdefgh"), ("x" * 5000,), ("\n", "a"),
            tuple(chr(97 + n % 26) * (n + 1) for n in range(32)), ("\U0001f600",), ("\ud800",), ("",),
        ],
    }  # fmt: skip
    names = chance.sample(sorted(choices), chance.choice([1, 1, 2, 3, 6]))
    return {"max_new_tokens": new, **{name: chance.choice(choices[name]) for name in names}}


@pytest.mark.parametrize(("first", "num"), [(0, NUM_SHORT), release(NUM_SHORT, NUM_LONG)])
def test_no_sampling_costs_the_engine_or_changes_the_answer_of_another(
    engine: RolloutEngine, first: int, num: int
) -> None:
    """A usual request beside each wild one has the same bits every time; each number is a seed."""
    before, mates, num_answered = engine.process_id, set(), 0
    for number in range(first, first + num):
        arguments = wild_sampling(random.Random(number))
        try:
            wild = request("wild", 1 + number % 8, SamplingParams(**arguments), number)
            found = engine.endpoint.generate([request("mate", 9, exactly(12), 5), wild])
            answers = {each.request_id: each for each in found}
        except ValueError:
            continue
        assert engine.process_id == before, (number, arguments)
        check_answer(answers["wild"], SamplingParams(**arguments), number)
        mates.add(bits_of(answers["mate"]))
        num_answered += 1
    assert len(mates) == 1
    assert num / 4 < num_answered < num


def check_answer(answer: Completion, sampling: SamplingParams, number: int) -> None:
    """Assert that an answer is one that its sampling can give."""
    size = len(answer.output_ids)
    assert sampling.min_new_tokens <= size <= sampling.max_new_tokens, number
    assert (answer.finish_reason == "stop") or size == sampling.max_new_tokens, number
    assert bool(answer.logprobs.isfinite().all()), number
    assert bool((answer.logprobs <= 0).all()), number
    inner = set(answer.output_ids[sampling.min_new_tokens : -1].tolist())
    assert not inner & {*sampling.stop_token_ids, EOS}, number


def bits_of(answer: Completion) -> bytes:
    return answer.output_ids.numpy().tobytes() + answer.logprobs.numpy().tobytes()
