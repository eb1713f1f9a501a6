"""`megatron:` at `mrl check`: what is refused, in one line each; a recipe with options trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import load_recipe
from mrl.jobs.train import train
from parallel.mesh import world_size
from parallel.versions import installed_version
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy
from tests.loop.test_refusals import refused
from tests.ranks import run_ranks
from tests.release import release

RECIPE = REPOSITORY / "launch/recipes/megatron_options.yaml"
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
HALF = "model.dtype=bfloat16"
OFFLOAD = "megatron.optimizer_cpu_offload=true"

CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown": (
        ["megatron.overlap_grad_redcue=true"],
        [
            f"megatron-core {installed_version('megatron-core')} has no such option",
            "did you mean 'overlap_grad_reduce'",
        ],
    ),
    "a flag with a number": (
        ["megatron.overlap_grad_reduce=1"],
        ["overlap_grad_reduce: got 1, expected true or false"],
    ),
    "a number with a text": (
        ["megatron.bucket_size=big"],
        ["bucket_size: got 'big', expected an integer or null"],
    ),
    "a list with a text": (
        ["megatron.recompute_modules=moe"],
        ["recompute_modules: got 'moe', expected a list of text or null"],
    ),
    "no such dtype": (
        ["megatron.exp_avg_dtype=bf17"],
        ["exp_avg_dtype: got 'bf17', expected the torch name of a dtype, such as bfloat16"],
    ),
    "not a choice": (
        ["megatron.moe_router_dtype=fp16"],
        ["moe_router_dtype: got 'fp16', expected one of fp32, fp64 or null"],
    ),
    "not a member": (
        ["megatron.attention_backend=flush"],
        ["attention_backend: got 'flush', expected one of flash, fused, unfused, local, auto"],
    ),
    "another key's, parallel": (
        ["megatron.expert_model_parallel_size=2"],
        ["mrl sets it itself", "use parallel.expert_model_parallel_size"],
    ),
    "another key's, optimizer": (["megatron.lr=1e-3"], ["use optimizer.lr"]),
    "another key's, dtype": (["megatron.bf16=true"], ["use model.dtype"]),
    "another key's, balancing": (
        ["megatron.moe_router_load_balancing_type=aux_loss"],
        ["use moe.load_balancing_type"],
    ),
    "the model's": (["megatron.moe_router_topk=4"], ["use the model's config.json"]),
    "dropout": (["megatron.hidden_dropout=0.1"], ["mrl refuses it", "different models"]),
    "a router without replay": (
        ["megatron.moe_router_fusion=true"],
        ["without regard to a replayed route"],
    ),
    "dropped tokens": (["megatron.moe_expert_capacity_factor=1.0"], ["drop or pad tokens"]),
    "graphs": (["megatron.cuda_graph_impl=local"], ["a CUDA graph has one shape"]),
    "a check that hangs": (
        ["megatron.check_for_nan_in_grad=true"],
        ["raises on the rank that has the gradient while the others wait"],
    ),
    "a function": (["megatron.timers=null"], ["it is a function"]),
    "FSDP": (["megatron.use_megatron_fsdp=true"], ["FSDP shards parameters"]),
    "TransformerEngine's": (
        ["megatron.fp8=hybrid"],
        ["only layers of TransformerEngine have it, and these are local"],
    ),
    "a GPU's": (
        ["megatron.gradient_accumulation_fusion=true"],
        ["gradient_accumulation_fusion is True, but there is no CUDA device"],
    ),
    "fp8 that nothing keeps": (
        ["megatron.activation_func_fp8_input_store=true"],
        ["only the fused SwiGLU does that", "add bias_activation_fusion=true"],
    ),
    "without its switch": (
        ["megatron.overlap_param_gather=true"],
        ["does nothing without megatron.overlap_grad_reduce"],
    ),
    "without the distributed optimizer": (
        ["megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true"],
        ["optimizer.use_distributed_optimizer is false; set it to true"],
    ),
    "aware of fp32": (
        [DISTRIBUTED, "megatron.use_precision_aware_optimizer=true"],
        ["the weights are float32; set model.dtype=bfloat16"],
    ),
    "aware without TransformerEngine": (
        [DISTRIBUTED, HALF, "megatron.use_precision_aware_optimizer=true"],
        ["FusedAdam", "is not installed", "add optimizer_cpu_offload=true"],
    ),
    "offloaded moments in bf16": (
        [
            *(DISTRIBUTED, HALF, OFFLOAD, "megatron.optimizer_offload_fraction=1"),
            *("megatron.use_precision_aware_optimizer=true", "megatron.exp_avg_dtype=bfloat16"),
        ],
        ["exp_avg_dtype is bfloat16, but Megatron keeps float32"],
    ),
    "no share to offload": ([OFFLOAD], ["optimizer_offload_fraction is 0.0, expected above 0"]),
    "views to offload": (
        [DISTRIBUTED, OFFLOAD, "megatron.optimizer_offload_fraction=0.5"],
        ["with float32 weights", "use_distributed_optimizer=false"],
    ),
    "main parameters too late": (
        [HALF, OFFLOAD, "megatron.optimizer_offload_fraction=0.5"],
        ["with bfloat16 weights", "set optimizer.use_distributed_optimizer=true"],
    ),
    "full recompute": (["megatron.recompute_granularity=full"], ["use train.recompute=true"]),
    "two kinds of recompute": (
        ["train.recompute=true", "megatron.recompute_granularity=selective"],
        ["recomputes everything; leave one of them out"],
    ),
    "what Megatron forbids": (
        ["megatron={recompute_granularity: selective, recompute_modules: [moe_cat]}"],
        ["megatron-core does not accept recompute_granularity, recompute_modules", "moe_cat"],
    ),
    "on-policy layers": (
        ["rollout.true_on_policy=true", "megatron.moe_router_dtype=fp64"],
        ["true_on_policy needs the layers that the engine has"],
    ),
    "DeepEP": (
        ["parallel.moe_token_dispatcher_type=flex"],
        ["deep_ep is not installed; install DeepEP, or set it to alltoall"],
    ),
}


@pytest.mark.parametrize(("changes", "texts"), CASES.values(), ids=CASES.keys())
def test_bad_options_are_refused_in_one_line(
    changes: list[str],
    texts: list[str],
    toy: Toy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    line = refused(capsys, ["check", str(TOY_RECIPE), *toy.overrides(output, *changes)])
    for text in texts:
        assert text in line
    assert not output.exists()


def test_what_is_off_anyway_may_be_turned_off(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here there is no GPU and no TransformerEngine, and the router's fusion is never on."""
    off = [
        *("apply_rope_fusion", "gradient_accumulation_fusion", "moe_permute_fusion"),
        *("masked_softmax_fusion", "moe_router_fusion", "overlap_param_gather", "cpu_offloading"),
    ]
    keys = toy.overrides(tmp_path / "run", *(f"megatron.{name}=false" for name in off))
    main(["check", str(TOY_RECIPE), *keys])
    assert capsys.readouterr().out.endswith("ok\n")
    line = refused(capsys, ["check", str(TOY_RECIPE), *keys, "megatron.moe_router_fusion=0"])
    assert "moe_router_fusion: mrl refuses it" in line  # 0 is no false to Megatron


