"""Ranks agree on how a tenant's work went, also where some of them are in the middle of it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mrl.service.consensus import FailedAlone, FailureConsensus
from tests.ranks import run_ranks


def on_one_rank() -> list[str]:
    """Rank 1 fails: together with the end of rank 0's work, and then while rank 0 is in a barrier."""
    dist.init_process_group("gloo")
    rank, consensus = dist.get_rank(), FailureConsensus(60.0)
    failures = ["", "no loss today"]
    said = [consensus.first(""), consensus.first(failures[rank], limit_s=60.0)]
    if rank == 1:
        try:
            consensus.first("no loss here", limit_s=0.2)
        except FailedAlone as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_a_rank_that_fails_waits_for_the_others_for_a_while(tmp_path: Path) -> None:
    both, alone = run_ranks(2, on_one_rank, folder=tmp_path)
    assert both == alone[:2] == ["", "no loss today"]
    assert "rank 1 failed alone (no loss here), and after 0.2 s the others" in alone[2]
