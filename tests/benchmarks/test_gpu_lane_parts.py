"""The parts of the GPU lane: their order, limits and settings, as far as no GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_lane import catalog, engine_parts, facts, parts, run, suites
from mrl.engines.sglang.arguments import check_server_args

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", catalog.PARTS, ids=lambda part: part.name)
def test_every_part_can_be_found(part) -> None:
    module = importlib.import_module(f"benchmarks.gpu_lane.{part.module}")
    assert callable(getattr(module, part.name))


def test_the_most_telling_parts_come_first_and_fit_into_a_call() -> None:
    first = ["build", "engine", "trainer_step", "sync", "train", "kernels", "native"]
    assert [part.name for part in catalog.PARTS][: len(first)] == first
    for part in catalog.PARTS:
        assert part.limit_s < run.TOTAL_S, part.name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_engine_that_does_not_start_says_so_before_its_part_is_killed(
    device, tmp_path, monkeypatch
) -> None:
    toy = parts.model_folder(tmp_path, "cpu")
    monkeypatch.setattr(engine_parts, "model_folder", lambda folder, device: toy)
    (tmp_path / "state.json").write_text(json.dumps({"sync": {"limit_s": 50.0}}))
    bench = engine_parts.Bench("sync", tmp_path, device, routes=True)
    assert bench.engine.core.config.start_timeout_s == 40


def test_the_engines_arguments_are_those_of_the_installed_sglang(monkeypatch) -> None:
    check_server_args(parts.gpu_args())
    assert len(parts.gpu_args()) == len(parts.GPU_ARGS)
    names = {"attention_backend", "moe_runner_backend", "grammar_backend", "cuda_graph_max_bs"}
    monkeypatch.setattr(parts, "field_names", lambda: names)
    with pytest.raises(
        RuntimeError, match="no field disable_piecewise_cuda_graph or disable_prefill"
    ):
        parts.gpu_args()
    names.add("disable_piecewise_cuda_graph")  # as in 0.5.12
    found = parts.gpu_args()
    assert (found["cuda_graph_max_bs"], found["disable_piecewise_cuda_graph"]) == (8, True)


def test_arguments_of_fp8_engines_are_added() -> None:
    found = parts.gpu_args(fp8=True)
    check_server_args(found)
    assert found == parts.gpu_args() | {"fp8_gemm_runner_backend": "triton"}


@pytest.mark.release  # they take a new Python each
@pytest.mark.parametrize("name", ["byte_kernels", "deltas", "prefixes"])
def test_parts_without_an_engine_run_on_a_cpu(name: str, tmp_path: Path) -> None:
    """In a process of its own, as the driver starts it."""
    (tmp_path / "state.json").write_text(json.dumps({name: {"limit_s": 100.0}}))
    command = ["-m", run.ENTRY, name, "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = run.read_figures(done.stdout)
    assert figures["says"]
    if name == "deltas":
        for row in (figures["none"], figures["fp8_block"]):
            assert 0 < row["delta"]["bytes"] < 0.5 * row["full"]["bytes"]


def test_every_test_that_needs_a_gpu_is_in_the_files_that_are_run() -> None:
    mark = "pytest.mark." + "gpu"
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(rf"{re.escape(mark)}\b", file.read_text())
    }
    assert marked == set(suites.GPU_TESTS)


def test_threads_are_the_cores_unless_told(monkeypatch) -> None:
    for device, expected in (("cuda", str(len(os.sched_getaffinity(0)))), ("cpu", "1")):
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        run.set_threads(device)
        assert os.environ["OMP_NUM_THREADS"] == "5"
        monkeypatch.delenv("OMP_NUM_THREADS")
        run.set_threads(device)
        assert os.environ["OMP_NUM_THREADS"] == expected


def test_memory_is_compared_with_the_plan(tmp_path) -> None:
    """The part needs a GPU; what it compares does not."""
    planned = facts.planned_bytes(parts.train_overrides(tmp_path, "cpu"), 80 << 30)
    most = {name: sum(held.values()) for name, held in planned.items()}
    assert set(facts.READ_IN.values()) <= set(planned)
    step = {f"memory/{phase}/device_used_bytes": float(most[name])
            for phase, name in facts.READ_IN.items()}  # fmt: skip
    lines, over = facts.compare(planned, step)
    assert (len(lines), over) == (2, [])
    step["memory/train/device_used_bytes"] += 1 << 30
    assert facts.compare(planned, step)[1] == [
        f"train {most['train'] / 2**30 + 1:.2f} of {most['train'] / 2**30:.2f} GiB planned"
    ]
    assert facts.compare(planned, {}) == ([], [])
