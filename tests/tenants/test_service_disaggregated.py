"""Services whose engines are on ranks of their own: tenants of different bounds, and what gets lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.service.client import NobodyListens
from mrl.toy_model import write_toy_model
from tests.tenants.serving import Service, require_same_bits, rows_of, wait_for

pytestmark = pytest.mark.timeout(1200)

AHEAD: dict[str, dict[str, Any]] = {
    "ann": {},
    "bob": {
        "async": {"max_staleness": 1, "deterministic": True},
        "algorithm": {"name": "grpo", "old_logprobs": "rollout"},
    },
    "cec": {
        "async": {"max_staleness": 2, "deterministic": True},
        "algorithm": {"name": "gspo", "importance": "tis"},
    },
}
"""How far the engines may run ahead of each tenant."""
ROLLOUT = {
    "placement": "disaggregated",
    "num_ranks": 1,
    "batch_invariant": True,
    "context_len": 64,
    "max_total_tokens": 2048,
}
SLOW_REWARD = """
import time

def reward(completions, **_):
    time.sleep(0.2)
    return [float(len(each)) for each in completions]
"""
MOMENTARY = (
    "async/engine_lag",
    "async/leased_groups",
    "async/queue_age",
    "async/queued_groups",
    "async/versions_in_flight",
    "rollout/canary_abs_mean",
    "rollout/sync_bytes",
)
"""Metrics of a moment: where a tenant's engines are ahead, they depend on how fast everything is."""


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.fixture
def service(model: Path, tmp_path: Path) -> Service:
    made = Service(tmp_path / "service", model, ranks=2)
    made.write(rollout=ROLLOUT)
    return made


@pytest.mark.release
def test_a_tenant_trains_while_the_engine_is_a_step_ahead(service: Service) -> None:
    service.add("bob", num_steps=3, **AHEAD["bob"])
    service.run()
    assert service.states()["bob"] == ("done", "")
    rows = rows_of(service.run_of("bob"))
    assert [row["staleness/max"] for row in rows] == [0, 1, 1]
    assert all(row["routing/replay_coverage"] == 1.0 for row in rows)


@pytest.mark.release
def test_tenants_of_different_bounds_have_the_bits_of_their_runs_alone(
    service: Service, tmp_path: Path
) -> None:
    for name, more in AHEAD.items():
        service.add(name, num_steps=4, **more)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    for name in AHEAD:
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name, but=MOMENTARY)


@pytest.mark.release
@pytest.mark.parametrize("num_engines", [1, 2])
def test_several_trainers_or_engines_give_the_bits_of_a_run_alone(
    model: Path, tmp_path: Path, num_engines: int
) -> None:
    service = Service(tmp_path / "service", model, ranks=3)
    service.write(rollout={**ROLLOUT, "num_ranks": num_engines})
    for name in ("ann", "bob"):
        service.add(name, num_steps=3, **AHEAD[name])
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    for name in ("ann", "bob"):
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name, but=MOMENTARY)


@pytest.mark.release
def test_a_lost_engine_and_a_lost_worker_cost_time_only(service: Service, tmp_path: Path) -> None:
    """First the engine's processes are killed, then the whole worker; both without a warning. `bob`
    generates a step ahead: what the lost worker had begun is generated again by newer weights
    (docs/async.md), so that its bits are its own only before."""
    for name in ("ann", "bob"):
        service.add(name, num_steps=8, **AHEAD[name])
    process = service.start("--until-done")

    def has_done(num: int) -> bool:
        return all(steps_of(service, name) >= num for name in ("ann", "bob"))

    try:
        wait_for(lambda: has_done(1), process)
        kill_one("sglang", process.pid)
        wait_for(lambda: has_done(3), process)
        kill_one("mrl.service.rollout_worker", process.pid)
        assert process.wait(400) == 0
    finally:
        process.kill()
    for name in ("ann", "bob"):
        service.train_alone(name, tmp_path / name)
    lost = {"rollout/engine_restarts", "async/lost_workers"}
    require_same_bits(service.run_of("ann"), tmp_path / "ann", but=(*MOMENTARY, *lost))
    calm = rows_of(tmp_path / "bob")
    for row, other in zip(rows_of(service.run_of("bob")), calm, strict=True):
        assert row["staleness/max"] <= 1
        assert row["async/staleness/0"] + row["async/staleness/1"] == 4
        if not row["async/lost_workers"]:
            different = {key for key in row if row[key] != other.get(key)}
            assert different <= {*MOMENTARY, *lost}
    for name in ("ann", "bob"):
        assert rows_of(service.run_of(name))[-1]["async/lost_workers"] == 1


