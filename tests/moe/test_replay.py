"""Replay in the routers: queues under pipeline schedules, gate gradients, R2 on packed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.align import local_routes, routes_of_trace
from moe.replay import LayerReplay
from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.learn.batching import make_train_batch
from mrl.types import NATIVE_ROUTE, LossOutput, MicroBatch, RoutingTrace, TrainBatch, VersionSpan
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks


def topk(scores: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
    values, ids = scores.topk(k)
    return values, ids


def call(replay: LayerReplay, scores: Tensor) -> Tensor:
    """The router's call of the hook: i64[n, K]."""
    return replay.get_replay_topk(scores, 2, default_compute_topk=topk)[1]


def targets(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(5, 8, generator=generator).topk(2).indices for _ in range(count)]


@pytest.mark.parametrize(
    "schedule",
    [
        ["F0", "B0", "F1", "B1", "F2", "B2"],  # one stage
        ["F0", "F1", "B0", "F2", "B1", "B2"],  # the first of two stages, 1F1B
        ["F0", "F1", "F2", "B0", "B1", "B2"],  # all forwards first, as in interleaved warm-up
    ],
)
def test_recompute_gets_the_routes_of_its_own_micro_batch(schedule: list[str]) -> None:
    wanted = targets(3)
    scores = [torch.rand(5, 8) for _ in wanted]
    replay = LayerReplay(1, keep_for_recompute=True)
    for move in schedule:
        number = int(move[1])
        if move[0] == "F":
            replay.begin_forward(wanted[number], with_grad=True)
        assert torch.equal(call(replay, scores[number]), wanted[number])
        replay.end_forward()
    assert replay.num_pending == 0


def test_queue_rules() -> None:
    replay = LayerReplay(3, keep_for_recompute=True)
    replay.begin_forward(targets(1)[0], with_grad=False)  # log-probs: nothing to recompute
    replay.end_forward()
    assert replay.num_pending == 0
    with pytest.raises(AssertionError, match="router 3 recomputed more than it ran"):
        call(replay, torch.rand(5, 8))
    replay.begin_forward(targets(1)[0], with_grad=True)
    assert replay.num_pending == 1
    with pytest.raises(ValueError, match=r"routes of layer 3: the router has \(4, 2\)"):
        call(replay, torch.rand(4, 8))


def test_rows_without_a_route_decide_for_themselves() -> None:
    (wanted,) = targets(1)
    wanted[[1, 4]] = NATIVE_ROUTE
    scores = torch.rand(5, 8)
    replay = LayerReplay(1, keep_for_recompute=False)
    replay.begin_forward(wanted, with_grad=True)
    chosen = call(replay, scores)
    native = topk(scores, 2)[1]
    assert torch.equal(chosen[[1, 4]], native[[1, 4]])
    assert torch.equal(chosen[[0, 2, 3]], wanted[[0, 2, 3]])


