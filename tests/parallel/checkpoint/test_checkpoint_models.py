"""A checkpoint of another model of the same sizes is refused: its tensors would be another function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.weights import WeightMap
from tests.parallel.layouts import build, join_mesh
from tests.parallel.models import YARN, write_tiny
from tests.ranks import run_ranks

THETA = {"rope_theta": 10000.0, "rope_type": "default"}
OTHERS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "qwen2_moe": {
        "no bias": ({"qkv_bias": False}, "add_qkv_bias True there, False here"),
        "theta": ({"rope_parameters": THETA}, "rope_theta 50000.0 there, 10000.0 here"),
        "eps": ({"rms_norm_eps": 1e-2}, "layernorm_epsilon 1e-06 there, 0.01 here"),
        "norm": ({"norm_topk_prob": True}, "moe_router_pre_softmax True there, False here"),
        "topk": ({"num_experts_per_tok": 1}, "moe_router_topk 2 there, 1 here"),
        "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings False there, True here"),
    },
    "deepseek_v3": {
        "scaling": (
            {"rope_parameters": {**YARN, "factor": 8.0}},
            "rotary_scaling_factor 4.0 there, 8.0 here",
        ),
        "routed scale": (
            {"routed_scaling_factor": 1.0},
            "moe_router_topk_scaling_factor 2.5 there, 1.0 here",
        ),
    },
    "deepseek_v32": {
        "keys": ({"index_topk": 7}, "dsa_indexer_topk 6 there, 7 here"),
    },
}
"""What is changed -> what the refusal says."""


def refusals(saved: Path, others: list[Path], root: Path) -> list[str]:
    """What loading says for each model, the saved one first."""
    mesh = join_mesh(saved, {})
    store = Checkpoints(root, mesh, keep=1)
    store.save(1, build(saved, mesh), {})
    messages = []
    for path in (saved, *others):
        try:
            messages.append(f"loaded {store.load_newest(build(path, mesh)).step}")
        except InputError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_setting_that_differs_is_named(model_type: str, tmp_path: Path) -> None:
    saved, cases = write_tiny(model_type, tmp_path / "saved"), OTHERS[model_type]
    others = [write_tiny(model_type, tmp_path / name, **cases[name][0]) for name in cases]
    args = (saved, others, tmp_path / "c")
    same, *messages = run_ranks(1, refusals, *args, folder=tmp_path / "out")[0]
    assert same == "loaded 1"
    for message, (_, expected) in zip(messages, cases.values(), strict=True):
        assert f"is of another model: {expected}; give the model.path" in message


def without(weights: WeightMap, name: str) -> None:
    weights.entries = [entry for entry in weights.entries if entry.rule.megatron != name]


def lacks_a_parameter(model_path: Path, root: Path) -> list[str]:
    """What loading says with all parameters, and when the last stage does not have its norm."""
    mesh = join_mesh(model_path, {"pipeline": 2})
    policy, store = build(model_path, mesh), Checkpoints(root, mesh, keep=1)
    store.save(1, policy, {})
    messages = []
    for lacking in (False, True):
        if lacking and mesh.is_last_stage:
            without(policy.weights, "decoder.final_layernorm.weight")
        try:
            messages.append(f"loaded {store.load_newest(policy).step}")
        except InputError as error:
            messages.append(str(error))
    return messages


def test_a_tensor_that_no_rank_uses_is_refused_on_all(tmp_path: Path) -> None:
    """One that only the other stage uses is not."""
    saved = write_tiny("qwen3", tmp_path / "saved")
    for out in run_ranks(2, lacks_a_parameter, saved, tmp_path / "c", folder=tmp_path / "out"):
        whole, lacking = out
        assert whole == "loaded 1"
        assert "this model has no decoder.final_layernorm.weight; give" in lacking
