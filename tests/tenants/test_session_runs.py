"""Sessions of a service with the real engine: their bits, the bits of others, faults and restarts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mrl.cli import main
from mrl.client import (
    Datum,
    Future,
    OperationFailed,
    OperationLost,
    Sample,
    ServiceClient,
    Session,
)
from mrl.config import DataConfig
from mrl.data.reader import read_sft_examples
from mrl.preflight.check import load_tokenizer
from mrl.toy_model import write_toy_model
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.hf_config import HfModel
from tests.tenants.serving import ROOT, Service, environment, require_same_bits, wait_for

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]

LORA = {"rank": 4, "alpha": 8, "experts": "per_expert"}
LR = 3e-3


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@contextmanager
def served(service: Service) -> Iterator[tuple[ServiceClient, subprocess.Popen[bytes]]]:
    """Run a service in the block."""
    (service.folder / "control.sock").unlink(missing_ok=True)  # that of a service that was killed
    process = service.start()
    try:
        wait_for((service.folder / "control.sock").exists, process)
        yield ServiceClient(service.folder), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def new_session(client: ServiceClient, service: Service, name: str, **keys: Any) -> Session:
    recipe = {"lora": LORA, "optimizer": {"lr": LR}, "train": {"micro_batch_tokens": 512}, **keys}
    return client.create_session(name, output_dir=service.run_of(name), **recipe)


def reinforce(session: Session, steps: int, between: Callable[[], None] = lambda: None) -> None:
    """Reward answers that begin with a small token: a tiny loop of PPO. `between` is called while the
    gradients wait for their step."""
    for step in range(steps):
        groups = session.sample([[5, 6, 7], [8, 9]], n=4, max_tokens=6, seed=step).result()
        data = []
        for group in groups:
            rewards = torch.tensor([float(answer.tokens[0] < 60) for answer in group])
            advantages = (rewards - rewards.mean()).tolist()
            data += [a.datum(r + 0.01, 1 / 8) for a, r in zip(group, advantages, strict=True)]
        passed = session.forward_backward(data, "ppo").result()
        assert abs(passed.metrics["ratio/mean"] - 1) < 1e-4
        assert passed.metrics["routing/replay_coverage"] == 1.0
        between()
        session.optim_step()


def tensors_of(folder: Path, *, adapter_only: bool = False) -> dict[str, torch.Tensor]:
    saved = SavedTensors(folder)
    names = [name for name in saved if not name.startswith("random.")]
    if adapter_only:
        names = [name for name in names if not name.startswith("exp_avg")]
    return {name: saved[name] for name in names}


def require_same(one: Path, other: Path, *, adapter_only: bool = False) -> None:
    ours, theirs = (tensors_of(f, adapter_only=adapter_only) for f in (one, other))
    assert ours
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def test_sft_by_a_client_has_the_bits_of_sft_in_a_recipe(model: Path, tmp_path: Path) -> None:
    rows, num_steps, batch = tmp_path / "sft.jsonl", 4, 4
    texts = [{"prompt": f"{letter}bcd", "completion": letter * 6} for letter in "abcdefgh"]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    service = Service(tmp_path / "service", model)
    service.write()
    sft = {"path": str(rows), "num_steps": num_steps, "batch_size": batch, "lr": LR}
    own = {"lora": LORA, "seed": 4, "sft": sft, "checkpoint": {"save_every": 1, "keep": 9}}
    service.add("ann", num_steps=1, **own)
    tokenizer = load_tokenizer(HfModel.read(model))
    examples = read_sft_examples(DataConfig(path=str(rows)), tokenizer, max_len=64)
    order = random.Random("warm start/4")
    with served(service) as (client, _):
        session = new_session(client, service, "bob", seed=4)
        for _ in range(num_steps):
            chosen = [examples[i] for i in order.sample(range(len(examples)), batch)]
            count = sum(len(e.token_ids) - e.prompt_len for e in chosen)
            data = [
                Datum(
                    e.token_ids.numpy(),
                    weights=[float(t >= e.prompt_len) for t in range(len(e.token_ids))],
                    weight=float(torch.tensor(1 / count)),
                )
                for e in chosen
            ]
            session.forward_backward(data)
            session.optim_step()
        saved = session.save().result()
    service.train_alone("ann", tmp_path / "alone")
    first = tmp_path / "alone/checkpoints/iter_0000000"
    require_same(saved.folder, first, adapter_only=True)
    main(["export", str(saved.folder), str(tmp_path / "peft")])
    assert (tmp_path / "peft/adapter_model.safetensors").is_file()


def test_a_session_and_a_tenant_do_not_change_each_others_bits(model: Path, tmp_path: Path) -> None:
    """Gradients wait for their step while the tenant is trained, and an operation of the session is not
    finite."""
    both, alone = Service(tmp_path / "both", model), Service(tmp_path / "alone", model)
    for each in (both, alone):
        each.write()
    both.add("bob", num_steps=6)
    with served(both) as (client, process):

        def steps() -> int:
            return client.control.tenant("bob")["steps_done"]

        def wait_for_a_step() -> None:
            before = steps()
            wait_for(lambda: steps() > before or steps() == 6, process)

        session = new_session(client, both, "ann")
        bad = Datum([5, 6, 7], advantages=[0, -1, -1], logprobs=[0, -1e30, -1e30])
        with pytest.raises(OperationFailed, match="not finite in the rows sequence 0"):
            session.forward_backward([bad], "importance_sampling").result()
        with pytest.raises(OperationFailed, match="its gradients are missing"):
            session.optim_step().result()
        reinforce(session, 3, wait_for_a_step)
        saved = session.save().result()
        wait_for(lambda: steps() == 6, process)
        assert client.control.tenant("ann")["state"] == "running"
    with served(alone) as (client, _):
        session = new_session(client, alone, "ann")
        reinforce(session, 3)
        other = session.save().result()
    require_same(saved.folder, other.folder)
    both.train_alone("bob", tmp_path / "bob")
    require_same_bits(both.run_of("bob"), tmp_path / "bob")


def test_a_session_survives_kill_9(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    process = service.start()
    try:
        wait_for((service.folder / "control.sock").exists, process)
        session = new_session(ServiceClient(service.folder), service, "ann")
        reinforce(session, 2)
        assert session.save().result().version == 2
        reinforce(session, 1)
        waiting = [session.sample([[5, 6]], n=64, max_tokens=40) for _ in range(4)]
        while session.version != 3:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with served(service) as (client, _):
        with pytest.raises(OperationLost):
            waiting[-1].result(timeout_s=60)
        with pytest.raises(OperationLost, match="was reopened"):
            session.optim_step()
        again = client.session("ann")
        assert again.wait_open() == 2
        reinforce(again, 3)
        killed = again.save().result()
        assert killed.version == 5
        other = new_session(client, service, "bob")
        reinforce(other, 2)
        reinforce(other, 3)
        whole = other.save().result()
        again.pause()
        again.resume()
        assert again.wait_open() == 5
        assert again.load(5).result() == 6
    require_same(killed.folder, whole.folder)


def test_a_session_on_two_ranks_replays_its_routes(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    service.write(parallel={"expert_model_parallel_size": 2})
    with served(service) as (client, _):
        session = new_session(client, service, "ann")
        reinforce(session, 2)
        assert session.save().result().version == 2


def test_samples_survive_the_loss_of_an_engine(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, process):
        session = new_session(client, service, "ann")
        reinforce(session, 1)

        def drawn() -> Future[list[list[Sample]]]:
            return session.sample([[5, 6], [7, 8, 9]], n=64, max_tokens=40, seed=3)

        whole, broken = drawn().result(), drawn()
        while session.status()["session"]["queued"] and not broken.done():
            found = client.control.operation("ann", broken.id)
            if found["state"] == "running":
                break
        for each in psutil.Process(process.pid).children(recursive=True):
            if each.name().startswith("sglang::sched"):
                each.kill()
        ours, theirs = (
            [[(a.tokens.tolist(), a.logprobs.tolist()) for a in answers] for answers in groups]
            for groups in (broken.result(), whole)
        )
        assert ours == theirs
        reinforce(session, 1)
        assert session.save().result().version == 2
    assert "starting another one" in service.folder.with_suffix(".log").read_text()


def test_the_example_learns(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, _):
        words = ["launch/client_loop.py", str(service.folder), "--steps", "12"]
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert client.control.tenants() == []
    losses, rewards = (
        [float(number) for number in line.split()[-12:]] for line in done.stdout.splitlines()[:2]
    )
    assert losses[-1] < losses[0] - 0.3
    assert sum(rewards[-6:]) / 6 > sum(rewards[:3]) / 3 + 0.04
    # Its name is another one in each start, because the name of a removed session is used up.
    assert f"mrl export {service.run_of('loop')}-" in done.stdout
