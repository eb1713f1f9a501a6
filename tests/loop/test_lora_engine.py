"""LoRA runs with the real engine: what it is sent, what it gives back, and what a kill costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.config import load_recipe
from mrl.drill.job import kill
from mrl.run.folder import RunFolder
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.disaggregated import test_runs as runs
from tests.loop.conftest import Toy, adapter_bytes, environment, trained
from tests.ranks import run_ranks

LORA = ("lora.rank=4", "lora.alpha=8", "lora.experts=per_expert", "checkpoint.save_every=1")


def rows_of(output: Path) -> list[dict[str, Any]]:
    return RunFolder(output).read_metrics()


def check_rows(rows: list[dict[str, Any]]) -> None:
    """The engine sampled from the adapted policy, and the trainer replayed its routes."""
    for step, row in enumerate(rows):
        assert row["weight_version"] == step
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert 0 < row["rollout/canary_abs_mean"] < 1e-5
        assert row["routing/captured_coverage"] == row["routing/replay_coverage"] == 1.0


@pytest.mark.release  # test_architectures.py trains one, and tenants/test_service_runs.py
@pytest.mark.timeout(300)
def test_an_engine_is_sent_the_adapter_alone_and_samples_from_it(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(tmp_path / "run", *LORA, "train.num_steps=2")
    run_ranks(1, trained, overrides, folder=tmp_path / "out")
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2
    check_rows(rows)
    expected = adapter_bytes(toy, tmp_path / "run")
    assert [row["rollout/sync_bytes"] for row in rows] == [expected] * 2
    first, last = (SavedTensors(tmp_path / f"run/checkpoints/iter_000000{step}") for step in (1, 2))
    name = "model.decoder.layers.0.self_attention.linear_qkv.lora.q_proj.B"
    assert first[name].count_nonzero() > 0
    assert not first[name].equal(last[name])


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_merged_model_is_sent_whole_and_trains_the_same(toy: Toy, tmp_path: Path) -> None:
    for name in ("adapter", "merged"):
        overrides = toy.overrides(
            tmp_path / name, *LORA, "train.num_steps=3", f"lora.rollout={name}"
        )
        run_ranks(1, trained, overrides, folder=tmp_path / f"out_{name}")
        check_rows(rows_of(tmp_path / name))
    adapter, merged = (rows_of(tmp_path / name) for name in ("adapter", "merged"))
    model = sum(file.stat().st_size for file in toy.model.glob("*.safetensors"))
    assert merged[0]["rollout/sync_bytes"] == pytest.approx(model, rel=0.05)
    assert merged[0]["rollout/sync_bytes"] > 3 * adapter[0]["rollout/sync_bytes"]
    for key in ("reward/mean", "grad_norm"):
        assert [row[key] for row in merged] == pytest.approx(
            [row[key] for row in adapter], rel=1e-3
        )


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_to_the_same_bits_and_its_commands_work(
    toy: Toy, tmp_path: Path
) -> None:
    keys = (*LORA, "debug.save_rollouts=true", "diagnosis.save_tokens_every=1", "train.num_steps=5")
    whole, output = tmp_path / "whole", tmp_path / "run"
    runs.train(toy.model, whole, 1, *keys)
    process = runs.start(runs.command(toy.model, output, 1, *keys), tmp_path / "run.log")
    runs.wait_for((output / "checkpoints/iter_0000002").is_dir, process)
    kill(runs.processes_of(output))
    process.wait(runs.LIMIT_S)
    runs.train(toy.model, output, 1, *keys)
    assert runs.bits(output, 5) == runs.bits(whole, 5)
    check_rows(rows_of(output))

    sets = f"[{{name: letters, path: {load_recipe(output / 'config.yaml').data.path}, num_prompts: 4}}]"
    for words, shown in (
        (["why", str(output), "4"], "step 4"),
        (["diff", str(whole), str(output)], "step"),
        (["replay", str(output), "4"], "step 4"),
        (["eval", str(output), f"eval.sets={sets}"], "the weights after 5 steps"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mrl", *words], cwd=runs.ROOT, env=environment(),
            capture_output=True, text=True, timeout=runs.LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        assert shown in done.stdout, words


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("lora.experts=shared_outer",),
        ("rollout.expert_parallel_size=2",),
        ("rollout.expert_parallel_size=2", "lora.experts=shared_outer"),
    ],
    ids=" ".join,
)
def test_an_engine_of_two_ranks_serves_the_adapter(
    more: tuple[str, ...], toy: Toy, tmp_path: Path
) -> None:
    layout = ("rollout.tensor_parallel_size=2", *LORA, *more)
    overrides = toy.overrides(tmp_path / "run", *layout, "train.num_steps=3")
    run_ranks(2, trained, overrides, folder=tmp_path / "out")
    check_rows(rows_of(tmp_path / "run"))
    assert rows_of(tmp_path / "run")[0]["rollout/sync_bytes"] == adapter_bytes(
        toy, tmp_path / "run"
    )


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_rollout_rank_serves_the_adapter(toy: Toy, tmp_path: Path) -> None:
    keys = (*LORA, "train.num_steps=3")
    runs.train(toy.model, tmp_path / "colocated", 1, *keys)
    runs.train(toy.model, tmp_path / "apart", 2, *keys, *runs.APART)
    assert runs.bits(tmp_path / "apart", 3) == runs.bits(tmp_path / "colocated", 3)
    rows = rows_of(tmp_path / "apart")
    check_rows(rows)
    assert {row["rollout/sync_bytes"] for row in rows} == {adapter_bytes(toy, tmp_path / "apart")}
