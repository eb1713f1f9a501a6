"""One failed `sample` of a turn fails alone: the sampler of a session before an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config import Recipe
from mrl.engines.base import Completion, EndsEngine, EngineLost, Request, RequestFailed
from mrl.errors import InputError, RunFailed, WrongWeights
from mrl.service.sessions import local_sampling, sampling
from mrl.service.sessions.bodies import SampleBody
from mrl.service.sessions.engine_samples import MAX_ENDED
from mrl.service.sessions.local_sampling import LocalSampling
from mrl.service.sessions.recipe import session_tree
from mrl.service.sessions.samplers import Source
from mrl.service.sessions.samples import Samples
from mrl.service.sessions.sampling import SessionSampler
from mrl.types import VersionSpan

REFUSED, LETHAL = 70, 77
UNSCORED, LETHAL_SCORE = 71, 78


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
            spans = (VersionSpan(0, 2, 3),)
            yield Completion(rid, torch.tensor([token]), torch.zeros(1), "stop", spans, None)

    def sequence_logprobs(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Refuse to score token 71, and end with token 78."""
        first = {int(each[0]) for each in sequences}
        if UNSCORED in first:
            raise RuntimeError("it is not scored")
        if LETHAL_SCORE in first:
            raise EngineLost("it died of a prompt")
        return [-torch.arange(len(each)).float() for each in sequences]


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


@dataclass
class Turns:
    """A session before one engine."""

    session: SessionSampler
    engines: LocalSampling
    part: Any


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(sampling, "share_bytes", lambda data: [data])
    monkeypatch.setattr(local_sampling, "sum_over_ranks", int)
    tree = {"model": {"path": "x"}, "output_dir": "y", **session_tree({})}
    mesh: Any = SimpleNamespace(rank=0, dims=SimpleNamespace(world=1))
    part: Any = Part()
    policy: Any = None  # which no test sends
    engines = LocalSampling(part, policy, lambda source: nullcontext(), 0, 1)
    return Turns(
        SessionSampler(Recipe.model_validate(tree), mesh, Samples(), engines), engines, part
    )


def turn(
    sampler: Turns, *tokens: int, what: str = "", **keys: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask for an answer to each token by an operation of its own; return the answers, or `what` of the
    results, and the errors."""
    given: dict[str, Any] = {"kind": "sample", "max_tokens": 4, **keys}
    body = {n: SampleBody(prompts=[[t, 1]], **given) for n, t in enumerate(tokens)}
    asked = {f"1-{n}": (each, n) for n, each in body.items()}
    sampler.session.begin(asked, Source(None, 0, 0))
    while True:
        before = sampler.part.num_lost
        sampler.engines.generate()
        sampler.engines.end_generation(was_lost=sampler.part.num_lost > before)
        if (found := sampler.session.finish()) is not None:
            results, failures = found
            own = {k: v["samples"][0][0]["tokens"] for k, v in results.items()}
            return ({k: v[what] for k, v in results.items()} if what else own), failures


def test_a_refused_sample_fails_alone(sampler: Turns) -> None:
    results, failures = turn(sampler, 5, REFUSED, 6)
    assert results == {"1-0": [5], "1-2": [6]}
    assert list(failures) == ["1-1"]
    assert "the engine refused" in failures["1-1"]
    assert sampler.part.endpoint.calls == [
        [5, REFUSED, 6],
        [REFUSED],
        [6],
    ]  # what was whole is not drawn again
    assert turn(sampler, 8) == ({"1-0": [8]}, {})


def test_a_sample_that_ends_engines_fails_alone_after_two(sampler: Turns) -> None:
    results, failures = turn(sampler, 5, LETHAL, 6)
    assert results == {"1-0": [5], "1-2": [6]}
    assert list(failures) == ["1-1"]
    assert sampler.part.num_lost == 2
    sampler.session.check_behaviour()


def test_who_ends_too_many_engines_is_paused(sampler: Turns) -> None:
    results, failures = turn(sampler, 5, *[LETHAL] * 5, 6)
    assert results == {"1-0": [5]}
    assert len(failures) == 6
    assert sum("third time" in text for text in failures.values()) == MAX_ENDED
    with pytest.raises(RunFailed, match="have each killed the engine twice"):
        sampler.session.check_behaviour()


def test_wrong_weights_are_no_operations_own(
    sampler: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(self: Engine, requests: Sequence[Request], **options: Any) -> Iterator[Completion]:
        raise WrongWeights("it read another's cache")
        yield

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(WrongWeights):
        turn(sampler, 5)


def test_prompts_are_scored_beside_their_answers(sampler: Turns) -> None:
    asked = {"what": "prompt_logprobs", "prompt_logprobs": True}
    results, failures = turn(sampler, 5, UNSCORED, REFUSED, 6, **asked)
    assert results == {"1-0": [[None, -1.0]], "1-3": [[None, -1.0]]}
    assert failures.keys() == {"1-1", "1-2"}
    assert failures["1-1"] == "it is not scored"
    assert turn(sampler, 8) == ({"1-0": [8]}, {})  # not asked for


def test_a_prompt_that_ends_engines_fails_alone(sampler: Turns) -> None:
    asked = {"what": "prompt_logprobs", "prompt_logprobs": True}
    results, failures = turn(sampler, 5, LETHAL_SCORE, 6, **asked)
    assert results == {"1-0": [[None, -1.0]], "1-2": [[None, -1.0]]}
    assert failures == {"1-1": "it died of a prompt"}
    assert sampler.part.num_lost == 2
    assert turn(sampler, 5, top_prompt_logprobs=2)[1] == {
        "1-0": "this engine does not return the likeliest tokens of prompts; leave "
        "top_prompt_logprobs out"
    }


def test_a_sampler_that_cannot_be_read_fails_its_samples(sampler: Turns) -> None:
    def in_place(source: Source) -> Any:
        raise InputError("checkpoint iter_0000003 is damaged")

    engines = sampler.engines
    engines._in_place = in_place
    sampler.part.endpoint.weight_version = 0
    engines._policy = SimpleNamespace(mount=lambda **keys: None)  # pyright: ignore[reportAttributeAccessIssue]
    body = SampleBody(kind="sample", prompts=[[5]], max_tokens=4, sampler="x")
    sampler.session.begin({"1-0": (body, 0)}, Source("x", 1 << 30, 3))
    engines.prepare_sync()
    engines.send()
    engines.check_sync()
    assert not engines.num_remaining
    engines.generate()
    engines.end_generation(was_lost=False)
    assert sampler.session.finish() == ({}, {"1-0": "checkpoint iter_0000003 is damaged"})
