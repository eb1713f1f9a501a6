"""The limits of collectives: every process group has the recipe's."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mrl.config import ParallelConfig
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.ranks import run_ranks


def limits_of_all_groups(timeout_s: float) -> list[float]:
    """Return the seconds that each group of this rank has, whoever made it: c10d lists them."""
    layout = ParallelConfig(tensor_model_parallel_size=2)
    init_mesh(ParallelDims.create(layout, 2), 0, timeout_s=timeout_s)
    groups = dist.distributed_c10d._world.pg_names
    limits = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
    return [limit.total_seconds() for limit in limits]


def test_all_groups_have_the_limit_of_the_recipe(tmp_path: Path) -> None:
    for limits in run_ranks(2, limits_of_all_groups, 77.5, folder=tmp_path):
        assert len(limits) > 10  # Megatron's too
        assert set(limits) == {77.5}
