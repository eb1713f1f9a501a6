"""Two ranks under the launch script: two engines, and one engine that spans both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, environment
from tests.loop.test_run import metrics, processes_of


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("rollout_tp", "layout"),
    [(1, "expert_model_parallel_size"), (2, "tensor_model_parallel_size")],
)
def test_two_ranks(rollout_tp: int, layout: str, toy: Toy, tmp_path: Path) -> None:
    output = tmp_path / "run"
    overrides = toy.overrides(
        output,
        "train.num_steps=1",
        f"parallel.{layout}=2",
        f"rollout.tensor_parallel_size={rollout_tp}",
    )
    done = subprocess.run(
        ["bash", "launch/torchrun.sh", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env=environment(NPROC="2", MRL_TEST_RUN=str(output)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    engines = 2 // rollout_tp
    assert len(list((output / "logs").glob("engine_*.log"))) == engines
    rows = metrics(output)
    assert [row["step"] for row in rows] == [0]
    for row in rows:
        assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["routing/replay_coverage"] == 1.0
        # 4 layers x top-2 of 8 experts: 24 bits, between two engines' ranks or from one to its pair.
        assert row["routing/wire_bytes_per_token"] == 3.0
    file = output / "rollouts/step_000000.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [s["group_id"] for s in samples] == [i for i in range(4) for _ in range(4)]
    assert len({s["prompt_id"] for s in samples}) == 4
    assert processes_of(output) == []


def test_bad_input_under_torchrun_is_one_line_and_code_2(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(tmp_path / "run", "parallel.tensor_model_parallel_size=3")
    done = subprocess.run(
        ["bash", "launch/torchrun.sh", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env=environment(NPROC="2"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "mrl: parallel: 2 ranks are not divisible by tensor 3 x context 1 x pipeline 1 = 3; start a "
        "multiple of 3 ranks or lower a size"
    ]
