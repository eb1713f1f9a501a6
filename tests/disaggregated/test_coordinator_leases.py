"""The coordinator of a free-running run: engines that come late, and one that never comes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.lease_schedule import LeaseSchedule
from mrl.errors import RunFailed, WrongWeights
from mrl.run.rollouts import encode_groups
from mrl.types import SampleGroup, VersionSpan
from tests.disaggregated.test_coordinator import HERE, Joined
from tests.sample_groups import prompt, sample

ROOT = Path(__file__).parents[2]


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator[LeaseSchedule]]:
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 0.1)
    keys = [
        *("rollout.placement=disaggregated", "rollout.num_ranks=2", "async.max_staleness=1"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
    ]
    recipe = load_recipe(ROOT / "launch/recipes/toy_moe.yaml", keys)
    schedule = LeaseSchedule(recipe, lambda num: [prompt(i) for i in range(num)])
    made = Coordinator(Membership(2), recipe.asynchronous, HERE, schedule)
    yield made
    made.close()


def asks(worker: Joined, version: int) -> None:
    worker.wire.send({"type": "ask", "version": version, "most": 1})


def test_a_run_begins_with_one_engine_and_the_other_gets_the_newest_weights_and_leases(
    coordinator: Coordinator[LeaseSchedule],
) -> None:
    first = Joined(coordinator, engine=1).started()
    coordinator.wait_until_started(60)
    assert [pair.engine for pair in coordinator.begin_update(0)] == [1]
    first.heard("receive")
    asks(first, 0)
    first.heard("lease")
    assert coordinator.metrics()["async/engines"] == 1
    with coordinator.paused() as leases:
        leases.start(1)
    second = Joined(coordinator, engine=0).started()
    batch = coordinator.wait_until(lambda leases: leases.take(1), 1)
    assert batch is None  # weights are to be sent first
    assert [pair.engine for pair in coordinator.begin_update(1)] == [0]
    assert second.heard("receive")[0]["version"] == 1
    asks(second, 1)
    second.heard("lease")
    assert coordinator.metrics()["async/engines"] == 2
    assert coordinator.metrics()["async/leased_groups"] == 2


def test_an_engine_that_never_comes_ends_the_run(coordinator: Coordinator[LeaseSchedule]) -> None:
    with pytest.raises(RunFailed, match=r"the engines \[0, 1\] .* did not start within 0\.2 s"):
        coordinator.wait_until_started(0.2)


def test_the_limit_holds_in_the_middle_of_the_run_too(
    coordinator: Coordinator[LeaseSchedule],
) -> None:
    worker = Joined(coordinator, engine=0).started()
    coordinator.wait_until_started(1.0)
    coordinator.begin_update(0)
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=r"the engines \[1\] .* did not start within 1 s"):
        coordinator.wait_until(lambda leases: leases.take(0), 0)
    assert time.monotonic() - begin < 30
    worker.wire.close()


def test_a_group_with_a_wrong_stamp_ends_the_run(coordinator: Coordinator[LeaseSchedule]) -> None:
    worker = Joined(coordinator, engine=0).started()
    coordinator.wait_until_started(60)
    coordinator.begin_update(0)
    worker.heard("receive")
    asks(worker, 0)
    message, _ = worker.heard("lease")
    made = dataclasses.replace(sample(4), weight_versions=(VersionSpan(1, 2, 6),))
    body = encode_groups([SampleGroup(prompt(0), [made, made])])
    worker.wire.send({"type": "group", "lease_id": message["lease_id"], "num_failed": 0}, body)
    with pytest.raises(WrongWeights, match="engine 0 says that weights 1 sampled tokens"):
        coordinator.wait_until(lambda leases: leases.take(0), 0)


def test_a_worker_that_joined_before_the_checkpoint_was_read_keeps_its_place(
    coordinator: Coordinator[LeaseSchedule],
) -> None:
    worker = Joined(coordinator, engine=0).started()
    coordinator.wait_until_started(60)
    with coordinator.paused() as leases:  # as a resume does it, after the start
        leases.resume(leases.waiting(), 0, leases.ledger.counts())
    coordinator.begin_update(0)
    worker.heard("receive")
    asks(worker, 0)
    worker.heard("lease")
    assert coordinator.num_lost == 0
