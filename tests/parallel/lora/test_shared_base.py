"""Several policies over one base: each has the bits that it has alone, whoever else is there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.types import Sample
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.conftest import make_samples
from tests.parallel.layouts import join_mesh
from tests.parallel.lora.tenants import differences, make, make_base, state, step
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks

STEPS = {"a": 2, "b": 3, "c": 2, "a2": 1}
"""Names of policies, which begin with that of their tenant, and how many steps each takes."""


def base_bits(base: SharedBase) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in base._tensors()]


def alone(name: str, path: Path, mesh: Mesh, samples: list[Sample], dtype: Any) -> list[Any]:
    policy = make(name, path, mesh, dtype=dtype)
    found = [{**step(name, policy, mesh, samples), **state(policy)} for _ in range(STEPS[name])]
    policy.close()
    return found


def interleaved(
    path: Path, sizes: dict[str, int], samples: list[Sample], dtype: str, seed: int
) -> dict[str, Any]:
    """Train all in a random order over one base, another policy being made and closed in between."""
    mesh = join_mesh(path, sizes)
    own = {name: alone(name, path, mesh, samples, dtype) for name in STEPS}
    order = [name for name, count in STEPS.items() for _ in range(count)]
    random.Random(seed).shuffle(order)
    base = make_base(path, mesh, dtype)
    before, where = base_bits(base), []
    policies: dict[str, Policy] = {}
    found: dict[str, list[Any]] = {name: [] for name in STEPS}
    swaps = []
    for name in order:
        if name not in policies:
            policies[name] = make(name, path, mesh, base, dtype)
        policy = policies[name]
        swaps.append(policy.mount())
        found[name].append({**step(name, policy, mesh, samples), **state(policy)})
        where.append({kind: list(count) for kind, count in base.ledger.where().items()})
        if len(found[name]) == STEPS[name] and name == "a2":
            policies.pop(name).close()
    base.unmount()
    result = {
        "different": differences(found, own),
        "base": differences(base_bits(base), before),
        "order": order,
        "where": where,
        "moved": [swap.num_bytes for swap in swaps],
        "seconds": [swap.seconds for swap in swaps],
        "trained": [
            bool(differences(own[name][0]["adapter"], own[name][-1]["adapter"]))
            for name in ("a", "b", "c")
        ],
    }
    for policy in policies.values():
        policy.close()
    result["left"] = sorted(base.ledger.where())
    result["host"] = base.ledger.host_buffer_bytes
    base.close()
    return result


def check(found: dict[str, Any]) -> None:
    assert found["different"] == [], found["order"]
    assert found["base"] == []
    assert all(found["trained"])
    for name, where in zip(found["order"], found["where"], strict=True):
        assert where.pop("base")[0] > 0
        for kind, (device, host, freed) in where.items():
            if kind.startswith(f"{name}/"):
                assert (host, freed) == (0, 0), kind
                assert device > 0, kind
            elif kind.endswith("/gradients"):
                assert (device, host) == (0, 0), kind
            else:
                assert (device, freed) == (0, 0), kind
                assert host > 0, kind
    assert max(found["moved"]) > 0
    assert found["left"] == ["base"]
    assert found["host"] == 0


def test_policies_over_one_base_have_the_bits_of_each_alone(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (found,) = run_ranks(1, interleaved, model_path, {}, samples, "float32", 5, folder=tmp_path)
    check(found)


@pytest.mark.release
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"tensor": 2}, "float32"),
        ({}, "float32"),
        ({"expert": 2}, "bfloat16"),
        ({"pipeline": 2}, "float32"),
        ({"tensor": 2, "expert_tensor": 2}, "float32"),
    ],
    ids=["TP2", "DP2", "EP2 bf16", "PP2", "TP2 ETP2"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_so_have_those_on_two_ranks(
    sizes: dict[str, int], dtype: str, seed: int, model_path: Path, tmp_path: Path
) -> None:
    arguments = model_path, sizes, make_samples(), dtype, seed
    for found in run_ranks(2, interleaved, *arguments, folder=tmp_path):
        check(found)


@pytest.mark.release
def test_so_have_those_over_latent_attention(tmp_path: Path) -> None:
    path = write_tiny("deepseek_v3", tmp_path / "model")
    samples = tiny_samples(path, [7, 31, 12, 40, 9, 22, 17, 5, 28, 33, 6, 14, 19])
    arguments = path, {}, samples, "float32", 3
    (found,) = run_ranks(1, interleaved, *arguments, folder=tmp_path / "out")
    check(found)
