"""Several tenants on one real SGLang server, each against transformers with its adapter merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollout_helpers import make_prompts, make_requests, score, slow_steps
from tenant_helpers import TENANTS, Tenant, cached_rows, loaded, make_tenants

from mrl.engines.base import KV_CACHE, EngineLost, Request, SamplingParams
from mrl.engines.sglang.server import SGLangServer

TOLERANCE = 1e-4
LONG = 300


@pytest.fixture(scope="module")
def engine(toy_folder, tmp_path_factory) -> Iterator[SGLangServer]:
    engine = make_tenants(toy_folder, tmp_path_factory.mktemp("tenants") / "engine.log")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def tenants(engine, toy_folder, tmp_path_factory) -> dict[str, Tenant]:
    tmp = tmp_path_factory.mktemp("merged")
    return {name: Tenant(engine, name, toy_folder, tmp) for name in TENANTS}


def renamed(requests: list[Request], prefix: str) -> list[Request]:
    return [dataclasses.replace(r, request_id=f"{prefix}-{r.request_id}") for r in requests]


def test_no_prefix_crosses_tenants_or_versions(tenants, engine):
    """The counter is the engine's own: how much of a prompt it read from its cache."""
    ada, bob = tenants["ada"], tenants["bob"]
    ada.push(1)
    bob.push(1)
    requests = make_requests(2, SamplingParams(4, 4), seed=1, num_tokens=24)
    assert cached_rows(ada.endpoint, requests) == [0, 0]
    assert cached_rows(bob.endpoint, requests) == [0, 0]
    assert min(cached_rows(ada.endpoint, requests)) > 20
    assert min(cached_rows(bob.endpoint, requests)) > 20
    ada.push(2)
    assert cached_rows(ada.endpoint, requests) == [0, 0]
    assert min(cached_rows(bob.endpoint, requests)) > 20
    # A call of ada's alone begins with nothing cached, and touches nothing of bob's.
    done = list(ada.endpoint.generate(requests))
    assert [c.routing.num_cached_rows for c in done if c.routing is not None] == [0, 0]
    assert min(cached_rows(bob.endpoint, requests)) > 20
    # SGLang keeps adapters apart by itself, without the keys of mrl.
    for name, cached in (("ada@2", False), ("bob@1", False), ("ada@2", True)):
        body = {
            "input_ids": list(range(40)),
            "sampling_params": {"max_new_tokens": 1},
            "lora_path": name,
        }
        answer = engine.connection.post("/generate", body)
        assert (answer["meta_info"]["cached_tokens"] > 0) == cached


@pytest.mark.release
def test_every_tenant_is_its_merged_model(tenants):
    """All at once: more adapters than slots, of both kinds of experts, under ids that clash."""
    requests = make_requests(6, SamplingParams(16, 16), seed=2)
    for tenant in tenants.values():
        tenant.push(3)

    def run(tenant: Tenant):
        return [list(tenant.endpoint.generate(requests)) for _ in range(2)]

    with ThreadPoolExecutor(len(tenants)) as pool:
        rounds = dict(zip(tenants, pool.map(run, tenants.values()), strict=True))
    outputs = set()
    for name, tenant in tenants.items():
        for completions in rounds[name]:
            assert tenant.worst(3, requests, completions) < TOLERANCE
            assert {s.version for c in completions for s in c.weight_versions} == {3}
        outputs.add(tuple(tuple(c.output_ids.tolist()) for c in rounds[name][0]))
    assert len(outputs) == len(tenants)  # adapters that do nothing would pass
    assert [loaded(tenant.endpoint) for tenant in tenants.values()] == [[f"{n}@3"] for n in tenants]


@pytest.mark.release
def test_a_tenant_is_updated_while_others_generate(tenants):
    ada, cleo = tenants["ada"], tenants["cleo"]
    ada.push(4)
    cleo.push(4)
    long = make_requests(3, SamplingParams(LONG, LONG), seed=3)
    short = renamed(make_requests(1, SamplingParams(4, 4), seed=4), "short")
    running = [t.endpoint.generate([*short, *long], concurrent=True) for t in (ada, cleo)]
    with slow_steps():
        for each in running:
            assert next(each).request_id == "short-4-0"
        ada.push(5)
        assert loaded(ada.endpoint) == ["ada@4", "ada@5"]
        assert ada.endpoint.in_flight.any_open
        assert cleo.endpoint.in_flight.any_open
        # Canaries run beside what others have in flight.
        sequences = [prompt.token_ids for prompt in make_prompts(3, seed=7, num_tokens=30)]
        for sequence, got in zip(sequences, ada.endpoint.sequence_logprobs(sequences), strict=True):
            expected, _ = score(ada.oracle(5), sequence, 1, 1.0)
            assert (got[1:] - expected).abs().max() < TOLERANCE
        new = renamed(make_requests(2, SamplingParams(8, 8), seed=3), "new")
        assert ada.worst(5, new, list(ada.endpoint.generate(new, concurrent=True))) < TOLERANCE
    for tenant, each in zip((ada, cleo), running, strict=True):
        done = list(each)
        assert tenant.worst(4, long, done) < TOLERANCE
        assert {s.version for c in done for s in c.weight_versions} == {4}
    assert (loaded(ada.endpoint), loaded(cleo.endpoint)) == (["ada@5"], ["cleo@4"])


