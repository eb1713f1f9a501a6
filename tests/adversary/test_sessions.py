"""Sessions beside a hostile client: what a body may carry, and a real service with three clients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.service.sessions.bodies import Body, Bounds, SampleBody, read_body
from tests.adversary.hostile import CONTEXT_LEN, MODEL_VOCAB, operation
from tests.adversary.sessions import run

NUM_BODIES = 3000
NUM_OPERATIONS = 1000
"""Operations of three clients at one service."""


def test_what_a_body_may_carry_is_what_an_engine_can_do() -> None:
    """Each body is refused in one line, or asks for nothing that a scheduler would die of."""
    bounds, chance = Bounds(vocab_size=MODEL_VOCAB, context_len=CONTEXT_LEN), random.Random(0)
    refusals, num_taken = [], 0
    for number in range(NUM_BODIES):
        given = operation(chance)
        try:
            body = read_body(given, bounds)
        except InputError as error:
            refusals.append(str(error))
            continue
        num_taken += 1
        assert problem_of(body) == "", (number, given)
    assert min(num_taken, len(refusals)) > NUM_BODIES / 20
    assert not [text for text in refusals if "\n" in text]


def problem_of(body: Body) -> str:
    """Return what of an accepted `sample` an engine could not do; empty where there is nothing."""
    if not isinstance(body, SampleBody):
        return ""
    sampling, longest = body.sampling(1.0), max(map(len, body.prompts))
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < MODEL_VOCAB]
    holds = {
        "length": longest + sampling.max_new_tokens <= CONTEXT_LEN,
        "tokens": all(0 <= t < MODEL_VOCAB for prompt in body.prompts for t in prompt),
        "top_k": sampling.top_k == -1 or 1 <= sampling.top_k <= MODEL_VOCAB,
        "top_p": 0 < sampling.top_p <= 1,
        "temperature": sampling.temperature == 0 or 1e-6 <= sampling.temperature <= 1e6,
        "stop_token_ids": not outside,
        "min_tokens": 0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
    }
    return ", ".join(name for name, fine in holds.items() if not fine)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_nobody_elses_bits_change_beside_a_hostile_client(tmp_path: Path) -> None:
    verdict = run(tmp_path, NUM_OPERATIONS, seed=0)
    assert not verdict.failures, (verdict.facts, verdict.failures)
    assert verdict.num_passed >= NUM_OPERATIONS
