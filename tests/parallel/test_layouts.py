"""The short form of `make layouts`: every kind of parallelism once, and what a resumed run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.config import OptimizerConfig
from mrl.config.adapter import Experts
from mrl.learn.batching import make_train_batches
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from tests.parallel import layouts
from tests.parallel.adapters import write_lora
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import (
    TOLERANCE,
    Agreement,
    Layout,
    agreement,
    build,
    distance,
    exported,
    join_mesh,
    loss,
    ready_batch,
    train_layout,
)
from tests.ranks import run_ranks
from tests.release import release

LAYOUTS = [
    Layout(2, distributed_optimizer=True),
    Layout(2, {"pipeline": 2, "virtual_pipeline": 2}),
    Layout(2, {"context": 2}),
    Layout(2, {"expert": 2, "dispatcher": "allgather"}),
    Layout(2, {"tensor": 2, "expert_tensor": 2}),
    release(Layout(2, {"pipeline": 2, "first": 1}, recompute=False)),
    release(Layout(4, {"tensor": 2, "pipeline": 2, "expert": 2})),
    release(Layout(8, {"tensor": 2, "pipeline": 2, "expert": 2}, distributed_optimizer=True)),
    release(Layout(4, {"tensor": 2, "expert_tensor": 2, "expert": 2})),
    release(Layout(4, {"tensor": 2, "context": 2})),
    release(Layout(4, {"pipeline": 2, "context": 2, "expert": 2, "dispatcher": "allgather"})),
]
# test_muon.py has the update of shards, and a state that moves between layouts, in `make test`.
MUON = [
    release(Layout(2, {"tensor": 2, "expert_tensor": 2}, optimizer="muon")),
    release(Layout(2, distributed_optimizer=True, optimizer="muon")),
    release(
        Layout(
            8,
            {"tensor": 2, "pipeline": 2, "expert": 2},
            distributed_optimizer=True,
            optimizer="muon",
        )
    ),
    release(Layout(4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, optimizer="muon")),
    release(
        Layout(
            4,
            {"pipeline": 2, "virtual_pipeline": 2},
            distributed_optimizer=True,
            optimizer="muon",
        )
    ),
]
LORA = [
    Layout(2, {"tensor": 2, "expert_tensor": 2}, lora="per_expert"),
    release(Layout(2, {"expert": 2}, lora="shared_outer", distributed_optimizer=True)),
    release(Layout(2, {"tensor": 2, "expert_tensor": 2}, lora="shared_outer")),
    release(Layout(2, {"expert": 2}, lora="per_expert", loops=True)),
    release(Layout(2, {"pipeline": 2, "virtual_pipeline": 2}, lora="per_expert")),
    release(Layout(2, {"context": 2}, lora="none")),
    release(
        Layout(
            8,
            {"tensor": 2, "pipeline": 2, "expert": 2},
            lora="shared_outer",
            distributed_optimizer=True,
        )
    ),
]
"""Layouts that train an adapter of all projections."""
LORA_BFLOAT16 = [
    Layout(2, {"tensor": 2, "expert_tensor": 2}, dtype="bfloat16", lora="per_expert"),
    Layout(2, dtype="bfloat16", lora="shared_outer", distributed_optimizer=True),
]
BFLOAT16_TOLERANCE = 2e-2


@pytest.fixture(scope="module", autouse=True)
def two_steps() -> Iterator[None]:
    """`make layouts` takes three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "NUM_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Seven samples of uneven lengths: a step has two or three micro-batches."""
    return few_samples()


