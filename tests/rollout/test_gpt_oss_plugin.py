"""mrl's plug-in for gpt-oss in SGLang: attention with sinks, and weights of single experts.

`tests/loop/test_architectures.py` runs it in a server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.engines.sglang.plugins.gpt_oss.mrl_gpt_oss import EXPERT, attend, load_expert
from mrl.engines.sglang.settings import model_settings, server_environment

HEADS, GROUPS, SIZE = 4, 2, 8
EXPERTS, HIDDEN, WIDTH = 4, 6, 8
LAYER = "model.layers.2.mlp.experts"


@pytest.mark.parametrize("window", [None, -1, 0, 3])
@pytest.mark.parametrize("num_new", [1, 5, 9])
def test_attention_has_sinks_and_a_window(window: int | None, num_new: int) -> None:
    """A window of 3 shows a query its own key and the 3 before it, as SGLang counts them."""
    q = torch.randn(9, HEADS, SIZE, dtype=torch.float32)
    k, v = torch.randn(2, 9, GROUPS, SIZE)
    sinks = torch.randn(HEADS)
    whole = torch.zeros_like(q)
    for position in range(9):
        first = 0 if window is None or window < 0 else max(0, position - window)
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = (k[first : position + 1, group] @ q[position, head]) * 0.3
            weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
            whole[position, head] = weights @ v[first : position + 1, group]
    found = attend(q[-num_new:], k, v, sinks, 0.3, window)
    assert torch.allclose(found, whole[-num_new:], atol=1e-6)


def rank_of(tp: tuple[int, int], ep: tuple[int, int]) -> Any:
    """A layer's experts on rank (number, size) of tensor and expert parallelism."""
    own, width = EXPERTS // ep[1], WIDTH // tp[1]

    def local(expert: int) -> int:
        return expert - ep[0] * own if ep[0] * own <= expert < (ep[0] + 1) * own else -1

    shapes = {
        "w13_weight": (own, 2 * width, HIDDEN),
        "w13_weight_bias": (own, 2 * width),
        "w2_weight": (own, HIDDEN, width),
        "w2_weight_bias": (own, HIDDEN),
    }
    parameters = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    return SimpleNamespace(
        moe_tp_rank=tp[0],
        moe_tp_size=tp[1],
        _map_global_expert_id_to_local_expert_id=local,
        **parameters,
    )


def loaded(weights: dict[str, Tensor], experts: Any) -> Any:
    model: Any = SimpleNamespace(get_submodule=lambda name: {LAYER: experts}[name])
    for name, tensor in weights.items():
        found = EXPERT.fullmatch(name)
        assert found is not None
        load_expert(model, tensor, **found.groupdict())
    return experts


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_weights_of_single_experts_come_to_their_places(tp: int, ep: int) -> None:
    shapes = {
        "gate_proj.weight": (WIDTH, HIDDEN),
        "gate_proj.bias": (WIDTH,),
        "up_proj.weight": (WIDTH, HIDDEN),
        "up_proj.bias": (WIDTH,),
        "down_proj.weight": (HIDDEN, WIDTH),
        "down_proj.bias": (HIDDEN,),
    }
    weights = {
        f"{LAYER}.{expert}.{name}": torch.randn(shape)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    num_own = EXPERTS // ep
    for ep_rank in range(ep):
        ranks = [loaded(weights, rank_of((rank, tp), (ep_rank, ep))) for rank in range(tp)]
        for own in range(num_own):
            name = f"{LAYER}.{ep_rank * num_own + own}."
            for kind, suffix in (("weight", "w13_weight"), ("bias", "w13_weight_bias")):
                rows = torch.cat([getattr(rank, suffix)[own] for rank in ranks])
                assert torch.equal(rows[0::2], weights[f"{name}gate_proj.{kind}"])
                assert torch.equal(rows[1::2], weights[f"{name}up_proj.{kind}"])
            columns = torch.cat([rank.w2_weight[own] for rank in ranks], dim=1)
            assert torch.equal(columns, weights[f"{name}down_proj.weight"])
            added = sum(rank.w2_weight_bias[own] for rank in ranks)  # as SGLang adds the ranks up
            assert torch.equal(added, weights[f"{name}down_proj.bias"])


def test_another_layout_of_the_weights_is_refused() -> None:
    experts = rank_of((0, 1), (0, 1))
    experts.w13_weight = experts.w13_weight.transpose(1, 2).contiguous()
    with pytest.raises(
        RuntimeError, match=r"expert 1 has gate_proj.weight \[8, 6\] on this rank, but"
    ):
        loaded({f"{LAYER}.1.gate_proj.weight": torch.zeros(WIDTH, HIDDEN)}, experts)


def test_the_plug_in_and_its_settings_are_those_of_gpt_oss_alone() -> None:
    for kind, is_there in (("gpt_oss", True), ("qwen3_moe", False)):
        path = server_environment((), 1, model_type=kind)["PYTHONPATH"]
        assert ("plugins/gpt_oss" in path) == is_there
        assert bool(model_settings(kind, {}, on_gpu=False)) == is_there
    assert model_settings("gpt_oss", {}, on_gpu=True) == {"moe_runner_backend": "triton"}
    assert model_settings("gpt_oss", {"moe_runner_backend": "auto"}, on_gpu=True) == {}
