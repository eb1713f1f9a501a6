"""Bad input: `mrl check` and `mrl train` print one clear line and exit with code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import RolloutConfig
from mrl.engines.sglang.limits import check_limits
from mrl.errors import InputError
from mrl.toy_model import write_toy_model
from parallel.versions import installed_version
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.release import release

CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["optimizer.lrr=1"], ["unknown key 'optimizer.lrr'", "'optimizer.lr'"]),
    "unknown key elsewhere": (["rollout.lr=1"], ["'rollout.lr'", "did you mean 'optimizer.lr'"]),
    "neither of two types": (
        ["rollout.weight_bucket_mb=lots"],
        ["rollout.weight_bucket_mb: Input should be a valid ", "or: Input should be 'auto'"],
    ),
    "wrong type": (["train.num_steps=many"], ["train.num_steps", "'many'"]),
    "sizes": (
        ["parallel.tensor_model_parallel_size=2"],
        ["1 ranks are not divisible by tensor 2 x context 1 x pipeline 1 = 2"],
    ),
    "rollout sizes": (
        ["rollout.tensor_parallel_size=2"],
        ["1 rank(s) are not divisible by 2 (1 = 0 x 2 + 1)"],
    ),
    "mini-batches": (
        ["train.num_steps_per_rollout=3"],
        ["prompts_per_step 4 is not divisible", "(4 = 1 x 3 + 1)"],
    ),
    "model folder": (["model.path=/nowhere"], ["no folder /nowhere", "mrl toy-model"]),
    "hub id": (
        ["model.path=Qwen/Qwen3-30B-A3B"],
        ["hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B", "model.path=models/Q"],
    ),
    "algorithm": (["algorithm.name=gsop"], ["gsop", "gspo"]),
    "supervised loss": (["algorithm.name=nll"], ["nll", "gspo or grpo"]),
    "reward name": (["reward=first_chr"], ["first_chr", "did you mean 'first_char'"]),
    "reward file": (["reward=nowhere.py:f"], ["nowhere.py"]),
    "engine": (["rollout.engine=sglnag"], ["sglnag", "sglang"]),
    "argument of the engine": (
        ["rollout.server_args={moe_runner_backend: tritn}"],
        ["moe_runner_backend: got 'tritn'", "expects one of auto, deep_gemm, triton"],
    ),
    "replay": (["moe.routing_replay=r4"], ["moe.routing_replay", "'r4'"]),
    "gate weights that nobody recorded": (
        ["moe.replay=ids_weights"],
        ["moe.replay is ids_weights with", "set rollout.return_routing_weights=true"],
    ),
    "order without replay": (
        ["moe.replay=ids_order", "moe.routing_replay=off"],
        ["moe.replay is ids_order", "routing_replay is off", "set it to r2 or r3"],
    ),
    "order that the dispatcher does not know": (
        ["moe.replay=ids_order", "parallel.moe_token_dispatcher_type=allgather"],
        ["order of the experts", "is allgather", "set it to alltoall"],
    ),
    "weights of routes that nobody asks for": (
        ["rollout.return_routing_weights=true", "moe.routing_replay=off"],
        ["return_routing_weights is true", "no routes", "or leave it out"],
    ),
    "balancing without a type": (
        ["moe.aux_loss_coeff=1e-3"],
        ["moe.aux_loss_coeff is 0.001", "load_balancing_type is none", "choose a type"],
    ),
    "balancing without a weight": (
        ["moe.load_balancing_type=aux_loss"],
        ["load_balancing_type is aux_loss", "aux_loss_coeff is 0", "give it a weight"],
    ),
    "no expert bias": (
        ["moe.expert_bias_update_rate=1e-3"],
        ["expert_bias_update_rate is 0.001", "qwen3_moe have no expert bias", "set it to 0"],
    ),
    "no reference": (
        ["algorithm.kl_coef=0.1", "algorithm.reference_path=/nowhere"],
        ["algorithm.reference_path: no folder /nowhere"],
    ),
    "reference without a weight": (
        ["algorithm.reference_path=/nowhere"],
        ["algorithm.reference_path is /nowhere", "kl_coef is 0"],
    ),
    "on-policy dtype": (
        ["rollout.true_on_policy=true", "model.dtype=bfloat16"],
        ["model.dtype is bfloat16, but rollout.true_on_policy needs float32"],
    ),
    "on-policy engine dtype": (
        ["rollout.true_on_policy=true", "rollout.dtype=bfloat16"],
        ["rollout.dtype is bfloat16, but rollout.true_on_policy needs float32"],
    ),
    "on-policy attention": (
        [
            "rollout.true_on_policy=true",
            "rollout.server_args.attention_backend=intel_amx",
        ],
        [
            "server_args.attention_backend is intel_amx, but rollout.true_on_policy needs torch_native"
        ],
    ),
    "on-policy LM head": (
        ["rollout.true_on_policy=true", "rollout.server_args={enable_fp32_lm_head: true}"],
        ["server_args.enable_fp32_lm_head is True, but rollout.true_on_policy needs False"],
    ),
    "over-sampling": (["rollout.over_sampling=0.5"], ["rollout.over_sampling", "0.5"]),
    "nothing to resume": (
        ["rollout.partial_rollouts=resume"],
        ["partial_rollouts is resume", "over_sampling 1.0 every prompt finishes"],
    ),
    "resume without weights": (
        ["rollout.partial_rollouts=resume", "rollout.over_sampling=1.5"],
        ["algorithm.importance is none", "set algorithm.importance=tis"],
    ),
    "fewer rows than are started": (
        ["rollout.over_sampling=129"],
        ["512 prompts, a step starts 516", "prompts_per_step 4 x rollout.over_sampling 129"],
    ),
    "range without a weight": (
        ["algorithm.importance_high=3"],
        ["algorithm.importance_high is 3.0", "importance is none", "choose tis or mis"],
    ),
    "level without a weight": (
        ["algorithm.importance_level=sequence"],
        ["algorithm.importance_level is sequence", "importance is none", "choose tis or mis"],
    ),
    "empty range": (
        ["algorithm.importance=tis", "algorithm.importance_low=3"],
        ["algorithm.importance: got the range [3.0, 2.0]", "low <= high"],
    ),
    "context": (["rollout.max_response_len=512"], ["no room for a prompt", "512", "a smaller one"]),
    "response length": (["rollout.min_response_len=3"], ["expected 0 or max_response_len 12"]),
    "saved rollouts": (["debug.load_rollouts=/nowhere"], ["debug.load_rollouts", "/nowhere"]),
    "output folder": (["output_dir=README.md/run"], ["README.md is not a folder"]),
    "output folder that nobody can make": (
        ["output_dir=/proc/x"],
        ["output_dir /proc/x: no folder can be created in /proc"],
    ),
    "cache": (
        ["rollout.max_total_tokens=20"],
        ["rollout: its longest prompt and answer have", "cache of 20", "holds 13 of one request"],
    ),
    "cache of an evaluation": (
        [
            "rollout.max_total_tokens=64",
            "eval={every: 1, sets: [{name: long, path: launch/recipes/data/first_char.jsonl, "
            "max_response_len: 60}]}",
        ],
        ["eval set long: rollout: its longest prompt and answer have", "holds 57 of one request"],
    ),
    "sft": (
        ["sft={path: nowhere.jsonl, num_steps: 1, batch_size: 1, lr: 1e-3}"],
        ["nowhere.jsonl", "No such file"],
    ),
    "no TransformerEngine": (
        ["model.transformer_impl=transformer_engine"],
        ["no CUDA device", "mrl[te]"],
    ),
}


def refused(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err + captured.out
    return lines[0]


@pytest.mark.parametrize("name", ["check", release("train")])
@pytest.mark.parametrize("case", CASES)
def test_refused(
    name: str, case: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = CASES[case]
    output = tmp_path / "run"
    line = refused(capsys, [name, str(TOY_RECIPE), *toy.overrides(output, *changes)])
    for text in expected:
        assert text in line
    assert not output.exists()


def test_a_reference_of_another_size(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    write_toy_model(other, num_experts=4)
    changes = ("algorithm.kl_coef=0.1", f"algorithm.reference_path={other}")
    line = refused(capsys, ["check", str(TOY_RECIPE), *toy.overrides(tmp_path / "run", *changes)])
    assert "num_moe_experts 4 there, 8 here" in line


def test_several_ranks_in_one_process_say_how_to_start(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [str(TOY_RECIPE), *toy.overrides(tmp_path / "run"), "optimizer.lr=1e-5"]
    recipe += ["parallel.expert_model_parallel_size=4", "rollout.tensor_parallel_size=2"]
    assert "`mrl check RECIPE --gpus 4`" in refused(capsys, ["check", *recipe])
    assert "python -m mrl.launch --nproc-per-node 4 -m mrl train RECIPE" in refused(
        capsys, ["train", *recipe]
    )
    main(["check", *recipe, "--gpus", "4"])
    printed = capsys.readouterr().out
    assert "4 rank(s) = tensor 1 x pipeline 1 x data 4; expert 4" in printed
    assert "checked for 4 GPU(s), which this machine does not have" in printed
    assert "hint: " not in printed
    # Options that need GPUs are taken on trust there, and their names are not.
    gpu = ["model.transformer_impl=transformer_engine", "megatron.optimizer_cpu_offload=true"]
    main(["check", *recipe, *gpu, "rollout.dtype=bfloat16", "--gpus", "4"])
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("hint: the engine computes logits in bfloat16") for line in printed)
    wrong = [*recipe, "megatron.optimizer_cpu_ofload=true", "--gpus", "4"]
    assert "optimizer_cpu_offload" in refused(capsys, ["check", *wrong])


def test_an_architecture_that_the_engine_cannot_run_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    """On a CPU, SGLang computes the attention of DeepSeek-V3 wrongly, and that of V3.2 not at all."""
    rollout = RolloutConfig(max_response_len=8)
    for kind, on_gpu, routes, expected in (
        ("deepseek_v3", False, False, "roll it out on GPUs"),
        ("deepseek_v3", True, True, ""),
        ("deepseek_v32", False, False, "runs on CUDA, HIP and NPU only"),
        ("deepseek_v32", True, True, ""),
        ("qwen2_moe", False, False, ""),
        ("mixtral", True, True, ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        try:
            check_limits(tmp_path, rollout, on_gpu=on_gpu, return_routes=routes)
            said = ""
        except InputError as error:
            said = str(error)
        assert expected in said
        assert bool(expected) == bool(said)


@pytest.mark.parametrize("name", ["check", release("train")])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "ab"', "not valid JSON"),
        ('["prompt"]', "expected a JSON object"),
        ('{"answer": "4"}', "no `prompt`"),
        (
            '{"prompt": "a", "completions": 1}',
            "'completions' is the name of an argument of the reward call",
        ),
        (json.dumps({"prompt": "a" * 501}), "prompt has 501 tokens, at most 500 fit"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    name: str,
    row: str,
    reason: str,
    toy: Toy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n' * 6 + row + "\n")
    command = [name, str(TOY_RECIPE), *toy.overrides(tmp_path / "run", f"data.path={data}")]
    line = refused(capsys, command)
    assert f"{data}:7: " in line
    assert reason in line


def test_a_reward_that_does_not_import(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("import a_package_that_is_not_there\n")
    command = ["train", str(TOY_RECIPE), *toy.overrides(tmp_path / "run", f"reward={reward}:f")]
    line = refused(capsys, command)
    assert "cannot be imported" in line
    assert "a_package_that_is_not_there" in line


@pytest.mark.parametrize("name", ["check", "train"])
def test_a_reward_that_returns_text_is_refused_before_an_engine_starts(
    name: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def f(prompts, completions, **columns):\n    return ['1' for _ in prompts]\n"
    )
    line = refused(
        capsys, [name, str(TOY_RECIPE), *toy.overrides(tmp_path / "run", f"reward={reward}:f")]
    )
    wrong = "gave a wrong value: reward 0 is '1', expected a num"
    assert f"first_char.jsonl:1: the reward '{reward}:f' {wrong}" in line
    assert not (tmp_path / "run").exists()


def test_a_number_of_ranks_that_is_not_given_is_not_guessed(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = toy.overrides(tmp_path / "run", "rollout.placement=disaggregated")
    line = refused(capsys, ["train", str(TOY_RECIPE), *keys])
    assert line.endswith("rollout.num_ranks is missing; set how many of the ranks lead engines")


def test_check_prints_the_plan(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / ("a_long_name_" * 10)
    main(["check", str(TOY_RECIPE), *toy.overrides(run)])
    out = capsys.readouterr().out
    for text in (
        str(run),
        f"megatron-core {installed_version('megatron-core')}",
        "sglang 0.5.23",
        "8 experts",
        "routing replay r3",
        "ok",
    ):
        assert text in out
    assert not run.exists()


def test_a_recipe_that_is_not_there_or_not_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in refused(capsys, ["check", str(tmp_path / "none.yaml")])
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [")
    assert "not valid YAML" in refused(capsys, ["check", str(broken)])


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    """`mrl recipe | head` has no traceback."""
    read, write = os.pipe()
    os.close(read)
    entry = [sys.executable, "-m", "mrl", "recipe"]
    done = subprocess.run(entry, check=False, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
