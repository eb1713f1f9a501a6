"""Samplers, prompts' log-probs, named states and answers of sessions, with the real engine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.cli import main
from mrl.client import Datum, OperationFailed, OperationLost, Sample, ServiceClient, Session
from mrl.toy_model import write_toy_model
from tests.tenants.serving import Service, wait_for
from tests.tenants.test_session_runs import new_session, reinforce, require_same, served

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def drawn(session: Session, sampler: str | None = None) -> list[list[Sample]]:
    return session.sample(PROMPTS, n=4, max_tokens=8, seed=3, sampler=sampler).result()


def numbers(groups: list[list[Sample]]) -> list[Any]:
    return [[(a.tokens.tolist(), a.logprobs.tolist()) for a in answers] for answers in groups]


def versions(groups: list[list[Sample]]) -> set[int]:
    return {answer.version for answers in groups for answer in answers}


def test_a_sampler_keeps_its_bits_while_training_goes_on(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, _):
        session, fresh = (new_session(client, service, name) for name in ("ann", "bob"))
        base = drawn(session, "@base")
        assert versions(base) == {-1}
        assert numbers(base) == numbers(drawn(fresh))  # B = 0 at version 0
        reinforce(session, 1)
        saved = session.save_sampler("one").result()
        assert saved.version == 1
        present = drawn(session)
        scores = session.prompt_logprobs(PROMPTS, top=3).result()
        reinforce(session, 1)
        assert numbers(drawn(session)) != numbers(present)
        # Behind training that is queued, of which it is no part.
        data = [Datum([5, 6, 7, 8], weight=0.1)]
        waiting = [session.forward_backward(data), session.optim_step(lr=1e-3)]
        early = drawn(session, "one")
        assert (numbers(early), versions(early)) == (numbers(present), {1})
        assert numbers(drawn(session, "@base")) == numbers(base)
        again = session.prompt_logprobs(PROMPTS, top=3, sampler="one").result()
        for one, other in zip(scores, again, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.top == other.top
        assert [each.result() for each in waiting][1].version == 3
        with pytest.raises(OperationFailed, match="there is no sampler 'two'"):
            drawn(session, "two")
        # What a sampler drew is trained with its routes, by name or by its tokens.
        advantages = [a.datum(0.5, 1 / 8) for answers in early for a in answers]
        passed = session.forward_backward(advantages, "gspo").result()
        assert passed.metrics["routing/replay_coverage"] == 1.0
        plain = [a.datum(0.5, 1 / 8, replay=False) for answers in early for a in answers]
        matched = session.forward_backward(plain, "gspo", replay="match").result()
        assert matched.loss == pytest.approx(passed.loss, rel=1e-6)
        rows = sum(len(each.tokens) - 1 for each in plain)
        assert matched.metrics["session/replayed_rows"] == rows
    main(["export", str(saved.folder), str(tmp_path / "peft")])
    assert (tmp_path / "peft/adapter_model.safetensors").is_file()
    assert "routing replay" in (tmp_path / "peft/README.md").read_text()
    with served(service) as (client, _):  # from the disk
        session = client.session("ann")
        session.wait_open()
        assert numbers(drawn(session, "one")) == numbers(present)
        assert versions(drawn(session, "one")) == {1}


def test_log_probs_of_prompts_are_the_trainers(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    prompts = [[5, 6, 7, 8, 9, 10], [70, 3], [11]]
    with served(service) as (client, _):
        session = new_session(client, service, "ann")
        reinforce(session, 2)
        scored = session.prompt_logprobs(prompts, top=4).result()
        trainers = session.forward(prompts[:2]).result()
        for prompt, own, wanted in zip(prompts, scored, trainers, strict=False):
            assert np.isnan(own.logprobs[0])
            np.testing.assert_allclose(own.logprobs[1:], wanted[1:], atol=1e-4)
            assert len(own.top) == len(prompt) - 1
            for token, logprob, top in zip(prompt[1:], own.logprobs[1:], own.top, strict=True):
                values = [value for _, value in top]
                assert values == sorted(values, reverse=True)
                assert len(values) == 4
                assert token in dict(top) or values[-1] >= logprob - 1e-6
                assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
        assert len(scored[2].logprobs) == 1
        assert scored[2].top == []


def test_states_travel_between_sessions(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, _):
        ann, bob = (new_session(client, service, name) for name in ("ann", "bob"))
        reinforce(ann, 2)
        state = ann.save("here").result()
        reinforce(ann, 2)
        whole = ann.save().result()
        assert bob.load(folder=state.folder).result() == 1
        assert ann.load(name="here").result() == 5
        for session in (ann, bob):
            reinforce(session, 2)
        require_same(ann.save("again").result().folder, bob.save("again").result().folder)
        require_same(ann.save("again", overwrite=True).result().folder, whole.folder)
        with pytest.raises(OperationFailed, match="there is a state 'here' already"):
            ann.save("here").result()


def test_answers_survive_kill_9(model: Path, tmp_path: Path) -> None:
    """Each operation is done once: what a checkpoint has is answered, what it lacks is lost by name."""
    service = Service(tmp_path / "service", model)
    service.write()
    process = service.start()
    data = [Datum([5, 6, 7, 8], weight=0.1)]
    try:
        wait_for((service.folder / "control.sock").exists, process)
        client = ServiceClient(service.folder)
        session = new_session(client, service, "ann", checkpoint={"save_every": 1})
        futures = []
        for _ in range(3):
            futures += [session.forward_backward(data), session.optim_step(lr=1e-2)]
        futures.append(session.sample(PROMPTS, max_tokens=4, seed=1))
        futures.append(session.forward_backward(data))
        results = [client.control.operation("ann", each.id) for each in futures if each.result()]
        run = service.run_of("ann") / "checkpoints/iter_0000003/manifest.json"
        wait_for(run.is_file, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with served(service) as (client, _):
        again = client.session("ann")
        assert again.wait_open() == 3
        found = [client.control.operation("ann", each.id) for each in futures]
        assert found[:-1] == results[:-1]
        assert found[-1]["state"] == "lost"
        assert "its checkpoint of version 3" in found[-1]["reason"]
        futures[-1]._found = None
        with pytest.raises(OperationLost, match="checkpoint of version 3"):
            futures[-1].result()
        again.forward_backward(data)
        assert again.optim_step(lr=1e-2).result().version == 4
        killed = again.save("end").result()
        other = new_session(client, service, "bob")
        for _ in range(4):
            other.forward_backward(data)
            other.optim_step(lr=1e-2)
        require_same(killed.folder, other.save("end").result().folder)


def test_a_load_before_the_first_step_survives_kill_9(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    data, process = [Datum([5, 6, 7, 8], weight=0.1)], service.start()
    try:
        wait_for((service.folder / "control.sock").exists, process)
        client = ServiceClient(service.folder)
        ann = new_session(client, service, "ann")
        reinforce(ann, 1)
        state = ann.save("start").result().folder
        bob = new_session(client, service, "bob", checkpoint={"save_every": 1})
        loaded = bob.load(folder=state)
        assert loaded.result() == 1
        (found,) = bob.forward(data).result()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with served(service) as (client, _):
        bob = client.session("bob")
        assert bob.wait_open() == 1
        assert client.control.operation("bob", loaded.id)["state"] == "done"
        np.testing.assert_array_equal(bob.forward(data).result()[0], found)
        reinforce(bob, 1)
        assert bob.save().result().version == 2


def test_gradients_that_a_pause_loses_are_named(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    data = [Datum([5, 6, 7, 8], weight=0.1)]
    with served(service) as (client, _):
        session = new_session(client, service, "ann")
        reinforce(session, 1)
        passed = session.forward_backward(data)
        passed.result()
        session.pause()
        session.resume()
        assert session.wait_open() == 1
        with pytest.raises(OperationFailed, match="of before the session was opened are lost"):
            session.optim_step().result()
        found = client.control.operation("ann", passed.id)
        assert (found["state"], "checkpoint of version 1" in found["reason"]) == ("lost", True)
        reinforce(session, 1)
        assert session.save().result().version == 2


def test_settings_of_adam_for_one_step(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    data = [Datum([5, 6, 7, 8])]
    own = {"lr": 1e-2, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-5, "clip_grad": 0.1}
    with served(service) as (client, _):
        ann = new_session(client, service, "ann", optimizer=own)
        bob = new_session(client, service, "bob")
        for _ in range(2):
            ann.forward_backward(data)
            bob.forward_backward(data)
            one = ann.optim_step()
            other = bob.optim_step(lr=1e-2, beta1=0.5, beta2=0.9, eps=1e-5, clip_grad=0.1)
            assert one.result().grad_norm == other.result().grad_norm
        require_same(ann.save().result().folder, bob.save().result().folder)
