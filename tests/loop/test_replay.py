"""`mrl replay` and `mrl diff` on the recorded run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.commands.replay_step import find_source
from mrl.run.compare import compare_runs
from mrl.run.folder import saved_step
from mrl.run.rollouts import load_groups, save_groups
from tests.loop.conftest import Toy, trained
from tests.loop.test_refusals import refused
from tests.ranks import run_ranks
from tests.release import release


def replayed(run: str, step: int, output: str) -> int:
    """Exit code of `mrl replay`, on this rank; the report is in the file `output`.json."""
    import contextlib
    import io

    text, code = io.StringIO(), 0
    with contextlib.redirect_stdout(text):
        try:
            main(["replay", run, str(step), "--output", output, "--json"])
        except SystemExit as stop:
            code = int(stop.code or 0)
    if text.getvalue():
        Path(output).with_suffix(".json").write_text(text.getvalue().splitlines()[-1])
    return code


@pytest.fixture(scope="module")
def changed(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run with one log-prob of step 3 changed in its saved rollouts."""
    run = Path(shutil.copytree(recorded, tmp_path_factory.mktemp("changed") / "run"))
    groups = load_groups(saved_step(run / "rollouts", 3))
    sample = groups[1].samples[2]
    sample.rollout_logprobs[sample.prompt_len] += 1e-3
    save_groups(saved_step(run / "rollouts", 3), groups)
    return run


@pytest.mark.timeout(300)
# test_what_a_step_keeps_for_the_next_is_replayed_too begins with a checkpoint in `make test`.
@pytest.mark.parametrize(
    ("step", "start"), [(1, "the initial weights"), release(3, "iter_0000002")]
)
def test_a_step_again_is_the_same_bits(
    step: int, start: str, recorded: Path, tmp_path: Path
) -> None:
    args = (str(recorded), step, str(tmp_path / "again"))
    assert run_ranks(1, replayed, *args, folder=tmp_path / "out") == [0]
    report = json.loads((tmp_path / "again.json").read_text())
    assert report["bitwise_equal"] is True
    assert report["from"] == start
    assert report["num_metrics"] > 20
    assert report["not_measured_again"] == []
    assert not (recorded / "replay").exists()


KEEPING = (
    "algorithm.name=ppo",
    "critic.lr=1e-2",
    "algorithm.kl_coef=0.05",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=1e-4",
    "algorithm.kl_horizon=100",
    "moe.routing_replay=r2",
)
"""A checkpoint of this recipe has a critic beside the policy, and a coefficient that has moved. The
routes are those of the trainer's own pass."""


