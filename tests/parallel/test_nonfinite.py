"""A step whose gradients are not finite on one rank changes no bit on any rank, under any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routes import Replay
from mrl.errors import NotFinite
from mrl.types import Sample
from parallel.model import unwrap
from parallel.optimizer.state import get_step, optimizer_shards
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import Layout, build, join_mesh, loss, ready_batch
from tests.ranks import run_ranks
from tests.release import release

LAYOUTS = [
    Layout(2, {"expert": 2}, dtype="bfloat16", distributed_optimizer=True),
    release(Layout(2, {"tensor": 2})),
    release(Layout(2, {"pipeline": 2, "virtual_pipeline": 2}, dtype="bfloat16")),
    release(Layout(2, {"context": 2}, recompute=False)),
    release(Layout(2, distributed_optimizer=True, recompute=False)),
    release(Layout(4, {"tensor": 2, "pipeline": 2}, distributed_optimizer=True)),
]
BAD = 1
"""The micro-batch that overflows, counted from 0."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def state_of(policy: Policy) -> list[Tensor]:
    """Every bit that a step may change: weights, buffers, Adam's state, its count and the schedule."""
    found = [t.detach().clone() for chunk in policy.chunks for t in chunk.parameters()]
    found += [t.clone() for chunk in policy.chunks for _, t in chunk.named_buffers()]
    for shard in optimizer_shards(policy.optimizer).values():
        found += [tensor.clone() for tensor in shard.tensors.values()]
    counts = [get_step(policy.optimizer), policy.scheduler.num_steps]
    return [*found, torch.tensor(counts), torch.tensor(policy.optimizer.param_groups[0]["lr"])]


def overflow(policy: Policy, where: str) -> list[Any]:
    """Make a gradient of this rank infinite: of one weight, or of the last layer's input in one
    micro-batch. Return the hooks."""
    chunk = unwrap(policy.chunks[-1])
    if where == "weight":
        weight = next(p for p in chunk.decoder.layers[-1].parameters() if p.requires_grad)
        return [weight.register_hook(lambda grad: grad * math.inf)]
    calls: list[int] = []

    def before_layer(layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if torch.is_grad_enabled() and hidden.requires_grad:
            calls.append(1)
            if len(calls) == BAD + 1:
                hidden.register_hook(lambda grad: grad * math.nan)

    layer = chunk.decoder.layers[-1]
    return [layer.register_forward_pre_hook(before_layer, with_kwargs=True)]


def skips_a_step(model_path: Path, layout: Layout, samples: list[Sample]) -> dict[str, Any]:
    """A step, one that overflows on the last rank alone, and two more: the second in a run without."""
    mesh = join_mesh(model_path, layout.sizes)
    found: dict[str, Any] = {"errors": [], "same": []}
    after = []
    for is_poisoned in (True, False):
        policy = build(
            model_path, mesh, layout.recompute, dtype=layout.dtype,
            distributed_optimizer=layout.distributed_optimizer,
        )  # fmt: skip
        batch, _ = ready_batch(policy, mesh, samples)
        policy.train_step(batch, loss, Replay.rollout)
        for where in ("weight", "activation") if is_poisoned else ():
            before = state_of(policy)
            hooks = overflow(policy, where) if mesh.rank == layout.world - 1 else []
            try:
                policy.train_step(batch, loss, Replay.rollout)
            except NotFinite as error:
                found["errors"].append(str(error))
            for hook in hooks:
                hook.remove()
            state = state_of(policy)
            found["same"].append(all(map(torch.equal, before, state)))
        policy.train_step(batch, loss, Replay.rollout)
        after.append(state_of(policy))
        ids = batch.micro_batches[BAD].sample_ids
        assert ids is not None
        found["ids"] = sorted(set(ids.tolist()) - {-1})
    found["as_without"] = all(map(torch.equal, *after))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    layout: Layout, model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """And the step after it is that of a run in which it never was."""
    ranks = run_ranks(layout.world, skips_a_step, model_path, layout, samples, folder=tmp_path)
    named = ", ".join(map(str, ranks[-1]["ids"]))
    for rank in ranks:
        weight, activation = rank["errors"]
        assert "a gradient of the weights is not finite" in weight
        assert activation.endswith(f"in the micro-batches of the samples {named}")
        assert rank["same"] == [True, True]
        assert rank["as_without"]