def test_scores_and_gradients_are_the_dense_ones_of_the_replayed_experts() -> None:
    """None of which is among the router's own: gathered from its sparse choice they would be 0."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]], requires_grad=True)
    replay = LayerReplay(1, keep_for_recompute=False)
    replay.begin_forward(torch.tensor([[3, 2]]), with_grad=True)
    values, ids = replay.get_replay_topk(scores, 2, default_compute_topk=topk)
    assert ids.tolist() == [[3, 2]]
    assert values.tolist() == [[scores[0, 3].item(), scores[0, 2].item()]]
    (values * torch.tensor([[10.0, 20.0]])).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0, 0.0, 20.0, 10.0]]


def test_a_trace_that_repeats_an_expert_is_not_replayed() -> None:
    """Zero bytes for padding, or rows that the engine lost: expert 0 K times over."""
    spans = (VersionSpan(0, 0, 4),)
    ids = torch.zeros((4, 3, 2), dtype=torch.uint8)
    ids[..., 1] = 1
    routes_of_trace(RoutingTrace(ids, (1, 2, 3), 8, spans, 0))
    ids[2, 1] = 0
    with pytest.raises(ValueError, match="token 2 repeats an expert in MoE layer 2"):
        routes_of_trace(RoutingTrace(ids, (1, 2, 3), 8, spans, 0))


def gate_gradient(model_path: Path) -> list[list[float]]:
    """Return each MoE layer's gradient of the gate along itself, by autograd and by differences."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    batch = make_train_batch(make_samples(), [1.0] * 13, gspo, mesh, 64)

    def loss(logprobs: Tensor, micro: MicroBatch) -> LossOutput:
        return LossOutput((logprobs * micro.loss_mask).sum())

    def total() -> float:
        out = policy.forward_only(batch.micro_batches, Replay.rollout)
        pairs = zip(out.logprobs, batch.micro_batches, strict=True)
        return sum(float((lp.double() * m.loss_mask).sum()) for lp, m in pairs)

    routers = [m.mlp.router for m in policy.chunks[0].module.decoder.layers if _is_moe(m)]
    policy.optimizer.step = lambda: (True, 0.0, None)  # gradients only
    policy.train_step(TrainBatch(batch.micro_batches, 1, 13), loss, Replay.rollout)
    found = []
    for router in routers:
        gradient = router.weight.main_grad.clone()
        direction = gradient / gradient.norm()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight.add_(direction, alpha=sign * 1e-3)
                values.append(total())
                router.weight.add_(direction, alpha=-sign * 1e-3)
        found.append([float(gradient.norm()), (values[0] - values[1]) / 2e-3])
    return found


def _is_moe(layer: Any) -> bool:
    return hasattr(layer.mlp, "router")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("routes") / "model")


def test_gradients_reach_the_gate_through_replayed_experts(
    model_path: Path, tmp_path: Path
) -> None:
    """The routes are random, so hardly any replayed expert is among the router's own best."""
    (found,) = run_ranks(1, gate_gradient, model_path, folder=tmp_path)
    assert len(found) == 3
    for analytic, numeric in found:
        assert analytic > 1.0
        assert analytic == pytest.approx(numeric, rel=0.01)


def r2_against_r3(model_path: Path) -> dict[str, Any]:
    """A record of earlier choices, replayed as R2, against the same ids in the batches as R3."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, recompute=True)
    batch = make_train_batch(make_samples(), [1.0] * 13, gspo, mesh, 64)
    routes = []
    for micro in batch.micro_batches:
        assert micro.routes is not None
        routes.append(local_routes(micro.routes, micro.routes.layer_numbers, 0, 1))
    record = Replay.recorded(routes)
    r3, r2 = (policy.forward_only(batch.micro_batches, how) for how in (Replay.rollout, record))
    native = policy.forward_only(batch.micro_batches, Replay.off)
    step = policy.train_step(
        TrainBatch(batch.micro_batches, 1, 13), lambda lp, m: LossOutput(lp.sum()), record
    )
    coverage = step.stats["routing/replay_coverage"]
    return {
        "micro_batches": len(record.routes),
        "sequences": max(len(m.cu_seqlens) - 1 for m in batch.micro_batches),
        "equal": all(torch.equal(a, b) for a, b in zip(r3.logprobs, r2.logprobs, strict=True)),
        "native": all(torch.equal(a, b) for a, b in zip(r3.logprobs, native.logprobs, strict=True)),
        "coverage": float(coverage.total / coverage.count),  # type: ignore[union-attr]
    }


def test_r2_holds_for_packed_micro_batches(model_path: Path, tmp_path: Path) -> None:
    (out,) = run_ranks(1, r2_against_r3, model_path, folder=tmp_path)
    assert out["micro_batches"] > 2
    assert out["sequences"] > 2
    assert out["equal"]
    assert not out["native"]
    assert out["coverage"] == 1.0