@pytest.mark.timeout(300)
def test_what_a_step_keeps_for_the_next_is_replayed_too(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    saved = (f"debug.load_rollouts={recorded / 'rollouts'}", "debug.save_rollouts=true")
    steps = ("train.num_steps=2", "checkpoint.save_every=1")
    overrides = toy.overrides(tmp_path / "run", *saved, *steps, *KEEPING)
    run_ranks(1, trained, overrides, folder=tmp_path / "out")
    args = (str(tmp_path / "run"), 1, str(tmp_path / "again"))
    assert run_ranks(1, replayed, *args, folder=tmp_path / "out2") == [0]
    report = json.loads((tmp_path / "again.json").read_text())
    assert report["from"] == "iter_0000001"
    assert report["bitwise_equal"] is True


@pytest.mark.timeout(300)
def test_a_step_that_comes_out_otherwise_says_in_what(changed: Path, tmp_path: Path) -> None:
    args = (str(changed), 3, str(tmp_path / "again"))
    assert run_ranks(1, replayed, *args, folder=tmp_path / "out") == [1]
    report = json.loads((tmp_path / "again.json").read_text())
    assert "mismatch/logprob_abs_mean" in report["differences"]
    assert "reward/mean" not in report["differences"]


@pytest.mark.release  # test_a_step_that_comes_out_otherwise_says_in_what has the report
@pytest.mark.timeout(300)
def test_another_layout_is_told_from_the_same_bits(recorded: Path, tmp_path: Path) -> None:
    """Two ranks that share the experts add in another order."""
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(
        text.replace("expert_model_parallel_size: 1", "expert_model_parallel_size: 2")
    )
    args = (str(run), 2, str(tmp_path / "again"))
    codes = run_ranks(2, replayed, *args, folder=tmp_path / "out")
    report = json.loads((tmp_path / "again.json").read_text())
    assert codes == [int(bool(report["differences"]))] * 2
    for key, (before, again) in report["differences"].items():
        assert again == pytest.approx(before, rel=1e-2, abs=1e-4), key


AGAIN = {
    "no pass before the update": (
        "algorithm.name=a3po", "train.num_steps_per_rollout=2", "diagnosis.save_tokens_every=0",
        "diagnosis.decompose_every=0",
    ),
    "r2": ("moe.routing_replay=r2", "train.num_steps_per_rollout=2", "algorithm.name=decoupled_ppo"),
}  # fmt: skip


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", AGAIN)
def test_the_passes_of_a_step_are_the_same_again(
    kind: str, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    source = f"debug.load_rollouts={recorded / 'rollouts'}"
    more = ("train.num_steps=3", "debug.save_rollouts=true", "checkpoint.save_every=2", source)
    run_ranks(1, trained, toy.overrides(run, *more, *AGAIN[kind]), folder=tmp_path / "first")
    args = (str(run), 2, str(tmp_path / "again"))
    codes = run_ranks(1, replayed, *args, folder=tmp_path / "out")
    report = json.loads((tmp_path / "again.json").read_text())
    assert report["differences"] == {}
    assert report["not_measured_again"] == []
    assert (codes, report["from"]) == ([0], "iter_0000002")
    has_record = (tmp_path / "again/tokens/step_000002.safetensors").is_file()
    assert has_record == (kind != "no pass before the update")


def test_what_cannot_be_replayed_is_said_in_a_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no config.yaml" in refused(capsys, ["replay", str(tmp_path), "0"])
    assert "can be replayed: 0-3" in refused(capsys, ["replay", str(recorded), "7"])
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    saved_step(run / "rollouts", 1).unlink()
    assert find_source(run, 2).start == 2
    line = refused(capsys, ["replay", str(run), "1"])
    assert "no step_000001.safetensors" in line
    assert "can be replayed: 0, 2-3" in line
    config = run / "config.yaml"
    trained_config = config.read_text()
    config.write_text(trained_config.replace("rollout_only: false", "rollout_only: true"))
    assert "was a run with debug.rollout_only" in refused(capsys, ["replay", str(run), "2"])
    config.write_text(trained_config)
    shutil.rmtree(run / "checkpoints")
    assert "can be replayed: 0" in refused(capsys, ["replay", str(run), "2"])
    for file in (run / "rollouts").glob("*.safetensors"):
        file.unlink()
    assert "debug.save_rollouts=true" in refused(capsys, ["replay", str(run), "2"])


def test_a_run_is_like_itself(recorded: Path) -> None:
    found = compare_runs(recorded, recorded)
    assert found.first_step is None
    assert found.verdict() == "the same in the 4 steps that both have"
    assert found.config == found.versions == []


def test_where_two_runs_part(
    recorded: Path, changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["diff", str(recorded), str(changed), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "other samples in step 3, the same up to step 2"
    assert found["samples"]["pairs"][0]["key"].startswith("sample 6, rollout log-prob")
    assert found["prompts"] is found["metrics"] is None

    other = Path(shutil.copytree(recorded, tmp_path / "other"))
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    rows[1]["grad_norm"] += 0.5
    rows[1]["time/step_s"] += 1
    text = "".join(json.dumps(row) + "\n" for row in rows[:3])
    (other / "metrics.jsonl").write_text(text)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.003", "lr: 0.004"))
    file = other / "rollouts/step_000002.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples[4]["prompt_id"] = "77"
    file.write_text("".join(json.dumps(row) + "\n" for row in samples))
    main(["diff", str(recorded), str(other)])
    shown = capsys.readouterr().out
    assert "optimizer.lr" in shown
    assert "steps: 4 and 3" in shown
    assert "Prompts: first in step 2" in shown
    assert "grad_norm" in shown
    assert "time/step_s" not in shown
    assert shown.splitlines()[-1] == "other metrics in step 1, the same up to step 0"


def test_a_run_without_saved_tokens_is_compared_by_its_text(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(recorded, tmp_path / "other"))
    for file in (other / "rollouts").glob("*.safetensors"):
        file.unlink()
    damaged = other / "checkpoints/iter_0000004.damaged"  # as a resumed run sets it aside
    damaged.mkdir()
    (damaged / "manifest.json").write_text('{"format"')
    same = compare_runs(recorded, other)
    assert same.first_step is None
    assert same.versions == []
    file = other / "rollouts/step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[3]["completion"] += "x"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare_runs(other, recorded)
    assert found.samples is not None
    assert found.samples.pairs[0].key == "sample 3, text"
