"""rollout.batch_invariant: completions, log-probs and routes of a tenant have the bits of it alone.

Alone means an engine of this one adapter. The mixtures have others, of other ranks, modules and kinds
of experts, in an engine with room for the largest of them and a cache of another size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rollout_helpers import make_engine, make_prompts
from tenant_helpers import LIMITS, TENANTS, Tenant, buckets_of, make_tenants

from mrl.config.adapter import AdapterLimits
from mrl.engines.base import Completion, Request, RolloutEngine, SamplingParams

pytestmark = pytest.mark.release
NUM_NEW = 60
OWN = {
    "plain": SamplingParams(NUM_NEW, 0),
    "greedy": SamplingParams(NUM_NEW, 0, temperature=0.0),
    "likeliest": SamplingParams(NUM_NEW, 0, temperature=0.7, top_k=1),
    "truncated": SamplingParams(NUM_NEW, 0, temperature=0.7, top_p=0.9, top_k=20),
}
ROOMS = {"as alone": 4096, "small": 500}
"""Tokens in the cache; in the small one requests are taken back and computed anew."""
Bits = dict[str, tuple[bytes, bytes, bytes]]


def own_requests(sampling: SamplingParams) -> list[Request]:
    """Groups of four: most of them find their prompt in the cache."""
    prompts = make_prompts(3, seed=11, num_tokens=37)
    return [
        Request(f"{p.prompt_id}/{i}", p.token_ids, 100 * i + n, sampling)
        for n, p in enumerate(prompts)
        for i in range(4)
    ]


def other_requests(order: random.Random) -> list[Request]:
    """Their lengths and their sampling are random."""
    found = []
    for number in range(order.randrange(6, 14)):
        (prompt,) = make_prompts(
            1, seed=order.randrange(1 << 20), num_tokens=order.randrange(2, 90)
        )
        num_new = order.randrange(1, 60)
        sampling = order.choice(list(OWN.values()))
        sampling = SamplingParams(num_new, 0, sampling.temperature, sampling.top_p, sampling.top_k)
        found.append(Request(f"{number}", prompt.token_ids, order.randrange(1 << 40), sampling))
    return found


def bits_of(completions: Sequence[Completion]) -> Bits:
    found = {}
    for completion in completions:
        assert completion.routing is not None
        found[completion.request_id] = (
            completion.output_ids.numpy().tobytes(),
            completion.logprobs.numpy().tobytes(),
            completion.routing.expert_ids.numpy().tobytes(),
        )
    return found


def alone(folder: Path, tmp: Path, name: str, *, is_invariant: bool) -> dict[str, Bits]:
    """The bits of an engine that serves this adapter and nothing else, one sort of sampling a time."""
    log_path = tmp / f"{name}.log"
    engine = make_engine(folder, log_path, TENANTS[name], batch_invariant=is_invariant)
    engine.start()
    try:
        matrices = Tenant.matrices_of(folder, name, 1)
        engine.endpoint.update_weights(buckets_of(matrices, 1), 1)
        return {
            how: bits_of(list(engine.endpoint.generate(own_requests(sampling))))
            for how, sampling in OWN.items()
        }
    finally:
        engine.stop()


def in_random_order(
    engine: RolloutEngine, requests: list[Request], order: random.Random
) -> list[Completion]:
    """Send them in several calls beside each other, of random sizes."""
    order.shuffle(requests)
    parts, start = [], 0
    while start < len(requests):
        size = order.randrange(1, len(requests))
        parts.append(requests[start : start + size])
        start += size
    with ThreadPoolExecutor(len(parts)) as pool:
        calls = [
            pool.submit(lambda part=part: list(engine.endpoint.generate(part, concurrent=True)))
            for part in parts
        ]
    return [completion for call in calls for completion in call.result()]


def mixtures(
    folder: Path, tmp: Path, names: Sequence[str], limits: AdapterLimits, **config: object
) -> list[tuple[str, str, list[Completion]]]:
    """(name, how it samples, what came) of the first two tenants among the requests of all."""
    engine = make_tenants(folder, tmp / "mixed.log", limits, **config)
    engine.start()
    found = []
    try:
        tenants = {name: Tenant(engine, name, folder, tmp) for name in names}
        for tenant in tenants.values():
            tenant.push(1)
        for seed, how in enumerate(OWN):
            order = random.Random(seed)
            with ThreadPoolExecutor(len(names)) as pool:
                calls = {
                    name: pool.submit(
                        in_random_order,
                        tenant,
                        own_requests(OWN[how]) if number < 2 else other_requests(order),
                        random.Random(order.random()),
                    )
                    for number, (name, tenant) in enumerate(tenants.items())
                }
            found += [(name, how, calls[name].result()) for name in names[:2]]
            tenants[names[0]].push(1)  # the cache of its version is gone; that of others is kept
    finally:
        engine.stop()
    return found


@pytest.fixture(scope="module")
def expected(toy_folder, tmp_path_factory) -> dict[str, dict[str, Bits]]:
    tmp = tmp_path_factory.mktemp("alone")
    return {name: alone(toy_folder, tmp, name, is_invariant=True) for name in ("ada", "bob")}


@pytest.mark.parametrize("room", list(ROOMS))
def test_what_others_send_changes_no_bit(toy_folder, tmp_path, expected, room):
    names = ["ada", "bob", "cleo", "dan"]
    config = {"max_total_tokens": ROOMS[room], "batch_invariant": True}
    found = mixtures(toy_folder, tmp_path, names, LIMITS, **config)
    assert len(found) == 2 * len(OWN)
    retracted = sum(completion.num_retractions for _, _, done in found for completion in done)
    assert (retracted > 0) == (room == "small")
    for name, how, done in found:
        bits = bits_of(done)
        assert bits.keys() == expected[name][how].keys()
        wrong = [rid for rid in bits if bits[rid] != expected[name][how][rid]]
        assert not wrong, (name, how, wrong)


def test_without_the_key_bits_depend_on_others(toy_folder, tmp_path):
    """If this fails, the test above proves nothing on this machine."""
    expected = {"ada": alone(toy_folder, tmp_path, "ada", is_invariant=False)}
    found = mixtures(toy_folder, tmp_path, ["ada", "cleo", "bob"], LIMITS)
    different = [
        (how, rid, part)
        for name, how, done in found
        if name == "ada"
        for rid, bits in bits_of(done).items()
        for part in range(3)
        if bits[part] != expected[name][how][rid][part]
    ]
    print(f"{len(different)} of {3 * 12 * len(OWN)} differ")
    assert {part for _, _, part in different} >= {1}  # log-probs
