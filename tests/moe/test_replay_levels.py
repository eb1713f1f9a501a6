"""What R3 may replay beside the ids: the engine's gate weights, and the order of a token's experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute
from torch import Tensor

from mrl.types import Sample
from parallel.layers.dispatch import add_in_order, permuted_rows
from parallel.model import unwrap
from tests.parallel.layouts import (
    TOLERANCE,
    Layout,
    agreement,
    build,
    join_mesh,
    ready_batch,
    train_layout,
)
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks
from tests.release import release


def weighed_samples(model_path: Path) -> list[Sample]:
    """Samples with gate weights that are not the model's."""
    generator = torch.Generator().manual_seed(3)

    def weighed(sample: Sample) -> Sample:
        trace = sample.routing
        assert trace is not None
        weights = torch.rand(trace.expert_ids.shape, generator=generator)
        return dataclasses.replace(
            sample, routing=dataclasses.replace(trace, expert_weights=weights)
        )

    return [weighed(sample) for sample in tiny_samples(model_path)]


def reversed_order(sample: Sample) -> Sample:
    trace = sample.routing
    assert trace is not None
    assert trace.expert_weights is not None
    return dataclasses.replace(
        sample,
        routing=dataclasses.replace(
            trace,
            expert_ids=trace.expert_ids.flip(-1),
            expert_weights=trace.expert_weights.flip(-1),
        ),
    )


def old_logprobs(model_path: Path, replay: Any) -> dict[str, Tensor]:
    """Return log-probs along the routes: as they are, in reverse order, with other routers."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, replay=replay)
    samples = weighed_samples(model_path)

    def logprobs(these: list[Sample]) -> Tensor:
        batch, _ = ready_batch(policy, mesh, these)
        return torch.cat([micro.old_logprobs for micro in batch.micro_batches])

    found = {"plain": logprobs(samples), "reversed": logprobs([reversed_order(s) for s in samples])}
    with torch.no_grad():
        for layer in unwrap(policy.chunks[0]).decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.weight.mul_(-0.7)
    # The last token of a sample has no route; its row predicts nothing.
    return found | {"other routers": logprobs(samples)}


SIZES = {
    "qwen3_moe": {"num_experts_per_tok": 3},
    "deepseek_v3": {"num_experts_per_tok": 4, "topk_group": 2},  # with a shared expert
}


# test_gates has the gate weights of deepseek_v3.
@pytest.mark.parametrize("model_type", ["qwen3_moe", release("deepseek_v3")])
def test_each_level_takes_its_part(model_type: str, tmp_path: Path) -> None:
    path = write_tiny(model_type, tmp_path / "model", **SIZES[model_type])
    found = {
        replay: run_ranks(1, old_logprobs, path, replay, folder=tmp_path / replay)[0]
        for replay in ("ids", "ids_weights", "ids_order_weights")
    }
    for replay, logprobs in found.items():
        assert torch.allclose(logprobs["plain"], logprobs["reversed"], atol=1e-5)
        same = torch.equal(logprobs["plain"], logprobs["reversed"])
        assert same == (replay == "ids_weights")  # the sum of its own weights has an order as well
        same = torch.equal(logprobs["plain"], logprobs["other routers"])
        assert same == ("weights" in replay)
    assert (found["ids"]["plain"] - found["ids_weights"]["plain"]).abs().max() > 1e-3


def test_weights_that_nobody_captured_are_not_left_out_silently(tmp_path: Path) -> None:
    """Such are rollouts that were saved without gate weights."""
    path = write_tiny("qwen3_moe", tmp_path / "model")

    def replayed() -> None:
        mesh = join_mesh(path, {})
        ready_batch(build(path, mesh, replay="ids_weights"), mesh, tiny_samples(path))

    with pytest.raises(AssertionError, match="the routes of the samples carry none"):
        run_ranks(1, replayed, folder=tmp_path / "out")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {"tensor": 2, "expert": 2}, replay="ids_order_weights"),
        release(Layout(2, {"context": 2, "expert": 2}, replay="ids_order_weights")),
        release(Layout(4, {"tensor": 2, "context": 2, "expert": 2}, replay="ids_order_weights")),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_agree_on_weights_and_order(layout: Layout, tmp_path: Path) -> None:
    """Slices of sequence or context parallelism, experts on other ranks, and recompute."""
    path = write_tiny("qwen3_moe", tmp_path / "model", num_experts=8, num_experts_per_tok=3)
    samples = weighed_samples(path)
    one, many = (
        run_ranks(each.world, train_layout, path, each, samples, folder=tmp_path / each.name)[0]
        for each in (Layout(1, replay="ids_order_weights"), layout)
    )
    found = agreement(many, one, one["loaded"])
    assert found.replay_coverage == 1.0
    assert found.worst < TOLERANCE


def test_the_order_of_the_sum() -> None:
    """Compares with Megatron's own permutation, in numbers where each order has another sum."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(50, 6, generator=generator).topk(4).indices
    routing_map = torch.zeros(50, 6, dtype=torch.bool).scatter(1, ids, value=True)
    given = torch.arange(50.0)[:, None]
    permuted, _, tokens, *_ = permute(given, routing_map, num_out_tokens=50 * 4)
    rows = permuted_rows(routing_map, ids)
    assert torch.equal(permuted[rows, 0], torch.arange(50.0)[:, None].expand(-1, 4))
    experts = torch.arange(6).repeat_interleave(routing_map.sum(0))
    assert torch.equal(experts[rows], ids)
    outputs = torch.randn(len(tokens), 3, generator=generator)
    expected = torch.zeros(50, 3)
    for k in range(4):
        expected += outputs[rows[:, k]]
    assert torch.equal(add_in_order(outputs, rows), expected)
    assert not torch.equal(add_in_order(outputs, rows.flip(1)), expected)
