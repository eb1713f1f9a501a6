"""One real run: what it leaves behind, what it measured, and that it can be taken up again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from mrl.cli import main
from mrl.config import load_recipe
from mrl.engines.sglang.leftovers import shared_memory_files
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.docs.metric_keys import undocumented
from tests.loop.conftest import RECORDED, TOY_RECIPE, Toy, environment
from tests.loop.test_refusals import refused
from tests.release import release
from tests.waiting import wait_until

KEYS = """
    step reward/mean reward/std reward/zero_signal_groups response_len/mean loss/policy loss/total
    grad_norm lr ratio/mean ratio/max ratio/clip_frac entropy mismatch/k3 mismatch/logprob_abs_mean
    mismatch/logprob_abs_max mismatch/k1 mismatch/chi2 mismatch/p50 mismatch/p90 mismatch/p99
    mismatch/p999 mismatch/extreme_share staleness/mean staleness/max
    routing/disagreement routing/token_any_layer routing/replay_coverage
    routing/disagreement/layer_01 routing/disagreement/layer_04 routing/margin_at_agreement
    routing/margin_median_at_agreement
    routing/stale_rows routing/cached_rows routing/recomputed_rows routing/wire_bytes_per_token
    weight_version tokens/rollout tokens/train time/sync_s time/rollout_s time/score_s
    time/diagnosis_s time/train_s time/step_s time/verify_s time/recovery_s
    time/timestamp throughput/rollout_tokens_per_s throughput/train_tokens_per_s
    throughput/step_tokens_per_s response_len/max response_len/truncated
    rollout/engine_restarts rollout/canary_abs_mean
    memory/trainer_rss_bytes memory/engine_rss_bytes memory/leak_bytes_per_cycle
"""


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes of a run: by MRL_TEST_RUN, or by a file of it that they hold."""
    return list(_commands_of(folder).values())


def pids_of(folder: Path) -> list[int]:
    return list(_commands_of(folder))


