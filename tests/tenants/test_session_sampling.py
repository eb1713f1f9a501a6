"""One failed `sample` of a turn fails alone: the sampler of a session before an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config import Recipe
from mrl.engines.base import Completion, EndsEngine, EngineLost, Request, RequestFailed
from mrl.errors import RunFailed, WrongWeights
from mrl.service.sessions import sampling
from mrl.service.sessions.bodies import SampleBody
from mrl.service.sessions.recipe import session_tree
from mrl.service.sessions.samplers import Source
from mrl.service.sessions.samples import Samples
from mrl.service.sessions.sampling import MAX_ENDED, SessionSampler
from mrl.types import VersionSpan

REFUSED, LETHAL = 70, 77


class Engine:
    """Refuses a prompt of token 70; ends with a prompt of token 77, twice, and then knows it."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.num_deaths: dict[str, int] = {}

    def generate(self, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        self.calls.append([int(request.token_ids[0]) for request in requests])
        for request in requests:
            if self.num_deaths.get(request.request_id) == 2:
                raise EndsEngine(f"{request.request_id}: it is not tried a third time")
        for request in requests:
            token, rid = int(request.token_ids[0]), request.request_id
            if token == REFUSED:
                raise RequestFailed(f"{rid}: the engine refused the request")
            if token == LETHAL:
                self.num_deaths[rid] = self.num_deaths.get(rid, 0) + 1
                raise EngineLost("it died")
            spans = (VersionSpan(0, 1, 2),)
            yield Completion(rid, torch.tensor([token]), torch.zeros(1), "stop", spans, None)


class Part:
    """The part of an engine that is replaced as soon as it is lost."""

    def __init__(self) -> None:
        self.endpoint = self.active_endpoint = Engine()
        self.engine, self.is_needed, self.num_lost = self, True, 0

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        try:
            yield
        except EngineLost:
            self.num_lost += 1


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> SessionSampler:
    monkeypatch.setattr(sampling, "share_bytes", lambda data: [data])
    monkeypatch.setattr(sampling, "sum_over_ranks", int)
    tree = {"model": {"path": "x"}, "output_dir": "y", **session_tree({})}
    mesh: Any = SimpleNamespace(rank=0, dims=SimpleNamespace(world=1))
    part: Any = Part()
    policy: Any = None  # which no test sends
    return SessionSampler(
        Recipe.model_validate(tree), mesh, part, policy, Samples(), lambda source: nullcontext()
    )


def turn(sampler: SessionSampler, *tokens: int) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Ask for an answer to each token by an operation of its own; return the answers and the errors."""
    body = {n: SampleBody(kind="sample", prompts=[[t]], max_tokens=4) for n, t in enumerate(tokens)}
    sampler.begin({f"1-{n}": (each, n) for n, each in body.items()}, Source(None, 0, 0))
    part: Any = sampler.part
    while True:
        before = part.num_lost
        sampler.generate()
        sampler.end_generation(was_lost=part.num_lost > before)
        if (found := sampler.finish()) is not None:
            results, failures = found
            return {k: v["samples"][0][0]["tokens"] for k, v in results.items()}, failures


def test_a_refused_sample_fails_alone(sampler: SessionSampler) -> None:
    results, failures = turn(sampler, 5, REFUSED, 6)
    assert results == {"1-0": [5], "1-2": [6]}
    assert list(failures) == ["1-1"]
    assert "the engine refused" in failures["1-1"]
    engine: Any = sampler.part.endpoint
    assert engine.calls == [[5, REFUSED, 6], [REFUSED], [6]]  # what was whole is not drawn again
    assert turn(sampler, 8) == ({"1-0": [8]}, {})


def test_a_sample_that_ends_engines_fails_alone_after_two(sampler: SessionSampler) -> None:
    results, failures = turn(sampler, 5, LETHAL, 6)
    assert results == {"1-0": [5], "1-2": [6]}
    assert list(failures) == ["1-1"]
    part: Any = sampler.part
    assert part.num_lost == 2
    sampler.check_behaviour()


def test_who_ends_too_many_engines_is_paused(sampler: SessionSampler) -> None:
    results, failures = turn(sampler, 5, *[LETHAL] * 5, 6)
    assert results == {"1-0": [5]}
    assert len(failures) == 6
    assert sum("third time" in text for text in failures.values()) == MAX_ENDED
    with pytest.raises(RunFailed, match="have each killed the engine twice"):
        sampler.check_behaviour()


def test_wrong_weights_are_no_operations_own(
    sampler: SessionSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(self: Engine, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        raise WrongWeights("it read another's cache")
        yield

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(WrongWeights):
        turn(sampler, 5)
