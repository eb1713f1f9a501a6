"""Services on two ranks: each tenant has the bits of `mrl train` alone on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.toy_model import write_toy_model
from tests.tenants.serving import Service, require_same_bits, rows_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]

ROLLOUT = {"batch_invariant": True, "context_len": 64, "max_total_tokens": 2048}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "tensor_parallel": {"parallel": {"tensor_model_parallel_size": 2}},
}
"""Each rank has an engine of its own: `rollout.batch_invariant` needs that."""


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tenants_on_two_ranks_have_the_bits_of_their_runs_alone(
    model: Path, tmp_path: Path, layout: str
) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    service.write(**LAYOUTS[layout])
    service.add("ann", "bob", num_steps=3)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    for name in ("ann", "bob"):
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name)


def test_tenants_share_an_engine_of_two_ranks(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    parallel = {"tensor_model_parallel_size": 2}
    service.write(
        parallel=parallel,
        rollout={**ROLLOUT, "tensor_parallel_size": 2, "batch_invariant": False},
    )
    service.add("ann", "bob", num_steps=3)
    service.run()
    assert {state for state, _ in service.states().values()} == {"done"}
    for name in ("ann", "bob"):
        rows = rows_of(service.run_of(name))
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows)
        assert all(row["routing/replay_coverage"] == 1.0 for row in rows)
