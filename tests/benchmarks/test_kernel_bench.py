"""benchmarks/bench_kernels.py runs, checks its kernels and writes what it promises. No timings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import bench_kernels
from tests.loop.forked import Command

ROOT = Path(__file__).parents[2]
RATIOS = {"vs_eager", "vs_compile", "vs_copy", "vs_liger", "vs_trl"}
KERNELS = {
    "policy_loss", "vp_logprob", "linear_logprob", "seq_logratio", "packed_gae", "moe_sort",
    "moe_permute", "paged_attention", "fused_experts", "seeded_sample",
    "rms_norm", "rotate", "block_quant", "training_step",
}  # fmt: skip
LOSSES = {"grpo", "gspo", "gspo+tis+k3", "cispo", "sapo"}
COLUMNS = {
    "kernel", "variant", "shape", "dtype", "threads", "num_rounds", "median_ms", "peak_bytes",
    "largest_errors",
} | RATIOS  # fmt: skip


def bench(arguments: list[str]) -> None:
    """`python -m benchmarks.bench_kernels`, less the imports of a new process."""
    assert sys.argv[1:] == arguments
    bench_kernels.main()


def bench_with_another_clip(arguments: list[str]) -> None:
    """Eager's clip differs: the two then compute different losses."""
    from benchmarks.kernel_bench import eager

    text = Path(eager.__file__).read_text()
    changed = text.replace("1.0 + settings.high", "1.5 + settings.high")
    assert changed != text
    own = vars(eager).copy()
    exec(compile(changed, eager.__file__, "exec"), own)
    eager.policy_loss = own["policy_loss"]
    bench(arguments)


def run_bench(
    folder: Path, *arguments: str, entry: Callable[[list[str]], None] = bench
) -> subprocess.CompletedProcess[str]:
    command = Command(["--quick", *arguments], os.environ, folder, ROOT, entry)
    return command.finish(120)


def test_every_kernel_in_short(tmp_path) -> None:
    output = tmp_path / "kernels.json"
    done = run_bench(tmp_path / "printed", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    rows = result["cases"]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["variant"] for row in rows if row["kernel"] == "policy_loss"} == LOSSES
    assert done.stdout.splitlines()[-1] == f"{len(rows)} passed, 0 failed"
    for row in rows:
        assert set(row) == COLUMNS
        assert all(isinstance(size, int) for size in row["shape"])
        assert row["threads"] == 1
        assert row["peak_bytes"]["kernel"] > 0
        assert {"kernel", "eager", "copy"} <= set(row["median_ms"])
        assert row["largest_errors"]["kernel"]
        assert row["vs_compile"] is None
        for name in RATIOS:
            assert row[name] is None or row[name] > 0
        assert row["vs_eager"] is not None
        assert row["vs_copy"] is not None

    assert "torch" in result["versions"]
    assert len(bench_kernels.table(rows).splitlines()) == len(rows) + 2


def test_a_kernel_that_disagrees_fails(tmp_path) -> None:
    only = ("--only", "policy_loss grpo")
    done = run_bench(tmp_path, *only, entry=bench_with_another_clip)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED policy_loss grpo" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"


def test_unknown_case_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--only", "no such kernel"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels", *arguments])
    with pytest.raises(SystemExit) as left:
        bench(arguments)
    assert left.value.code == 2
    assert "--only: got 'no such kernel'" in capsys.readouterr().err
