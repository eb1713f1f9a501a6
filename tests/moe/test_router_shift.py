"""The router shift: by hand, and from Megatron's routers after their weights have moved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.replay import LayerReplay
from moe.router_shift import router_scores, router_shift
from moe.routes import Replay
from mrl.algorithms import grpo
from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.learn.batching import make_train_batch
from mrl.preflight import check
from mrl.types import LossOutput, MicroBatch, TrainBatch
from tests.loop.conftest import TOY_RECIPE
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks


@dataclasses.dataclass
class Chunk:
    layers: dict[int, LayerReplay]


def topk(scores: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
    values, ids = scores.topk(k)
    return values, ids


def ran(
    logits: list[Tensor], *, softmax_first: bool = False, target: Tensor | None = None
) -> Chunk:
    """Routers that are in a forward pass in which they had these logits [n, E]; top-2."""
    chunk = Chunk({})
    for number, each in enumerate(logits, start=1):
        layer = chunk.layers[number] = LayerReplay(number, False, softmax_first)
        layer.begin_forward(target, with_grad=False, scores=True)
        scores = each.softmax(-1) if softmax_first else each
        layer.get_replay_topk(scores, 2, default_compute_topk=topk)
    return chunk


def by_hand(before: list[Tensor], after: list[Tensor], chosen: list[Tensor]) -> Tensor:
    """f32[n] of each row: the mean over layers and active experts of |log r - log r_old|."""
    layers = [
        (b.softmax(-1).log() - a.softmax(-1).log()).abs().gather(1, ids).mean(1)
        for b, a, ids in zip(before, after, chosen, strict=True)
    ]
    return torch.stack(layers).mean(0)


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize("is_replayed", [False, True])
def test_it_is_the_papers(softmax_first: bool, is_replayed: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    before = [torch.randn(6, 8, generator=rng) for _ in range(3)]
    after = [x + 0.3 * torch.randn(6, 8, generator=rng) for x in before]
    target = torch.tensor([[0, 7]] * 6) if is_replayed else None
    old = router_scores(ran(before, softmax_first=softmax_first, target=target))
    assert old.ids.shape == old.logprobs.shape == (6, 3, 2)
    # What the routers choose now does not matter.
    now = ran(after, softmax_first=softmax_first)
    shift = router_shift(now, old)
    chosen = [x.topk(2).indices if target is None else target for x in before]
    rows = by_hand(before, after, chosen)
    torch.testing.assert_close(shift[1:], rows[:-1])
    assert shift[0] == 0
    same = ran(before, softmax_first=softmax_first)
    assert not router_shift(same, old).any()
    with pytest.raises(ValueError, match=r"5 rows and 3 layers, the scores before .* \(6, 3\)"):
        router_shift(ran([x[:5] for x in after]), old)


def shifts_of_a_step(model_path: Path) -> dict[str, Any]:
    """The shift in two training passes: under the weights of the pass before, and after a router of the
    second layer has been scaled."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, recompute=True)
    batch = make_train_batch(make_samples(), [1.0] * 13, grpo, mesh, 64)
    before = policy.forward_only(batch.micro_batches, Replay.rollout, keep_scores=True)
    replay = Replay.rollout.compared_with(before.router_scores)
    seen: list[Tensor] = []

    def loss(logprobs: Tensor, micro: MicroBatch) -> LossOutput:
        assert micro.router_shift is not None
        assert micro.router_shift.shape == logprobs.shape
        seen.append(micro.router_shift[micro.loss_mask])
        return LossOutput(logprobs.sum())

    ready = TrainBatch(batch.micro_batches, 1, 13)
    policy.compute_gradients(ready, loss, replay)
    unmoved, seen[:] = torch.cat(seen), []
    (chunk,) = policy.chunks
    routers = [m for m in chunk.modules() if type(m).__name__ == "TopKRouter"]
    with torch.no_grad():
        routers[1].weight.mul_(1.5)
    policy.compute_gradients(ready, loss, replay)
    moved = torch.cat(seen)
    one = len(batch.micro_batches) - 1
    half = policy.compute_gradients(
        TrainBatch(batch.micro_batches[one:], 1, 13), loss, replay.of_batches(slice(one, None))
    )
    return {
        "unmoved": float(unmoved.abs().max()),
        "moved": moved,
        "num": len(before.router_scores),
        "num_losses": len(half.losses),
    }


def test_a_router_that_moves_is_seen(tmp_path: Path) -> None:
    model_path = write_model(tmp_path / "model")
    (found,) = run_ranks(1, shifts_of_a_step, model_path, folder=tmp_path / "out")
    assert found["unmoved"] < 1e-6
    assert found["moved"].min() > 1e-3
    assert found["num"] > 2
    assert found["num_losses"] == 1


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("train.share_prefixes=auto", "share_prefixes is auto.*set it to off"),
        ("parallel.tensor_model_parallel_size=2", "tensor_model_parallel_size is 2.*set it to 1"),
        ("parallel.context_parallel_size=2", "context_parallel_size is 2"),
    ],
)
def test_layouts_that_split_a_row_are_refused(key: str, says: str, tmp_path: Path) -> None:
    keys = (f"model.path={write_model(tmp_path / 'model')}", f"output_dir={tmp_path / 'run'}")
    recipe = load_recipe(TOY_RECIPE, [*keys, "algorithm.router_shift_floor=0.8", key])
    with pytest.raises(InputError, match=says):
        check(recipe, 2 if "parallel" in key else 1)
