"""`mrl check --plan`: from config.json alone, what fits and what does not, and its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.cli import main
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy
from tests.loop.test_refusals import refused

LAYOUT = ("parallel.tensor_model_parallel_size=4", "parallel.expert_model_parallel_size=8",
          "rollout.tensor_parallel_size=4", "rollout.prompts_per_step=64",
          "rollout.min_response_len=0", "rollout.max_response_len=4096",
          "train.micro_batch_tokens=9216", "model.dtype=auto")  # fmt: skip


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder with the published config.json of Qwen3-30B-A3B and nothing else."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    shutil.copy(REPOSITORY / "benchmarks/models/qwen3_30b_a3b.json", folder / "config.json")
    return folder


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["check", str(TOY_RECIPE), *arguments])
    return capsys.readouterr().out


def test_config_alone_is_enough(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model.path={qwen}"
    out = planned(capsys, "--plan", "--gpus", "8", model, *LAYOUT)
    for text in ("config.json only", "30.53 B", "8.04 GB", "expert parallel x8", "812 GB",
                 "ESTIMATED", "megatron-core", "recompute  update"):  # fmt: skip
        assert text in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("does not fit: train needs 90.4 GB, 5.55 GB more")
    assert "what helps most is train.recompute=true" in last
    out = planned(capsys, model, *LAYOUT, "train.recompute=true", "--plan", "--gpus=8")
    assert out.strip().splitlines()[-1].startswith("fits: ")
    larger = planned(capsys, "--plan", "--gpus", "8", "--gpu", "h200", model, *LAYOUT)
    assert larger.strip().splitlines()[-1].startswith("fits: ")


def test_a_whole_model_is_checked_as_before_a_start(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = toy.overrides(tmp_path / "run", "parallel.expert_model_parallel_size=2")
    out = planned(capsys, *arguments, "--plan", "--gpus", "4", "--prompt-len", "64")
    assert "expert parallel x2" in out
    assert "routing replay r3" in out
    assert "config.json only" not in out
    assert "Below: 4 x H100 80 GB, weights in float32, prompts of 64 tokens" in out
    line = refused(capsys, ["check", str(TOY_RECIPE), *arguments, "reward=first_chr", "--plan",
                            "--gpus", "4"])  # fmt: skip
    assert "did you mean 'first_char'" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "8"], "--gpus is for the plan; add --plan"),
        (["--gpu", "h100"], "--gpu is for the plan; add --plan"),
        (["--plan", "--gpu", "a100"], "--gpu: got 'a100', expected h100 or h200"),
        (["--plan", "--gpus", "0"], "--gpus: got 0, expected at least 1"),
        (["--plan", "--prompt-len", "0"], "--prompt-len: got 0"),
        (["--plan", "--prompt-len", "40941"], "more than the context of 40960"),
        (["--plan", "--gpus", "abc"], "--gpus: invalid int value: 'abc'; see mrl check --help"),
        (["--plan", "parallel.tensor_model_parallel_size=2"], "1 ranks are not divisible by"),
        (["--plan", "--gpus", "3", "rollout.tensor_parallel_size=2"], "3 GPUs are not divisible"),
        (["--plan", "--gpus", "8", "rollout.tensor_parallel_size=8"], "4 key/value heads are not"),
        (
            ["--plan", "--gpus", "5", "parallel.pipeline_model_parallel_size=5"],
            "48 layers are not divisible by pipeline",
        ),
    ],
)
def test_refusals(
    arguments: list[str], says: str, qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, ["check", str(TOY_RECIPE), f"model.path={qwen}", *arguments])


def test_a_config_that_cannot_be_read(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", str(TOY_RECIPE), f"model.path={qwen}", "--plan"]
    file = qwen / "config.json"
    config = json.loads(file.read_text())
    for text, says in (
        (json.dumps({**config, "model_type": "llama"}), "model_type 'llama'"),
        (json.dumps({**config, "hidden_size": "many"}), "hidden_size"),
        ("[]", "expected an object, got list"),
        ("{", "not valid JSON"),
    ):
        file.write_text(text)
        assert says in refused(capsys, command)
    with pytest.raises(SystemExit):
        main(["train", str(TOY_RECIPE), "--plan"])
    assert "unrecognized arguments: --plan" in capsys.readouterr().err