def test_a_plan_of_config_json_alone_knows_the_names(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(toy.model / "config.json", tmp_path)
    changes = [*toy.overrides(tmp_path / "run", "megatron.lr=1"), f"model.path={tmp_path}"]
    assert "use optimizer.lr" in refused(capsys, ["check", "--plan", str(TOY_RECIPE), *changes])


def run_recipe(overrides: list[str]) -> None:
    train(load_recipe(RECIPE, overrides), world_size())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("resumes", [False, release(True)])
def test_the_shipped_recipe_trains_on_two_ranks(
    resumes: bool, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """It trains from saved rollouts, without an engine, and resumes with another bucket size."""
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    overrides = toy.overrides(tmp_path / "run", saved, "train.num_steps=1")
    recipe = load_recipe(RECIPE, overrides)
    assert len(recipe.megatron) >= 10
    run_ranks(2, run_recipe, overrides, folder=tmp_path / "first")
    changed = {}
    if resumes:
        changed = {"bucket_size": 1000}
        more = ["train.num_steps=2", "megatron.bucket_size=1000"]
        run_ranks(2, run_recipe, [*overrides, *more], folder=tmp_path / "second")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    # The rewards of the second recorded step are all alike.
    assert [row["grad_norm"] > 0 for row in metrics] == [True, False][: 1 + resumes]
    kept = load_recipe(tmp_path / "run/config.yaml").megatron
    assert kept == {**recipe.megatron, **changed}
