"""Every rank lays out its own share of a checkpoint; rank 0 joins what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, default_planner

from benchmarks.shard_layout import as_item
from mrl.errors import RunFailed
from parallel.checkpoint.shard_writer import Item, ShardWriter, joined_metadata

WHOLE = (4, 6)


def shard(name: str, rows: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> ShardedTensor:
    size = (rows[1] - rows[0], WHOLE[1])
    data = torch.zeros(size, dtype=dtype)
    return ShardedTensor(name, data, dtype, size, WHOLE, (rows[0], 0), None)


def shares() -> list[list[ShardedTensor]]:
    """Three ranks' shares: a tensor in three rectangles, two on one rank; a whole one; a copy of it
    that is not written."""
    copy = shard("whole", (0, 4))
    copy.replica_id = 1
    return [
        [shard("split", (0, 1)), shard("split", (2, 4)), shard("whole", (0, 4))],
        [copy],
        [shard("split", (1, 2))],
    ]


def laid_out(folder: Path, shares: list[list[ShardedTensor]]) -> list[SavePlan]:
    """No process group is there: nobody is asked."""
    writers = [ShardWriter(folder, rank, len(shares)) for rank in range(len(shares))]
    pairs = zip(writers, shares, strict=True)
    return [writer.request(own, copy=False).async_fn_args[2] for writer, own in pairs]


def items(share: SavePlan) -> list[Item]:
    return [as_item(item) for item in share.items]


def test_joined_shares_are_what_torch_plans_for_all_ranks(tmp_path: Path) -> None:
    own = laid_out(tmp_path, shares())
    assert [share.storage_data.prefix for share in own] == ["__0_", "__1_", "__2_"]
    _, expected = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(own)
    assert joined_metadata([items(share) for share in own]) == expected


def test_the_error_of_a_rank_names_that_rank(tmp_path: Path) -> None:
    (tmp_path / "written_00002.json").write_text('{"error": "the disk is full"}')
    with pytest.raises(RunFailed, match="rank 2: the disk is full"):
        ShardWriter(tmp_path, 2, 3).wait(0.0)


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "message"),
    [
        ("split", (1, 2), torch.float32, "split is torch.bfloat16 .* torch.float32"),
        ("split", (1, 3), torch.bfloat16, "key:split has overlapping chunks"),
        ("split", (3, 5), torch.bfloat16, "key:split has out of bounds chunk"),
        ("other", (1, 4), torch.bfloat16, "of split are written"),
    ],
)
def test_shares_that_do_not_fit_together(
    name: str, rows: tuple[int, int], dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    wrong = shares()
    wrong[2] = [shard(name, rows, dtype)]
    with pytest.raises(ValueError, match=message):
        joined_metadata([items(share) for share in laid_out(tmp_path, wrong)])


def test_torch_2_11_says_only_whether_shares_fit_together(tmp_path: Path, monkeypatch) -> None:
    """There `_validate_global_plan` returns a bool and logs why; no checkpoint could be saved."""
    of_today = default_planner._validate_global_plan
    as_in_2_11 = staticmethod(lambda plans, metadata: not of_today(plans, metadata))
    monkeypatch.setattr(default_planner, "_validate_global_plan", as_in_2_11)
    assert joined_metadata([items(share) for share in laid_out(tmp_path, shares())])
    wrong = [*shares()[:2], [shard("split", (1, 3))]]
    with pytest.raises(ValueError, match="overlap or reach beyond"):
        joined_metadata([items(share) for share in laid_out(tmp_path, wrong)])