@pytest.fixture(scope="module")
def reference(
    model_path: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("reference")
    return run_ranks(1, train_layout, model_path, Layout(1), samples, folder=out)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_matches_one_process(
    layout: Layout,
    model_path: Path,
    samples: list[Sample],
    reference: dict[str, Any],
    tmp_path: Path,
) -> None:
    ours = run_ranks(layout.world, train_layout, model_path, layout, samples, folder=tmp_path)[0]
    result = agreement(ours, reference, load_file(model_path / "model.safetensors"))
    assert result.loaded_bitwise
    assert result.replay_coverage == 1.0
    assert result.worst < TOLERANCE
    assert ours["routing"] == pytest.approx(reference["routing"], rel=1e-12)


@pytest.fixture(scope="module")
def muon_reference(
    model_path: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    layout, out = Layout(1, optimizer="muon"), tmp_path_factory.mktemp("muon")
    return run_ranks(1, train_layout, model_path, layout, samples, folder=out)[0]


@pytest.mark.parametrize("layout", MUON, ids=lambda layout: layout.name)
def test_muon_matches_one_process(
    layout: Layout,
    model_path: Path,
    samples: list[Sample],
    muon_reference: dict[str, Any],
    tmp_path: Path,
) -> None:
    ours = run_ranks(layout.world, train_layout, model_path, layout, samples, folder=tmp_path)[0]
    result = agreement(ours, muon_reference, load_file(model_path / "model.safetensors"))
    assert result.worst < TOLERANCE
    assert result.weights < 1e-6


Reference = Callable[[Layout], tuple[dict[str, Any], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def adapted_reference(
    model_path: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """What one process gives with the adapter of a layout, and the adapter that both begin with."""

    @cache
    def one(experts: Experts, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        adapter = write_lora(model_path, experts)
        layout = Layout(1, dtype=dtype, lora=experts)
        out = tmp_path_factory.mktemp("adapted")
        return run_ranks(1, train_layout, model_path, layout, samples, folder=out)[0], adapter

    return lambda layout: one(cast(Experts, layout.lora), layout.dtype)


def adapted_agreement(
    layout: Layout, model_path: Path, samples: list[Sample], reference: Reference, out: Path
) -> Agreement:
    one, adapter = reference(layout)
    ours = run_ranks(layout.world, train_layout, model_path, layout, samples, folder=out)[0]
    return agreement(ours, one, adapter, load_file(model_path / "model.safetensors"))


@pytest.mark.parametrize("layout", LORA, ids=lambda layout: layout.name)
def test_a_layout_trains_the_adapter_of_one_process_and_leaves_the_base(
    layout: Layout,
    model_path: Path,
    samples: list[Sample],
    adapted_reference: Reference,
    tmp_path: Path,
) -> None:
    result = adapted_agreement(layout, model_path, samples, adapted_reference, tmp_path)
    assert result.loaded_bitwise
    assert result.base_bitwise
    assert result.replay_coverage == 1.0
    assert result.worst < TOLERANCE


@pytest.mark.release
@pytest.mark.parametrize("layout", LORA_BFLOAT16, ids=lambda layout: layout.name)
def test_an_adapter_in_bfloat16(
    layout: Layout,
    model_path: Path,
    samples: list[Sample],
    adapted_reference: Reference,
    tmp_path: Path,
) -> None:
    result = adapted_agreement(layout, model_path, samples, adapted_reference, tmp_path)
    assert result.loaded_bitwise
    assert result.base_bitwise
    assert result.worst < BFLOAT16_TOLERANCE


def resumes(model_path: Path, samples: list[Sample], checkpoints: Path) -> dict[str, Any]:
    """Three steps at once, and two with a save and a load before the third."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    batch, _ = ready_batch(policy, mesh, samples)
    steps = [policy.train_step(batch, loss, Replay.rollout) for _ in range(2)]
    result: dict[str, Any] = {"ratio": [float(s.stats["ratio/max"].value) for s in steps]}
    result["saved"] = exported(policy)
    store = Checkpoints(checkpoints, mesh, keep=1)
    store.save(2, policy, {"step": 2})
    policy.train_step(batch, loss, Replay.rollout)
    result["uninterrupted"] = exported(policy)
    resumed = build(model_path, mesh)
    loaded = store.load(2, resumed)
    resumed.train_step(batch, loss, Replay.rollout)
    return {**result, "resumed": exported(resumed), "step": loaded.trainer["step"]}


def test_one_process_trains_and_resumes(
    reference: dict[str, Any], model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    first, second = reference["steps"]
    assert first["ratio/mean"] == 1.0  # old log-probs are those of the same weights
    assert first["ratio/max"] == 1.0
    assert second["ratio/mean"] != 1.0
    assert second["loss/policy"] < first["loss/policy"]
    assert reference["routing"]["routing/disagreement"] > 0.2  # random routes
    assert distance(reference["weights"], reference["loaded"]) > 1e-4
    out = run_ranks(1, resumes, model_path, samples, tmp_path / "c", folder=tmp_path / "out")[0]
    assert out["step"] == 2
    assert out["ratio"][0] == 1.0
    assert distance(out["uninterrupted"], out["saved"]) > 1e-6
    assert all(torch.equal(out["resumed"][k], v) for k, v in out["uninterrupted"].items())


def resets(model_path: Path, samples: list[Sample], distributed: bool) -> dict[str, Any]:
    """A step with a fresh optimizer of another configuration, as after SFT."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, distributed_optimizer=distributed)
    policy.make_optimizer(OptimizerConfig(lr=1e-3, adam_eps=1e-6))
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    return exported(policy)


def test_a_fresh_optimizer_is_of_the_same_kind(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (one,) = run_ranks(1, resets, model_path, samples, False, folder=tmp_path / "1")
    for rank in run_ranks(2, resets, model_path, samples, True, folder=tmp_path / "2"):
        assert distance(rank, one) < TOLERANCE


def passes_over_two_mini_batches(
    model_path: Path, samples: list[Sample], sizes: dict[str, Any]
) -> list[int]:
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh)
    parts = [(part, [0.0] * len(part)) for part in (samples[:3], samples[3:])]
    batches = make_train_batches(parts, gspo, mesh, 64)
    micro = [batch for each in batches for batch in each.micro_batches]
    policy.forward_only(micro, Replay.rollout)
    return [batch.num_tokens for batch in micro]


@pytest.mark.parametrize(
    "sizes",
    [
        release({"expert": 2, "dispatcher": "allgather"}),
        {"pipeline": 2},  # messages of one length: none to tell it, and no wait for the device
    ],
    ids=["allgather", "pipeline"],
)
def test_mini_batches_of_one_pass_have_one_length(
    model_path: Path, samples: list[Sample], tmp_path: Path, sizes: dict[str, Any]
) -> None:
    found = run_ranks(2, passes_over_two_mini_batches, model_path, samples, sizes, folder=tmp_path)
    assert len({n for rank in found for n in rank}) == 1
