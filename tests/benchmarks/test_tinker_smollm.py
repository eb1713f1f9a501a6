"""benchmarks/tinker_smollm: its figures and checks, and its loop by the SDK against a toy model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tinker_smollm as command
from benchmarks.smollm import sums
from mrl.toy_model import write_toy_model
from tests.tinker.running import (
    LIMIT_S,
    ROOT,
    key_of,
    needs_sdk,
    sdk_environment,
    served,
    tinker_service,
)


def side(after: float, mismatch: float = 1e-5, norm: float = 0.5) -> dict[str, Any]:
    held_out = [{"avg": 0.1, "stderr": 0.03}, {"avg": after, "stderr": 0.03}]
    return {"held_out": held_out, "mismatch_max": mismatch, "grad_norms": [norm, 0.0]}


@pytest.mark.parametrize(
    ("sides", "fails"),
    [
        ((side(0.5), side(0.3), side(0.45)), []),
        ((side(0.5), side(0.2), side(0.45)), [2]),
        ((side(0.5), side(0.5, mismatch=2e-4), side(0.45)), [3]),
        ((side(0.5), side(0.5), side(0.5, norm=0.501)), [6]),
        ((side(0.5), side(0.5), side(0.3)), [7]),
    ],
)
def test_what_is_required(sides: tuple[dict[str, Any], ...], fails: list[int]) -> None:
    verdicts = command.checks(dict(zip(command.SIDES.values(), sides, strict=True)))
    assert len(verdicts) == 8
    assert [number for number, (_, holds) in enumerate(verdicts) if not holds] == fails


def test_seconds_are_those_of_whole_steps() -> None:
    row = {
        "tokens/train": 100,
        "time/rollout_s": 1.0,
        "time/train_s": 2.0,
        "reward/mean": 0.5,
        "grad_norm": 1.0,
    }
    more = {"mismatch/logprob_abs_mean": 1e-6, "mismatch/logprob_abs_max": 1e-5, "grad_norm": 1.0}
    seconds = [(60.0, 20.0), (10.0, 0.0), (8.0, 0.0), (14.0, 4.0)]
    rows = [{**row, **more, "time/step_s": s, "time/eval_s": e} for s, e in seconds]
    cpu = [
        {"pid": 1, "step": 0, "cpu_s": 30.0},
        {"pid": 1, "step": 1, "cpu_s": 34.0},
        {"pid": 2, "step": 2, "cpu_s": 20.0},  # started again: the step before is not whole
        {"pid": 2, "step": 3, "cpu_s": 26.0},
    ]
    found = command.figures(rows, cpu, [])
    assert (found["step_s"], found["step_cpu_s"]) == (10.0, 5.0)
    assert (found["tokens_per_s"], found["tokens_per_cpu_s"]) == (10.0, 20.0)
    assert command.figures(rows, [], [])["tokens_per_cpu_s"] is None


@needs_sdk
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    sums.write(tmp_path / "data")
    wide = tmp_path / "toy"
    write_toy_model(wide)
    long = {"context_len": 256, "max_total_tokens": 16384, "batch_invariant": True}
    service = tinker_service(tmp_path, wide, rollout=long)
    key = key_of(service)

    def loop(url: str, output: Path, steps: int) -> list[dict[str, Any]]:
        words = ["--data", tmp_path / "data", "--output", output, "--steps", steps, "--rank", 4]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", command.LOOP, *map(str, words)],
            cwd=ROOT, env={**sdk_environment(key), "TINKER_BASE_URL": url}, capture_output=True,
            text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return command.read_rows(output / "metrics.jsonl")

    with served(service) as (url, _):
        loop(url, tmp_path / "parts", 1)
        parts = loop(url, tmp_path / "parts", 2)
        whole = loop(url, tmp_path / "whole", 2)
    of_run = ("state", "time/rollout_s", "time/train_s", "time/step_s", "time/timestamp")
    for name in of_run:
        for row in (*parts, *whole):
            row.pop(name)
    assert parts == whole
    assert [row["step"] for row in whole] == [0, 1]
    assert all(row["mismatch/logprob_abs_max"] < command.TOLERANCE for row in whole)
    assert all(row["session/native_rows"] == 0 for row in whole)
    for name in ("before", "after"):
        assert 0 <= json.loads((tmp_path / "whole" / name).read_text())["avg"] <= 1
