"""Names that are given anew, and sessions that are paused and resumed, within one turn of a real
service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.client import OperationLost
from mrl.toy_model import write_toy_model
from mrl.view.collect import collect
from tests.tenants.serving import Service, require_same_bits, wait_for
from tests.tenants.test_service_disaggregated import AHEAD, MOMENTARY, ROLLOUT
from tests.tenants.test_session_runs import new_session, reinforce, require_same, served

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def sequences_of(service: Service, name: str) -> list[float]:
    """Return the sequence number of the tenant `name` in each row of the service's metrics that has
    metrics of it. Those of its engine requests can be missing: rollout ranks report them later."""
    rows = map(json.loads, (service.folder / "metrics.jsonl").read_text().splitlines())
    key = f"service/{name}/sequence"
    return [row[key] for row in rows if key in row]


def replace_tenant(
    service: Service, process: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Give the name `ann` to another tenant while the first one's turn is under way, and run the same
    recipe as `bob` beside it."""
    client = service.client()
    old = service.recipe("ann", 400, **first)
    client.add("ann", {**old, "output_dir": str(service.run_of("old"))})
    wait_for(lambda: client.tenant("ann")["steps_done"] >= 1, process)
    client.remove("ann")
    for name in ("ann", "bob"):
        new = service.recipe("cec", 3, **second)
        client.add(name, {**new, "output_dir": str(service.run_of(name))})
    for name in ("ann", "bob"):
        wait_for(lambda name=name: client.tenant(name)["state"] == "done", process)


def test_a_new_owner_of_a_name_gets_nothing_of_the_old_one(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    service.write()
    with served(service) as (client, process):
        replace_tenant(service, process, {}, {})
        require_same_bits(service.run_of("ann"), service.run_of("bob"))
        owners = sequences_of(service, "ann")
        assert (owners[0], owners[-1]) == (1.0, 2.0)

        first = new_session(client, service, "s")
        reinforce(first, 2)
        waiting = [first.sample([[5, 6]], n=64, max_tokens=40), first.optim_step()]
        client.control.remove("s")
        again = client.create_session(
            "s", output_dir=service.run_of("s2"), lora={"rank": 8}, optimizer={"lr": 1e-3}
        )
        assert again.life != first.life
        for each in waiting[1:]:
            with pytest.raises(OperationLost):
                each.result(timeout_s=60)
        other = client.create_session(
            "t", output_dir=service.run_of("t"), lora={"rank": 8}, optimizer={"lr": 1e-3}
        )
        reinforce(again, 2)
        reinforce(other, 2)
        require_same(again.save().result().folder, other.save().result().folder)

        # Paused and resumed within one turn: the queue is lost, and a new life begins where it was.
        life, lost = again.life, [again.sample([[5, 6]], n=64, max_tokens=40), again.save()]
        again.pause()
        again.resume()
        with pytest.raises(OperationLost):
            lost[1].result(timeout_s=60)
        assert again.life != life
        assert again.wait_open() == 2
        reinforce(again, 1)
        reinforce(other, 1)
        require_same(again.save().result().folder, other.save().result().folder)
    page = collect(service.run_of("s2"), None, 64)
    samples = [sample for step in page["steps"] for sample in step["samples"]]
    assert [step["step"] for step in page["steps"]] == [0, 1, 2]
    assert len(samples) == 3 * 8
    assert all("\u2192" in sample["text"] for sample in samples)
    assert all(sample["max_d"] < 1e-3 for sample in samples)  # they were trained on


def test_a_new_owner_of_a_name_on_rollout_ranks(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    service.write(rollout=ROLLOUT)
    process = service.start()
    try:
        wait_for((service.folder / "control.sock").exists, process)
        replace_tenant(service, process, AHEAD["bob"], AHEAD["cec"])
    finally:
        process.terminate()
        process.wait(120)
    require_same_bits(service.run_of("ann"), service.run_of("bob"), but=MOMENTARY)
    owners = sequences_of(service, "ann")
    assert (owners[0], owners[-1]) == (1.0, 2.0)