def _commands_of(folder: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = (entry / "environ").read_bytes().decode(errors="replace")
            descriptors = list((entry / "fd").iterdir())
        except OSError:  # the process has ended
            continue
        files = []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile, by a process that goes on
                files.append(os.readlink(descriptor))
        is_ours = f"MRL_TEST_RUN={folder}" in environ or any(
            file.startswith(str(folder)) for file in files
        )
        if int(entry.name) != os.getpid() and is_ours:
            found[int(entry.name)] = command or "(kernel)"
    return found


def test_every_piece_of_the_run_folder_is_there(recorded: Path) -> None:
    config = yaml.safe_load((recorded / "config.yaml").read_text())
    assert config["optimizer"]["weight_decay"] == 0.0  # defaults are spelled out
    assert load_recipe(recorded / "config.yaml").model_dump(mode="json") == config
    for step in range(4):
        rows = (recorded / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        assert len(rows) == 16
        first = json.loads(rows[0])
        assert first["weight_version"] == step
        assert first["prompt_len"] == 16
        assert 1 <= first["response_len"] <= 12
        assert len(first["prompt"]) == 16
        assert {"completion", "reward", "advantage", "group_id", "finish_reason"} <= first.keys()
    names = {f.name for f in (recorded / "checkpoints").iterdir()}
    assert names == {"iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"}
    assert (recorded / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert (recorded / "logs/engine_00.log").exists()


def test_every_metric_is_there_every_step_and_true(recorded: Path) -> None:
    rows = metrics(recorded)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        missing = [key for key in KEYS.split() if not isinstance(row.get(key), (int, float))]
        assert undocumented(row) == []  # in docs/metrics.md
        assert not missing
        assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["mismatch/k3"] >= 0
        assert row["routing/replay_coverage"] == 1.0
        assert row["routing/stale_rows"] == 0.0  # the cache is flushed with every update
        assert row["routing/disagreement"] < 0.01  # fp32 on both sides
        assert row["weight_version"] == row["step"]
        assert 0 < row["rollout/canary_abs_mean"] < 1e-5  # 0 would be nobody's doing
        assert row["time/verify_s"] > 0
        assert row["memory/engine_rss_bytes"] > 100 << 20
        assert row["ratio/mean"] == 1.0  # one optimizer step a rollout: the policy has not moved
        assert 0 < row["entropy"] <= math.log(128)
        inside = {"time/step_s", "time/verify_s", "time/timestamp"}  # verify is within sync
        parts = [k for k in row if k.startswith("time/") and k not in inside]
        assert row["time/verify_s"] <= row["time/sync_s"]
        assert sum(row[k] for k in parts) <= row["time/step_s"]


def test_the_policy_learns_from_some_step(recorded: Path) -> None:
    assert any(row["grad_norm"] > 0 for row in metrics(recorded))
    first, last = (checkpoint_tensors(recorded, step) for step in (2, 4))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_rewards_on_file_are_the_rewards_in_the_metrics(recorded: Path) -> None:
    for row in metrics(recorded):
        file = recorded / f"rollouts/step_{row['step']:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        mean = sum(s["reward"] for s in samples) / len(samples)
        assert row["reward/mean"] == pytest.approx(mean, rel=1e-6)
        for s in samples:
            share = s["completion"].count(s["prompt"][0]) / s["response_len"]
            assert s["reward"] == pytest.approx(share, abs=1e-6)
        assert row["response_len/mean"] == sum(s["response_len"] for s in samples) / len(samples)


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything but the random states: weights and moments."""
    tensors = SavedTensors(folder / f"checkpoints/iter_{step:07d}")
    return {key: tensors[key] for key in tensors if not key.startswith("random.")}


@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_to_the_same_bits(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    """kill -9 during the third step, start again: weights equal the uninterrupted run's."""
    output = tmp_path / "killed"
    process = toy.start(output, *RECORDED, env=environment(MRL_TEST_RUN=str(output)))
    deadline = time.monotonic() + 180
    latest = output / "checkpoints/latest_checkpointed_iteration.txt"
    while not latest.exists():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running = pids_of(output)
    assert len(running) > 2  # the trainer, the engine and its children, the rewards
    shared_memory = shared_memory_files(map(psutil.Process, running))
    assert shared_memory
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    wait_until(lambda: not processes_of(output), "the end of the engine, which goes with it")
    assert not [file for file in shared_memory if file.exists()]

    done = toy.run(output, *RECORDED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 (2 are done; continues with step 2)" in " ".join(done.stdout.split())
    ours, theirs = checkpoint_tensors(output, 4), checkpoint_tensors(recorded, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["step"] for row in metrics(output)] == [0, 1, 2, 3]
    prompts = [
        [json.loads(line)["prompt_id"] for line in f.read_text().splitlines()]
        for folder in (output, recorded)
        for f in sorted((folder / "rollouts").glob("*.jsonl"))
    ]
    assert prompts[:4] == prompts[4:]


def test_a_finished_run_says_so_and_a_changed_recipe_is_refused(
    toy: Toy, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(TOY_RECIPE), *toy.overrides(recorded, *RECORDED)]
    main(arguments)
    assert "is done: 4 of 4 steps" in capsys.readouterr().out
    line = refused(capsys, [*arguments, "optimizer.lr=1e-2"])
    assert "another recipe" in line
    assert "optimizer.lr is 0.003 there and 0.01 now" in line
    assert f"mrl train {recorded} optimizer.lr=0.01 --allow optimizer.lr" in line


PATIENT = "checkpoint.stop_limit_s=600"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, *(release(each) for each in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_signal_saves_the_step_and_leaves(number: int, toy: Toy, tmp_path: Path) -> None:
    """SLURM's warning before the time limit, or its end: no step is lost."""
    output = tmp_path / "run"
    env = environment(MRL_TEST_RUN=str(output))
    code, errors = toy.told_to_leave(output, "train.num_steps=500", PATIENT, env=env, number=number)
    done = len(metrics(output))
    assert code == 75
    assert (
        f"saved a checkpoint with {done} steps done; start again to continue with step {done}"
        in errors
    )
    assert (output / "checkpoints/latest_checkpointed_iteration.txt").read_text() == f"{done}\n"
    assert processes_of(output) == []


@pytest.mark.timeout(400)
def test_failures_leave_nothing_running(toy: Toy, tmp_path: Path) -> None:
    """A reward that fails on everything stops the run with its error, and the engine with it."""
    reward = tmp_path / "bad.py"
    output = tmp_path / "run"
    reward.write_text(  # the trial of mrl check comes before there is a run folder
        "from pathlib import Path\n"
        "def f(prompts, completions, **columns):\n"
        f"    if Path({str(output)!r}, 'config.yaml').exists():\n"
        "        raise KeyError('gold')\n"
        "    return [0.0] * len(completions)\n"
    )
    more = ("train.num_steps=1", f"reward={reward}:f")
    done = toy.run(output, *more, MRL_TEST_RUN=str(output))
    assert done.returncode == 70
    block = done.stderr[done.stderr.index("mrl: reward") :].splitlines()
    assert "gold" in block[0]
    assert "rank 0" in block[1]
    assert "step 0" in block[1]
    assert block[-1].endswith(f" train {output}/config.yaml")
    record = json.loads((output / "failure.json").read_text())
    assert (record["exit_code"], record["step"], record["saved_step"]) == (70, 0, None)
    assert processes_of(output) == []
