"""Gradients that are kept across a swap give the step that they would have given at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.types import Sample
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.optimizer.kept_gradients import KeptGradients
from parallel.policy import Policy
from tests.parallel.conftest import make_samples
from tests.parallel.layouts import join_mesh, loss, ready_batch
from tests.parallel.lora.tenants import TENANTS, differences, make, make_base, state, step
from tests.ranks import run_ranks


def compute(name: str, policy: Policy, mesh: Mesh, samples: list[Sample]) -> None:
    batch, _ = ready_batch(policy, mesh, samples[TENANTS[name].samples])
    policy.compute_gradients(batch, loss, TENANTS[name].replay)


def kept(path: Path, sizes: dict[str, int], samples: list[Sample]) -> dict[str, Any]:
    """Train a and c at once, and in two halves with the other one's work between them."""
    mesh = join_mesh(path, sizes)
    base: SharedBase = make_base(path, mesh)
    names = ("a", "c")
    found, own = {}, {}
    for name in names:
        policy = make(name, path, mesh)
        step(name, policy, mesh, samples)
        own[name] = state(policy)
        policy.close()
    policies = {name: make(name, path, mesh, base) for name in names}
    gradients = {name: KeptGradients(policy) for name, policy in policies.items()}
    for name, policy in policies.items():
        policy.mount()
        compute(name, policy, mesh, samples)
        gradients[name].add()
    for name in names:
        policies[name].mount()
        gradients[name].put_back()
        policies[name].apply_gradients()
        found[name] = state(policies[name])
    twice, largest = KeptGradients(policies["c"]), 0.0
    policies["c"].mount()
    for _ in range(2):
        compute("c", policies["c"], mesh, samples)
        twice.add()
    once = KeptGradients(policies["c"])
    once.add()
    for total, single in zip(twice._sums, once._sums, strict=True):
        largest = max(largest, float((total - 2 * single).abs().max() / single.abs().max()))
    return {"different": differences(found, own), "twice": largest, "bytes": once.num_bytes}


def check(found: dict[str, Any]) -> None:
    assert not found["different"]
    assert found["twice"] < 1e-6
    assert found["bytes"] > 0


def test_kept_gradients_have_the_bits_of_a_step_at_once(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (found,) = run_ranks(1, kept, model_path, {}, samples, folder=tmp_path)
    check(found)


@pytest.mark.release
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"pipeline": 2}, {}], ids=["EP2", "PP2", "DP2"])
def test_so_have_those_on_two_ranks(
    sizes: dict[str, int], model_path: Path, tmp_path: Path
) -> None:
    for found in run_ranks(2, kept, model_path, sizes, make_samples(), folder=tmp_path):
        check(found)
