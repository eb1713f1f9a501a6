"""What one client asks of a real engine cannot end it for the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mrl.client import Future, OperationFailed, Sample, Session
from mrl.errors import InputError, RunFailed
from mrl.toy_model import write_toy_model
from tests.tenants.edges import random_body
from tests.tenants.lethal import LETHAL, write_plugin
from tests.tenants.serving import Service, require_same_bits, wait_for
from tests.tenants.test_session_runs import new_session, reinforce, require_same, served

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]

CONTEXT_LEN, VOCAB_SIZE = 64, 128
ANOTHER = "starting another one"


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def refused(session: Session, message: str, **body: Any) -> None:
    prompts = body.pop("prompts", [[5, 6]])
    with pytest.raises((InputError, RunFailed), match=message):
        session.sample(prompts, **{"max_tokens": 8, **body})


def drawn(session: Session) -> Future[list[list[Sample]]]:
    return session.sample([[5, 6], [7, 8, 9]], n=4, max_tokens=20, seed=3)


def numbers(groups: list[list[Sample]]) -> list[Any]:
    return [[(a.tokens.tolist(), a.logprobs.tolist()) for a in answers] for answers in groups]


def log_of(service: Service) -> str:
    return service.folder.with_suffix(".log").read_text()


def test_hostile_requests_change_nobodys_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that once ended the engine are refused or answered; one that really ends it fails alone,
    after two engines."""
    monkeypatch.setenv("PYTHONPATH", str(write_plugin(tmp_path / "plugin")))
    both, alone = Service(tmp_path / "both", model), Service(tmp_path / "alone", model)
    for each in (both, alone):
        each.write()
    both.add("bob", num_steps=4)
    with served(both) as (client, process):
        ann, eve = (new_session(client, both, name) for name in ("ann", "eve"))

        def hostile() -> None:
            refused(eve, "the model has only 128 tokens", top_k=1 << 40)
            refused(eve, "expected 1e-06 to 1e[+]06", temperature=3.4e38)
            refused(eve, "expected 0 to 127", min_tokens=1, stop_token_ids=[200000])
            refused(eve, "at most half", min_tokens=1, stop_token_ids=list(range(VOCAB_SIZE)))
            refused(
                eve, "a stop text ends a completion wherever it occurs", min_tokens=2, stop=["x"]
            )
            refused(eve, "more than the context of 64", prompts=[[5] * 60], max_tokens=5)
            (answers,) = eve.sample([[5] * 60], max_tokens=4, min_tokens=4).result()
            assert [len(answer.tokens) for answer in answers] == [4]

        hostile()
        whole = numbers(drawn(eve).result())
        beside = [drawn(eve), eve.sample([[5, *LETHAL]], max_tokens=4), drawn(eve)]
        reinforce(ann, 3)
        assert numbers(beside[0].result()) == numbers(beside[2].result()) == whole
        with pytest.raises(OperationFailed, match="it is not tried a third time"):
            beside[1].result()
        assert log_of(both).count(ANOTHER) == 2
        hostile()
        reinforce(ann, 2)
        saved = ann.save().result()
        wait_for(lambda: client.control.tenant("bob")["steps_done"] == 4, process)
    with served(alone) as (client, _):
        session = new_session(client, alone, "ann")
        reinforce(session, 3)
        reinforce(session, 2)
        other = session.save().result()
    require_same(saved.folder, other.folder)
    both.train_alone("bob", tmp_path / "bob")
    require_same_bits(both.run_of("bob"), tmp_path / "bob", but=["rollout/engine_restarts"])


def test_who_ends_too_many_engines_is_paused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_plugin(tmp_path / "plugin")))
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, process):
        ann, eve = (new_session(client, service, name) for name in ("ann", "eve"))
        whole = numbers(drawn(ann).result())
        more = [eve.sample([[5, *LETHAL]], max_tokens=4) for _ in range(5)]
        assert numbers(drawn(ann).result()) == whole
        for each in more:
            with pytest.raises(RunFailed, match=r"third time|no other is tried|session was left"):
                each.result()
        wait_for(lambda: client.control.tenant("eve")["state"] == "paused", process)
        assert "killed the engine twice" in client.control.tenant("eve")["reason"]
        assert log_of(service).count(ANOTHER) <= 7
        assert numbers(drawn(ann).result()) == whole
        eve.resume()
        eve.wait_open()
        assert numbers(drawn(eve).result())


@pytest.mark.parametrize("seed", [1])
def test_random_bodies_are_refused_or_answered(seed: int, model: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, _):
        session = new_session(client, service, "eve")
        num_answered = 0
        for _ in range(40):
            asked: list[tuple[dict[str, Any], Future[list[list[Sample]]]]] = []
            for _ in range(20):
                body = random_body(draw, CONTEXT_LEN)
                with suppress(InputError, RunFailed):  # refused before it is sent
                    asked.append((body, session.sample(**body)))
            for body, future in asked:
                groups = future.result()
                num_answered += 1
                at_least = body.get("min_tokens", 0)
                for answer in (answer for answers in groups for answer in answers):
                    assert at_least <= len(answer.tokens) <= body["max_tokens"], body
                    is_whole = len(answer.tokens) == body["max_tokens"]
                    assert answer.stop_reason == "stop" or is_whole, body
        assert num_answered > 100
    assert ANOTHER not in log_of(service)
