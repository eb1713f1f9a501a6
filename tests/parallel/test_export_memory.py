"""The export holds its shard and three buckets at most: one layout of `benchmarks/export_memory.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.release
def test_a_rank_holds_its_shard_and_three_buckets() -> None:
    command = [sys.executable, "-m", "benchmarks.export_memory", "TP2xPP2xEP2"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout.splitlines()[0])
    assert row["largest_shard_mb"] < row["model_mb"] / 3
    assert row["bucket_mb"] < row["model_mb"] / 10
    assert 1.9 < row["peak_in_buckets"] < 3
