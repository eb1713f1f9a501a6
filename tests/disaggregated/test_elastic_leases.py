"""Engines that are added and removed where engines run freely, and in a service."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.lease_schedule import LeaseSchedule
from mrl.engine_pool.remote.steps import fixed_coordinator
from mrl.engine_pool.remote.wire import Wire
from mrl.service.tenant_coordinator import TenantCoordinator
from tests.disaggregated.elastic_job import (
    HERE,
    Rank,
    Worker,
    begin,
    parts,
    send_weights,
    states,
    with_rank,
)
from tests.sample_groups import prompt
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers here stop no engine."""
    monkeypatch.setattr("mrl.engine_pool.remote.connections.GOODBYE_S", 0.1)


def leased(num_engines: int) -> Coordinator[LeaseSchedule]:
    keys = [
        *("rollout.placement=disaggregated", f"rollout.num_ranks={num_engines}"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "async.max_staleness=1"),
    ]
    recipe = load_recipe(ROOT / "launch/recipes/toy_moe.yaml", keys)
    schedule = LeaseSchedule(recipe, lambda num: [prompt(i) for i in range(num)])
    return Coordinator(Membership(num_engines), recipe.asynchronous, HERE, schedule)


def test_a_free_engine_finishes_its_lease_and_an_added_one_serves_at_once() -> None:
    two = leased(2)
    try:
        first, second = begin(two, 2)
        rank = with_rank(two, 1)
        for worker in (first, second):
            worker.wire.send({"type": "ask", "version": 0, "most": 1})
        first.heard("lease")
        lease, body = second.heard("lease")
        assert two.membership.describe()["engines"][1]["groups"] == 1
        two.membership.remove(1)
        second.wire.send({"type": "ask", "version": 0, "most": 2})  # gets no further one
        assert send_weights(two, 1) == [0]
        second.wire.send({"type": "group", "lease_id": lease["lease_id"], "num_failed": 0}, body)
        second.heard("stop")
        assert rank.heard() == ("leave", 1)
        assert two.membership.add() == [2]
        third = Worker(two, 2)
        wait_until(lambda: two._workers[2].can_receive)
        assert send_weights(two, 1) == [2]
        third.heard("receive")
        third.say_loaded(1)
        wait_until(lambda: states(two.membership)[2] == "serving")
    finally:
        two.close()


def test_the_leases_of_an_engine_that_is_removed_at_once_go_to_another_one() -> None:
    two = leased(2)
    try:
        first, second = begin(two, 2)
        with_rank(two, 0)
        first.wire.send({"type": "ask", "version": 0, "most": 8})
        for _ in range(4):  # as many as the bound allows
            first.heard("lease")
        second.wire.send({"type": "ask", "version": 0, "most": 8})
        two.membership.remove(0, now=True)
        for _ in range(4):
            second.heard("lease")
        leases = two._schedule.ledger.leases.values()
        assert {lease.worker for lease in leases} == {1}
        assert sorted(lease.item_id for lease in leases) == [0, 1, 2, 3]
    finally:
        two.close()


def process(service: TenantCoordinator, engine: int) -> Wire:
    """Return the connection of a rollout rank's process, whose engine has started."""
    wire = Wire(socket.create_connection(service.address))
    wire.send({"type": "hello", "engine": engine, "token": service.token})
    wire.send({"type": "started"})
    return wire


def test_an_engine_of_a_service_joins_each_tenant_and_leaves_when_none_needs_it() -> None:
    service = TenantCoordinator(Membership(1), HERE)
    tenants = [fixed_coordinator(service.membership, AsyncConfig(), HERE) for _ in range(2)]
    first_process = process(service, 0)
    rank = Rank(service)
    try:
        wait_until(lambda: 0 in service.membership._ranks)
        first = [begin(tenant, 1)[0] for tenant in tenants]
        assert service.membership.add() == [1]
        assert rank.heard() == ("start", 1)
        second_process = process(service, 1)
        wait_until(lambda: states(service.membership) == {0: "serving", 1: "serving"})
        second = Worker(tenants[0], 1)  # the other tenant does not know it yet
        wait_until(lambda: tenants[0]._workers[1].can_receive)
        assert send_weights(tenants[0], 0) == [1]
        second.heard("receive")
        second.say_loaded(0)
        wait_until(lambda: tenants[0]._workers[1].version == 0)
        ids = tenants[0].assign_parts(parts(0))
        assert len(ids) == 2
        assert len(tenants[1].assign_parts(parts(0))) == 1
        for worker in first:
            worker.heard_work()
        left = second.heard_work()
        service.membership.remove(0)  # the other tenant has nobody else
        assert [worker.heard_work().part for worker in ()] == []
        assert tenants[1]._engines.serving == {1}
        late = Worker(tenants[1], 1)
        wait_until(lambda: tenants[1]._workers[1].can_receive)
        first_process_stops = service.membership.describe()["engines"][0]["state"]
        assert first_process_stops == "leaving"
        second.deliver(left)
        for worker, tenant in zip(first, tenants, strict=True):
            (work,) = tenant._items.of_engine(0)
            worker.deliver(work)
            worker.heard("stop")
        assert first_process.receive()[0] == {"type": "stop"}
        assert send_weights(tenants[1], 1) == [1]
        late.heard("receive")
        assert not second_process.is_closed
    finally:
        for each in (*tenants, service):
            each.close()


def test_a_service_goes_on_if_an_added_engine_cannot_start() -> None:
    service = TenantCoordinator(Membership(1), HERE)
    own = process(service, 0)
    rank = Rank(service)
    try:
        wait_until(lambda: 0 in service.membership._ranks)
        service.membership.add(2)
        failing, dying = process(service, 1), process(service, 2)
        wait_until(lambda: states(service.membership)[2] == "serving")
        failing_again = Wire(socket.create_connection(service.address))
        assert failing_again is not failing
        dying.close()  # it served: its supervisor starts another worker
        wait_until(lambda: states(service.membership)[2] == "lost")
        service.check()
        service.membership.add()
        late = Wire(socket.create_connection(service.address))
        late.send({"type": "hello", "engine": 3, "token": service.token})
        late.send({"type": "failed", "error": "InputError", "text": "no such model"})
        wait_until(lambda: states(service.membership)[3] == "failed")
        service.check()
        assert rank.heard() == ("start", 1)
        assert not own.is_closed
    finally:
        service.close()
