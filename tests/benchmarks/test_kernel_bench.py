"""benchmarks/bench_kernels.py runs, checks its kernels and writes what it promises. No timings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.bench_kernels", "--quick"]
RATIOS = {"vs_eager", "vs_compile", "vs_copy", "vs_liger", "vs_trl"}
KERNELS = {
    "policy_loss", "vp_logprob", "linear_logprob", "seq_logratio", "packed_gae", "pack_routes",
    "unpack_routes", "training_step",
}  # fmt: skip
LOSSES = {"grpo", "gspo", "gspo+tis+k3", "cispo", "sapo"}
COLUMNS = {"kernel", "variant", "shape", "dtype", "threads", "peak_bytes"} | RATIOS


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_kernel_in_short(tmp_path) -> None:
    output = tmp_path / "kernels.json"
    done = run_bench("--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["variant"] for row in rows if row["kernel"] == "policy_loss"} == LOSSES
    assert done.stdout.splitlines()[-1] == f"{len(rows)} passed, 0 failed"
    for row in rows:
        assert set(row) == COLUMNS
        assert all(isinstance(size, int) for size in row["shape"])
        assert row["threads"] == 1
        assert isinstance(row["peak_bytes"], int)
        assert row["peak_bytes"] > 0
        assert row["vs_compile"] is None
        for name in RATIOS:
            assert row[name] is None or row[name] > 0
        assert row["vs_eager"] is not None
        assert row["vs_copy"] is not None

    beside = json.loads((tmp_path / "kernels_machine.json").read_text())
    assert "torch" in beside["versions"]
    assert len(beside["cases"]) == len(rows)
    for case in beside["cases"]:
        assert {"kernel", "eager", "copy"} <= set(case["median_ms"])
        assert case["largest_errors"]["kernel"]


def test_a_kernel_that_disagrees_fails(tmp_path) -> None:
    # A copy of the benchmark in which eager's clip differs: the two then compute different losses.
    broken = tmp_path / "benchmarks"
    (broken / "kernel_bench").mkdir(parents=True)
    scripts = ROOT / "benchmarks"
    for source in [scripts / "bench_kernels.py", *scripts.glob("kernel_bench/*.py")]:
        text = source.read_text()
        if source.name == "eager.py":
            changed = text.replace("1.0 + settings.high", "1.5 + settings.high")
            assert changed != text
            text = changed
        (broken / source.relative_to(scripts)).write_text(text)
    command = [*COMMAND, "--only", "policy_loss grpo"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED policy_loss grpo" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"


def test_unknown_case_is_named() -> None:
    done = run_bench("--only", "no such kernel")
    assert done.returncode == 2
    assert "--only: got 'no such kernel'" in done.stderr
