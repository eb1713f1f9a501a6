"""Sessions of a service whose engines are on ranks of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.client import Datum, Future, OperationFailed, OperationLost, ServiceClient, Session
from mrl.toy_model import write_toy_model
from tests.tenants.serving import Service, require_same_bits, wait_for
from tests.tenants.test_service_disaggregated import ROLLOUT, kill_all, kill_one
from tests.tenants.test_session_runs import new_session, reinforce, require_same, served

pytestmark = pytest.mark.timeout(1200)

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.fixture
def apart(model: Path, tmp_path: Path) -> Service:
    """A service with an engine on a rank of its own."""
    made = Service(tmp_path / "apart", model, ranks=2)
    made.write(rollout=ROLLOUT)
    return made


@pytest.fixture
def together(model: Path, tmp_path: Path) -> Service:
    """A service whose engine is on the trainer's rank."""
    made = Service(tmp_path / "together", model)
    made.write()
    return made


def drawn(session: Session, sampler: str | None = None) -> Any:
    found = session.sample(PROMPTS, n=4, max_tokens=8, seed=3, sampler=sampler).result()
    return [[(a.tokens.tolist(), a.logprobs.tolist(), a.version) for a in each] for each in found]


def program(session: Session) -> tuple[Any, Path]:
    """Train and sample in turn, from the present weights, a sampler and the base; return what was
    drawn and the checkpoint."""
    reinforce(session, 1)
    session.save_sampler("one")
    before = drawn(session)
    data = [Datum([5, 6, 7, 8], weight=0.1)]
    waiting = [session.forward_backward(data), session.optim_step(lr=1e-3)]
    found = [before, drawn(session, "one"), drawn(session, "@base"), drawn(session)]
    assert [each.result() for each in waiting][1].version == 2
    scored = session.prompt_logprobs(PROMPTS, top=3).result()
    found += [[each.logprobs[1:].tolist(), each.top] for each in scored]
    with pytest.raises(OperationFailed, match="there is no sampler 'two'"):
        drawn(session, "two")
    reinforce(session, 1)
    return found, session.save().result().folder


@pytest.mark.release
def test_a_session_has_the_bits_of_one_whose_engine_is_on_the_trainer(
    apart: Service, together: Service
) -> None:
    """Routes are replayed: see `reinforce`."""
    with served(apart) as (client, _):
        found, folder = program(new_session(client, apart, "ann"))
    with served(together) as (client, _):
        expected, other = program(new_session(client, together, "ann"))
    assert found == expected
    assert found[0] == found[1] != found[3]
    require_same(folder, other)


@pytest.mark.release
def test_sessions_and_a_tenant_share_two_trainers_and_an_engine(
    model: Path, tmp_path: Path, together: Service
) -> None:
    apart = Service(tmp_path / "apart", model, ranks=3)
    apart.write(rollout=ROLLOUT, parallel={"expert_model_parallel_size": 2})
    apart.add("bob", num_steps=3)
    with served(apart) as (client, process):
        ann, cec = (new_session(client, apart, name) for name in ("ann", "cec"))
        samples = [cec.sample(PROMPTS, n=16, max_tokens=20, seed=1) for _ in range(3)]
        reinforce(ann, 2)
        assert ann.save().result().version == 2
        assert len({str([a.tokens.tolist() for a in each.result()[0]]) for each in samples}) == 1
        wait_for(lambda: client.control.tenant("bob")["state"] == "done", process)
        ann.pause()
        ann.resume()
        assert ann.wait_open() == 2
        reinforce(ann, 1)
    apart.train_alone("bob", tmp_path / "bob")
    # Among the samples of others, its own are not all admitted at once, so that some find a prefix.
    require_same_bits(apart.run_of("bob"), tmp_path / "bob", but=["routing/cached_rows"])


@pytest.mark.release
def test_samples_survive_the_loss_of_an_engine_and_of_a_worker(apart: Service) -> None:
    with served(apart) as (client, process):
        session = new_session(client, apart, "ann")
        reinforce(session, 1)

        def ask() -> Future[Any]:
            return session.sample(PROMPTS, n=64, max_tokens=40, seed=3)

        def numbers(future: Future[Any]) -> Any:
            return [[a.tokens.tolist() for a in each] for each in future.result(timeout_s=300)]

        whole = numbers(ask())
        for word in ("sglang", "mrl.service.rollout_worker"):
            broken = ask()
            while client.control.operation("ann", broken.id)["state"] == "queued":
                time.sleep(0.01)
            kill_one(word, process.pid)
            assert numbers(broken) == whole, word
        reinforce(session, 1)
        assert session.save().result().version == 2


@pytest.mark.release
def test_a_killed_service_goes_on_from_its_checkpoint(apart: Service, together: Service) -> None:
    process = apart.start()
    try:
        wait_for((apart.folder / "control.sock").exists, process)
        session = new_session(ServiceClient(apart.folder), apart, "ann")
        reinforce(session, 2)
        session.save_sampler("two")
        assert session.save().result().version == 2
        expected = drawn(session)
        reinforce(session, 1)
        waiting = session.sample([[5, 6]], n=64, max_tokens=40)
    finally:
        kill_all(process.pid)
    with served(apart) as (client, _):
        with pytest.raises(OperationLost):
            waiting.result(timeout_s=60)
        again = client.session("ann")
        assert again.wait_open() == 2
        assert drawn(again) == drawn(again, "two") == expected
        reinforce(again, 2)
        folder = again.save().result().folder
    with served(together) as (client, process):
        whole = new_session(client, together, "ann")
        reinforce(whole, 2)
        reinforce(whole, 2)
        require_same(folder, whole.save().result().folder)
        process.send_signal(signal.SIGTERM)
