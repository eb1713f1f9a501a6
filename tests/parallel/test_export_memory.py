"""The export holds its shard and two buckets at most; `benchmarks/export_memory.py` has the figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.export_memory import BUCKET_BYTES, MODEL, measure
from tests.parallel.conftest import write_model
from tests.ranks import run_ranks

SIZES = {"tensor": 2, "pipeline": 2, "expert": 2}


def test_a_rank_holds_its_shard_and_two_buckets(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **MODEL)
    ranks = run_ranks(4, measure, model, SIZES, BUCKET_BYTES, folder=tmp_path / "out")
    for rank in ranks:
        assert rank["shard_bytes"] < rank["model_bytes"] / 3
        assert rank["bucket_bytes"] < rank["model_bytes"] / 10
        assert rank["bucket_bytes"] * 0.9 < rank["peak_bytes"] < 2 * rank["bucket_bytes"]
