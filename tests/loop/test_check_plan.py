"""`mrl check --plan`: from config.json alone, what fits and what does not, and its refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.cli import main
from mrl.commands.scaling_plan import check_memory
from mrl.config import load_recipe
from mrl.errors import InputError
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
    out = planned(capsys, "--plan", "--gpus", "8", "--gpu", "h200", model, *LAYOUT)
    for text in ("config.json only", "30.53 B", "8.04 GB", "expert parallel x8", "812 GB",
                 "ESTIMATED", "recompute  update"):  # fmt: skip
        assert text in out
    assert "megatron-core" not in out  # the versions, which nobody asked for
    assert out.strip().splitlines()[-1].startswith("fits: the peak is ")
    assert_rows_add_up(out)


LORA = ("lora.rank=32", "train.recompute=true", "train.micro_batch_tokens=4608")


def test_an_adapter_in_the_place_of_all_weights(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--plan", "--gpus", "8", "--gpu", "h100", f"model.path={qwen}", *LAYOUT, *LORA,
               "algorithm.kl_coef=0.1"]  # fmt: skip
    out = planned(capsys, *command, "lora.experts=shared_outer")
    assert_rows_add_up(out)
    for text in ("rank 32, alpha 32: q_proj, k_proj, v_proj, o_proj, experts shared_outer",
                 "trained: the adapter", "489.2 M", "its bytes", "978 MB", "engine's adapter slots",
                 "engine: copy of the base, pinned", "weight sync: wake the base"):  # fmt: skip
        assert text in out
    assert "reference, pinned" not in out  # the base is the reference
    merged = planned(capsys, *command, "lora.rollout=merged")
    assert "26.74 M" in merged
    for text in ("engine's adapter slots", "copy of the base", "reference, pinned"):
        assert text not in merged


def assert_rows_add_up(out: str) -> None:
    """The rows of each table in bytes add up to its total, to the last byte."""
    for title in ("GPU memory at the peak, to the byte", "Host memory of one node, to the byte"):
        table = out[out.index(title) :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
        numbers = [int(n) for line in table for n in re.findall(r" {2,}(\d+) {2,}", line[:60])]
        assert len(numbers) > 5
        assert sum(numbers[:-1]) == numbers[-1], title


def test_what_does_not_fit_is_refused_with_the_arithmetic(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", str(TOY_RECIPE), f"model.path={qwen}", *LAYOUT, "--plan", "--gpus", "8"]
    line = refused(capsys, command)
    assert line.startswith("mrl: memory plan: does not fit: train needs ")
    assert (
        "more than the H100 80 GB has (84.8 GB): optimizer 48.2 GB + gradients 16.1 GB + " in line
    )
    assert "what helps most is train.recompute=true (saves " in line
    line = refused(capsys, [*command, "--gpu", "h200", "--host-memory", "500"])
    assert "a node needs 1.19 TB of host memory, " in line
    assert " + asynchronous save 450 GB + " in line


def test_a_start_on_gpus_is_refused_too(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain `mrl check`, with the memory of the GPU at hand; here one that is not there."""
    monkeypatch.setattr("mrl.commands.scaling_plan.torch.cuda.is_available", lambda: True)
    found = SimpleNamespace(name="small", total_memory=24 << 30)
    monkeypatch.setattr(
        "mrl.commands.scaling_plan.torch.cuda.get_device_properties", lambda index: found
    )
    monkeypatch.setattr("mrl.commands.scaling_plan.torch.cuda.device_count", lambda: 1)
    recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path / "run"))
    assert "fits: the peak is " in (check_memory(recipe, 1) or "")
    found.total_memory = 2 << 30
    with pytest.raises(InputError, match=r"does not fit: .* the small has.* --ignore-memory"):
        check_memory(recipe, 1)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert check_memory(recipe, 1) is None


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
        (["--gpu", "h100"], "--gpu needs --plan; add it"),
        (["--plan", "--gpu", "a100"], "--gpu: got 'a100', expected h100 or h200"),
        (["--plan", "--gpus", "0"], "--gpus: got 0, expected at least 1"),
        (["--plan", "--prompt-len", "0"], "--prompt-len: got 0"),
        (["--plan", "--prompt-len", "40941"], "more than the context of 40960"),
        (["--plan", "--gpus", "abc"], "--gpus: invalid int value: 'abc'; see mrl check --help"),
        (["--plan", "parallel.tensor_model_parallel_size=2"], "1 ranks are not divisible by"),
        (["--plan", "--gpus", "3", "rollout.tensor_parallel_size=2"], "3 GPUs are not divisible"),
        (["--plan", "rollout.context_len=8", "rollout.max_response_len=8"], "no room for a prompt"),
        (["--plan", "rollout.server_args.ep_size=2"], "use rollout.expert_parallel_size"),
        (["--plan", "parallel.pipeline_model_parallel_size=2"], "--gpus N makes it for more"),
        (["--plan", "--host-memory", "0"], "--host-memory: got 0, expected a finite number"),
        (["--plan", "--host-memory", "inf"], "--host-memory: got inf, expected a finite number"),
        (["--plan", "--host-memory", "nan"], "--host-memory: got nan, expected a finite number"),
        (["--host-memory", "9"], "--host-memory needs --plan; add it"),
        (["--plan", "lora.rank=8", "lora.targets=[gate]"], "the router stays that of the base"),
        (
            ["--plan", "--gpus", "16", "lora.rank=8", "rollout.tensor_parallel_size=16"],
            "such an engine cannot serve an adapter",
        ),
        (
            ["--plan", "--gpus", "6", "rollout.tensor_parallel_size=6"],
            "32 heads are not divisible by 6",
        ),
        (
            ["--plan", "--gpus", "64", "rollout.tensor_parallel_size=64"],
            "32 heads are not divisible by 64",
        ),
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
        (json.dumps({**config, "model_type": "gemma2"}), "model_type 'gemma2'"),
        (json.dumps({**config, "model_type": "llama"}), "has no MoE layers; set it to off"),
        (json.dumps({**config, "hidden_size": "many"}), "hidden_size"),
        ("[]", "expected an object, got list"),
        ("{", "not valid JSON"),
    ):
        file.write_text(text)
        assert says in refused(capsys, command)
    with pytest.raises(SystemExit):
        main(["train", str(TOY_RECIPE), "--plan"])
    assert "unrecognized arguments: --plan" in capsys.readouterr().err


def test_check_prints_hints(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, is_hinted in (("bfloat16", True), ("float32", False)):
        out = planned(capsys, *toy.overrides(tmp_path, f"rollout.dtype={dtype}"))
        assert ("hint: the engine computes logits in bfloat16" in out) == is_hinted
