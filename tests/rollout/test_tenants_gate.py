"""The gate and the policy of the service before a real engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from rollout_helpers import make_requests
from tenant_helpers import Tenant, make_tenants

from mrl.engines.base import SamplingParams
from mrl.service.schedule import Admission

pytestmark = pytest.mark.release
ROOM = 600


def test_a_thousand_requests_of_one_tenant_starve_no_other(toy_folder, tmp_path):
    """Those of bob come last. First come, first served they would finish last, too."""
    engine = make_tenants(
        toy_folder, tmp_path / "engine.log", policy=Admission(), max_total_tokens=ROOM
    )
    engine.start()
    try:
        assert engine.gate.capacity_tokens == ROOM
        ada, bob = (Tenant(engine, name, toy_folder, tmp_path) for name in ("ada", "bob"))
        for tenant in (ada, bob):
            tenant.push(1)
        many = make_requests(60, SamplingParams(40, 40), seed=1)
        few = make_requests(6, SamplingParams(40, 40), seed=2)
        order: list[str] = []

        def run(tenant, requests):
            found = []
            for completion in tenant.endpoint.generate(requests):
                order.append(tenant.name)
                found.append(completion)
            return found

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(run, ada, many)
            while not order:
                pass
            second = pool.submit(run, bob, few)
            assert bob.worst(1, few, second.result()) < 1e-4
            assert ada.worst(1, many, first.result()) < 1e-4
        last_of_bob = max(place for place, name in enumerate(order) if name == "bob")
        assert last_of_bob < len(order) * 2 / 3, order
        # What waits at the gate is aborted, dropped and left without a trace in the engine.
        running = ada.endpoint.generate(many)
        next(running)
        ada.endpoint.abort()
        done = list(running)
        assert len(done) == len(many) - 1
        assert sum(c.finish_reason == "abort" for c in done) > 40
        running = ada.endpoint.generate(many)
        next(running)
        engine.remove_endpoint("ada")
        with pytest.raises(RuntimeError, match="was removed"):
            list(running)
        assert bob.worst(1, few, list(bob.endpoint.generate(few))) < 1e-4
    finally:
        engine.stop()