@pytest.mark.release
def test_what_goes_wrong_with_one_tenant_on_a_rollout_rank_pauses_it_alone(
    service: Service, tmp_path: Path
) -> None:
    raises, hangs = tmp_path / "raises.py", tmp_path / "hangs.py"
    raises.write_text("def reward(*_, **__):\n    raise ValueError('no reward today')\n")
    hangs.write_text("import time\ndef reward(*_, **__):\n    time.sleep(10**6)\n")
    service.add("ann", num_steps=4)
    service.add("raises", num_steps=4, reward=f"{raises}:reward")
    service.add("hangs", num_steps=4, reward=f"{hangs}:reward", reward_timeout_s=2.0)
    service.add("gone", num_steps=400)
    process = service.start("--until-done")
    try:
        wait_for(lambda: steps_of(service, "gone") >= 1, process)
        service.client().remove("gone")
        assert process.wait(400) == 0
    finally:
        process.kill()
    states = service.states()
    assert states["ann"] == ("done", "")
    assert states["raises"][0] == "paused"
    assert "no reward today" in states["raises"][1]
    assert states["hangs"][0] == "paused"
    service.train_alone("ann", tmp_path / "ann")
    require_same_bits(service.run_of("ann"), tmp_path / "ann")


@pytest.mark.release
def test_a_killed_service_continues_with_the_same_bits(service: Service, tmp_path: Path) -> None:
    for name, more in AHEAD.items():
        service.add(name, num_steps=6, **more)
    for least in (1, 3):
        process = service.start()
        try:
            wait_for(lambda least=least: steps_of(service, "bob") >= least, process)
        finally:
            kill_all(process.pid)
    service.run()
    for name in AHEAD:
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name, but=MOMENTARY)


@pytest.mark.release
def test_tenants_whose_engines_run_freely(service: Service, tmp_path: Path) -> None:
    """The limit of the rewards' seconds is one of a step, also where rewards never pause."""
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW_REWARD)
    service.write(rollout=ROLLOUT, tenants={"max_reward_s": 5.0})
    free = {"async": {"max_staleness": 2}, "algorithm": {"name": "gspo", "importance": "tis"}}
    limits = {"reward": f"{slow}:reward", "reward_timeout_s": 5.0}
    service.add("ann", num_steps=10, **free, **limits)
    service.add("bob", num_steps=5, reward_timeout_s=5.0)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    rows = rows_of(service.run_of("ann"))
    assert [row["step"] for row in rows] == list(range(10))
    assert max(row["staleness/max"] for row in rows) in (1, 2)


def steps_of(service: Service, name: str) -> int:
    """Return the steps that a tenant has done; -1 where no service listens."""
    try:
        return service.client().tenant(name)["steps_done"]
    except NobodyListens:
        return -1


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def kill_one(word: str, pid: int) -> None:
    """Kill a process of the service whose command line has the word."""
    for each in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if word in " ".join(each.cmdline()):
                each.kill()
                return
    raise AssertionError(f"no process of {word}")


def kill_all(pid: int) -> None:
    """Kill the launcher and all ranks of a service at once; what is left has to end by itself."""
    everyone = [psutil.Process(pid), *descendants(pid)]
    for each in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(everyone, timeout=60)
