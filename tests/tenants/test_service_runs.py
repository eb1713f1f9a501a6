"""Services with the real engine: each tenant's run is bit for bit its own, whoever is beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.toy_model import write_toy_model
from mrl.view.service import collect_service
from tests.tenants.serving import (
    TENANTS,
    Service,
    require_same_bits,
    require_sane_rounds,
    rows_of,
    wait_for,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.fixture
def service(model: Path, tmp_path: Path) -> Service:
    made = Service(tmp_path / "service", model)
    made.write()
    return made


def test_a_tenant_trains_beside_one_whose_reward_raises(service: Service, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def reward(*_, **__):\n    raise ValueError('no reward today')\n")
    service.add("ann", num_steps=2)
    service.add("bad", num_steps=2, reward=f"{bad}:reward")
    service.run()
    states = service.states()
    assert states["ann"] == ("done", "")
    assert states["bad"][0] == "paused"
    assert "no reward today" in states["bad"][1]
    rows = rows_of(service.run_of("ann"))
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows)
    assert all(row["routing/replay_coverage"] == 1.0 for row in rows)


@pytest.mark.release
def test_three_tenants_have_the_bits_of_their_runs_alone(service: Service, tmp_path: Path) -> None:
    service.add(*TENANTS, num_steps=4)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    require_sane_rounds(service.folder, *TENANTS)
    for name in TENANTS:
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name)


@pytest.mark.release
def test_joining_pausing_and_leaving_change_nobodys_bits(service: Service, tmp_path: Path) -> None:
    """bob joins while ann trains, is paused and resumed; cec joins and is removed."""
    service.add("ann", num_steps=8)
    process = service.start()
    client = service.client()

    def steps(name: str) -> int:
        return client.tenant(name)["steps_done"]

    try:
        wait_for((service.folder / "control.sock").exists, process)
        wait_for(lambda: steps("ann") >= 1, process)
        client.add("bob", service.recipe("bob", 4))
        client.add("cec", service.recipe("cec", 8))
        wait_for(lambda: steps("bob") >= 1 and steps("cec") >= 1, process)
        assert 0 < client.metrics()["service/engine_occupancy"] <= 1
        page = collect_service(service.folder, service.folder / "view.html")
        assert "it ran when this page was made" in page["state"]
        assert [each["state"] for each in page["tenants"]] == ["running"] * 3
        client.pause("bob")
        client.remove("cec")
        before = steps("ann")
        wait_for(lambda: steps("ann") >= min(8, before + 2), process)
        client.resume("bob")
        wait_for(lambda: {s for s, _ in service.states().values()} == {"done"}, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    for name in ("ann", "bob"):
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name)
