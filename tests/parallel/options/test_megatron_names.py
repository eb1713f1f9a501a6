"""Every Megatron name that mrl uses exists in the installed version, and takes what mrl passes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from parallel import prepare

ROOT = Path(__file__).parents[3]
SOURCES = [*sorted((ROOT / "parallel").rglob("*.py")), ROOT / "moe" / "replay.py"]
PASSED: dict[str, tuple[str, ...]] = {
    "megatron.core.distributed:DistributedDataParallel": (
        "config", "ddp_config", "module", "disable_bucketing"),
    "megatron.core.models.gpt:GPTModel": (
        "config", "transformer_layer_spec", "vocab_size", "max_sequence_length",
        "position_embedding_type", "rotary_base", "share_embeddings_and_output_weights",
        "pre_process", "post_process", "vp_stage"),
    "megatron.core.models.gpt:GPTModel.forward": (
        "input_ids", "position_ids", "attention_mask", "packed_seq_params"),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec": (
        "config", "use_transformer_engine", "normalization", "vp_stage"),
    "megatron.core.transformer.module:Float16Module.forward": ("fp32_output",),
    "megatron.core.optimizer:get_megatron_optimizer": ("config", "model_chunks"),
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler": (
        "init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style",
        "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style", "wsd_decay_steps",
        "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler",
        "lr_wsd_decay_style"),
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": (
        "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length",
        "micro_batch_size", "forward_only"),
    "megatron.core.parallel_state:initialize_model_parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size"),
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": (
        "seed", "inference_rng_tracker"),
    "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk": (
        "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu": (
        "tensor", "as_numpy", "record_stream"),
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": (),
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": (),
    "megatron.core.distributed:finalize_model_grads": ("model", "num_tokens"),
}  # fmt: skip
"""`module:name` and the parameters that mrl gives by name or by place."""
SETTINGS: dict[str, str] = {
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "DistributedDataParallelConfig": "megatron.core.distributed",
    "OptimizerConfig": "megatron.core.optimizer",
}
MODEL_SETTINGS = ("build_config", "transformer_config")
"""Functions whose dictionaries become arguments of TransformerConfig."""


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    prepare()


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of every `from megatron... import name` in the source."""
    return {
        (node.module, alias.name)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron")
        for alias in node.names
        if node.module
    }


def written_settings() -> dict[str, set[str]]:
    """The keys that the source gives to each of Megatron's configs."""
    found: dict[str, set[str]] = {name: set() for name in SETTINGS}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id.removeprefix("Megatron")
                if name in found:
                    found[name] |= {word.arg for word in node.keywords if word.arg}
            if isinstance(node, ast.FunctionDef) and node.name in MODEL_SETTINGS:
                found["TransformerConfig"] |= {
                    key.value
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Dict)
                    for key in inner.keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    return found


def resolve(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_imported_name_exists() -> None:
    names = imported_names()
    assert ("megatron.core.models.gpt", "GPTModel") in names  # the search finds something
    missing = []
    for module, name in sorted(names):
        if not hasattr(importlib.import_module(module), name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{module}.{name}")
    assert not missing


@pytest.mark.parametrize("place", PASSED)
def test_signatures_take_what_is_passed(place: str) -> None:
    parameters = inspect.signature(resolve(place)).parameters
    assert not set(PASSED[place]) - set(parameters), place


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_exist(name: str) -> None:
    config = getattr(importlib.import_module(SETTINGS[name]), name)
    written = written_settings()[name]
    assert written
    assert not written - {field.name for field in dataclasses.fields(config)}
