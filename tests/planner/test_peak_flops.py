"""The peak of a GPU by its name, and the FLOPs of a training pass."""

from __future__ import annotations

import json

import pytest

from mrl.planner.peak_flops import peak_flops, training_flops
from mrl.planner.shape import read_shape
from mrl.toy_model import write_toy_model


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-16GB", None),  # has no bf16
    ],
)
def test_a_device_is_known_by_its_name(name, peak):
    assert peak_flops(name) == peak


def test_training_flops_are_six_per_active_parameter_and_token(tmp_path):
    """Counted by hand for the toy model."""
    write_toy_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    shape = read_shape(config)
    hidden, layers, vocab = (
        config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    experts = 3 * config["num_experts_per_tok"] * hidden * config["moe_intermediate_size"]
    router = hidden * shape.num_experts
    active = layers * (attention + experts + router) + vocab * hidden
    scores = sum(6 * layers * 2 * heads * head * (length / 2) * length for length in (10, 30))
    assert training_flops(shape, [10, 30]) == 6 * active * 40 + scores