@pytest.mark.release
def test_an_abort_reaches_the_tenants_own_requests_alone(tenants):
    ada, bob = tenants["ada"], tenants["bob"]
    for tenant in (ada, bob):
        tenant.push(6)
    long = make_requests(2, SamplingParams(LONG, LONG), seed=3)
    short = renamed(make_requests(1, SamplingParams(4, 4), seed=4), "short")
    running = [t.endpoint.generate([*short, *long]) for t in (ada, bob)]
    with slow_steps():
        for each in running:
            next(each)
        ada.endpoint.abort()
    assert {c.finish_reason for c in running[0]} == {"abort"}
    assert bob.worst(6, long, list(running[1])) < TOLERANCE


@pytest.mark.release
def test_a_tenant_that_is_dropped_touches_nobody(tenants, engine, toy_folder, tmp_path):
    ada = tenants["ada"]
    ada.push(7)
    eve = Tenant.__new__(Tenant)
    TENANTS["eve"] = TENANTS["dan"]
    try:
        eve.__init__(engine, "eve", toy_folder, tmp_path)
        eve.push(1)
        long = make_requests(2, SamplingParams(LONG, LONG), seed=3)
        short = renamed(make_requests(1, SamplingParams(4, 4), seed=4), "short")
        running = [t.endpoint.generate([*short, *long]) for t in (ada, eve)]
        with slow_steps():
            for each in running:
                next(each)
            engine.remove_endpoint("eve")
        assert "eve" not in [each.name for each in engine.endpoints]
        with pytest.raises(RuntimeError, match="'eve' was removed"):
            list(running[1])
        for call in (
            lambda: eve.push(2),
            lambda: list(eve.endpoint.generate(long)),
            lambda: eve.endpoint.sequence_logprobs([torch.arange(4)]),
        ):
            with pytest.raises(RuntimeError, match="'eve' was removed"):
                call()
        assert loaded(eve.endpoint) == []
        assert ada.worst(7, long, list(running[0])) < TOLERANCE
        again = Tenant(engine, "eve", toy_folder, tmp_path / "again")
        again.push(1)
        new = make_requests(2, SamplingParams(8, 8), seed=3)
        assert again.worst(1, new, list(again.endpoint.generate(new))) < TOLERANCE
        engine.remove_endpoint("eve")
    finally:
        del TENANTS["eve"]


@pytest.mark.release
def test_the_engine_sleeps_as_a_whole(tenants, engine):
    ada, dan = tenants["ada"], tenants["dan"]
    ada.push(8)
    dan.push(8)
    requests = make_requests(2, SamplingParams(8, 8), seed=5)
    running = ada.endpoint.generate(requests)
    next(running)
    with pytest.raises(RuntimeError, match=r"sleep: the engine is awake, generating"):
        engine.sleep(1)
    running.close()
    with pytest.raises(RuntimeError, match=r"sleep\(2\): updates bring an adapter"):
        engine.sleep()
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="asleep"):
        next(dan.endpoint.generate(requests))
    with pytest.raises(RuntimeError, match="asleep"):
        dan.push(9)
    engine.wake()
    assert KV_CACHE not in engine.memory.asleep
    for tenant in (ada, dan):
        assert tenant.worst(8, requests, list(tenant.endpoint.generate(requests))) < TOLERANCE


@pytest.mark.release
def test_all_tenants_learn_of_a_lost_engine(tenants, engine):
    """Last of this file: the engine is another one afterwards."""
    ada, bob = tenants["ada"], tenants["bob"]
    for tenant in (ada, bob):
        tenant.push(10)
    long = make_requests(2, SamplingParams(LONG, LONG), seed=3)
    running = [t.endpoint.generate(long) for t in (ada, bob)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(list, each) for each in running]
        while not all(t.endpoint.in_flight.any_open for t in (ada, bob)):
            pass
        engine.connection.process.kill()
        for each in waiting:
            with pytest.raises(EngineLost):
                each.result()
    engine.start()
    with pytest.raises(RuntimeError, match="no weights"):
        next(ada.endpoint.generate(long))
    for tenant in (ada, bob):
        tenant.push(10)
        requests = make_requests(2, SamplingParams(8, 8), seed=5)
        assert tenant.worst(10, requests, list(tenant.endpoint.generate(requests))) < TOLERANCE
