"""Recorded gate weights in the place of the router's own, and routes that are only compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.provenance import without_stale_tokens
from moe.replay import LayerReplay, margins, with_gates
from moe.routes import GatedRoute, Replay
from mrl.algorithms import gspo
from mrl.learn.batching import make_train_batches
from mrl.types import LossOutput, MicroBatch, Sample, TrainBatch, VersionSpan
from parallel.model import unwrap
from tests.parallel.layouts import build, join_mesh
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks
from tests.release import release


def test_the_value_is_recorded_and_the_gradient_is_the_routers_own() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    own = scores.softmax(1)
    route = GatedRoute(torch.tensor([[3, 1], [-1, -1]]), torch.tensor([[0.7, 0.3], [9.0, 9.0]]))
    chosen = torch.zeros_like(own).scatter(1, torch.tensor([[3, 1], [3, 2]]), 1.0)
    probs = with_gates(own * chosen, route)
    assert probs[0].tolist() == [0.0, pytest.approx(0.3), 0.0, pytest.approx(0.7)]
    assert torch.equal(probs[1], (own * chosen)[1])  # no captured route: its own weights
    direction = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
    (straight,) = torch.autograd.grad((probs * direction).sum(), scores, retain_graph=True)
    (plain,) = torch.autograd.grad((own * chosen * direction).sum(), scores)
    assert torch.equal(straight, plain)
    assert plain.abs().min() > 0


def test_margins() -> None:
    scores = torch.tensor([[0.5, 0.1, 0.9, 0.4], [0.0, -1.0, -2.0, -3.0]])
    chosen = scores.topk(2).indices
    assert margins(scores, chosen).tolist() == [pytest.approx(0.1), 1.0]
    assert margins(scores, torch.tensor([[1, 2], [0, 1]]))[0] == pytest.approx(-0.4)  # other groups


def test_margins_are_noted_where_they_are_asked_for() -> None:
    replay, scores = LayerReplay(1, keep_for_recompute=False), torch.rand(5, 8)

    def topk(values: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        found = values.topk(k)
        return found.values, found.indices

    for watch in (True, False):
        replay.begin_forward(torch.randint(0, 8, (5, 2)), with_grad=False, watch=watch)
        replay.get_replay_topk(scores, 2, default_compute_topk=topk)
        assert (replay.margins is not None) == watch
    assert replay.native_ids is not None


def replayed_gates(model_path: Path, recompute: bool) -> dict[str, Any]:
    """Routes and weights of a model, replayed in one whose routers have changed."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, recompute=recompute)
    samples = tiny_samples(model_path)
    (batch,) = make_train_batches([(samples, [1.0] * len(samples))], gspo, mesh, 64, None)
    with policy.runner.replaying_gates(True):
        before = policy.forward_only(batch.micro_batches, Replay.off)
    layers = [x for x in unwrap(policy.chunks[0]).decoder.layers if hasattr(x.mlp, "router")]
    gates = [layer.mlp.router.weight for layer in layers]
    with torch.no_grad():
        for gate in gates:
            gate.mul_(-0.7)
    record = Replay.recorded(before.native_routes)
    ids = policy.forward_only(batch.micro_batches, record)

    def loss(logprobs: Tensor, micro: MicroBatch) -> LossOutput:
        return LossOutput((logprobs * micro.loss_mask).sum())

    old = [gate.detach().clone() for gate in gates]
    with policy.runner.replaying_gates(True):
        weights = policy.forward_only(batch.micro_batches, record)
        policy.train_step(TrainBatch(batch.micro_batches, 1, 1), loss, record)
    return {
        "before": torch.cat(before.logprobs),
        "ids": torch.cat(ids.logprobs),
        "weights": torch.cat(weights.logprobs),
        "moved": [float((gate - was).norm()) for gate, was in zip(gates, old, strict=True)],
        "after": [gate.detach().clone() for gate in gates],
    }


@pytest.mark.parametrize("model_type", [release("qwen3_moe"), "deepseek_v3"])
def test_with_ids_and_weights_the_routers_do_not_matter(model_type: str, tmp_path: Path) -> None:
    """Softmax, and sigmoid with bias, groups and a scale: all that a router gives is replaced."""
    path = write_tiny(model_type, tmp_path / "model")
    plain, again = (
        run_ranks(1, replayed_gates, path, recompute, folder=tmp_path / str(recompute))[0]
        for recompute in (False, True)
    )
    assert torch.equal(plain["weights"], plain["before"])
    assert not torch.equal(plain["ids"], plain["before"])
    assert min(plain["moved"]) > 0  # and yet they learn
    for ours, theirs in zip(again["after"], plain["after"], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)  # recompute used the weights too


def partly_stale(sample: Sample) -> Sample:
    """Its prompt, and so its first token, was routed by newer weights than sampled its tokens."""
    assert sample.routing is not None
    rows, cut = sample.routing.num_rows, sample.prompt_len
    spans = (VersionSpan(1, 0, cut), VersionSpan(0, cut, rows))
    return dataclasses.replace(
        sample, routing=dataclasses.replace(sample.routing, row_versions=spans)
    )


def compared(model_path: Path) -> dict[str, Any]:
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    samples = tiny_samples(model_path)
    parts = [(samples, [1.0] * len(samples))]
    (batch,) = make_train_batches(parts, gspo, mesh, 64)
    plain = policy.forward_only(batch.micro_batches, Replay.off)
    seen = policy.forward_only(batch.micro_batches, Replay.off, observe="rows")
    replayed = policy.forward_only(batch.micro_batches, Replay.rollout, observe="counts")
    whole = [partly_stale(s) for s in samples]
    kept, stale = without_stale_tokens(whole)
    lengths = [
        sum(int(m.loss_mask.sum()) for m in made.micro_batches)
        for each in (whole, kept)
        for made in make_train_batches([(each, parts[0][1])], gspo, mesh, 64, stale=stale)
    ]

    def numbers(stats: dict) -> dict[str, list[float]]:
        means = {k: v for k, v in stats.items() if k.startswith("routing/") and "median" not in k}
        return {key: [float(v.total), float(v.count)] for key, v in means.items()}

    return {
        "same": all(map(torch.equal, plain.logprobs, seen.logprobs)),
        "native": all(
            torch.equal(a[n], b[n].native.long())
            for a, b in zip(plain.native_routes, seen.observed, strict=True)
            for n in a
        ),
        "rows": sum(len(layers) for layers in seen.observed),
        "no rows": sum(len(layers) for layers in replayed.observed),
        "plain": sorted(plain.routing),
        "seen": numbers(seen.routing),
        "replayed": numbers(replayed.routing),
        "loss tokens": lengths,
    }


def test_routes_are_compared_without_replay(tmp_path: Path) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model")
    (out,) = run_ranks(1, compared, path, folder=tmp_path / "out")
    assert out["same"]
    assert out["native"]
    assert out["rows"] > 2
    assert out["no rows"] == 0
    assert not [key for key in out["plain"] if key.startswith("routing/")]
    seen, replayed = out["seen"], out["replayed"]
    both = {"routing/replay_coverage", "routing/captured_coverage"}
    assert replayed.keys() - seen.keys() == both
    first, *_, last = sorted(k for k in seen if k.startswith("routing/disagreement/"))
    assert seen[first] == replayed[first]  # nothing before it differs
    assert seen[last] != replayed[last]
    assert seen[first][0] > 0
    kept, dropped = out["loss tokens"]
    assert 0 < dropped < kept  # only a replay cannot do without the stale rows
