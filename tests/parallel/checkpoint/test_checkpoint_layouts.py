"""Checkpoints of five layouts, each loaded at four others: the same bits, and the same next step.

Every loaded policy is saved again at its own layout: both checkpoints must hold the same tensors,
weights and moments, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.manifest import folder_name
from parallel.checkpoint.random_state import STRIDE
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reduce import reduce_statistics
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import (
    distance,
    exported,
    join_mesh,
    loss,
    ready_batch,
)
from tests.ranks import run_ranks
from tests.release import only_in_release, release

Layout = tuple[int, dict[str, int], bool]
"""(ranks, parallel sizes, distributed optimizer)."""
SAVED: dict[str, Layout] = {
    "one": (1, {}, False),
    "TP2xPP2xEP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}, False),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, False),
    "PP2xVPP2xDP2": (4, {"pipeline": 2, "virtual_pipeline": 2}, False),
    "CP2xEP2 distributed": (4, {"context": 2, "expert": 2}, True),
}
LOADED: dict[str, Layout] = {
    "one distributed": (1, {}, True),
    "TP2xEP2xETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, False),
    "PP2xEP2 distributed": (4, {"pipeline": 2, "expert": 2}, True),
    "DP3 distributed": (3, {}, True),
}
SAVED_IN_SHORT = ("PP2xVPP2",)
LOADED_IN_SHORT = ("one distributed",)
"""`make test-all` takes all pairs of a layout that saved and a layout that loads. The tests of bf16 and
of a tied output layer take the distributed optimizer, expert and pipeline ranks to others, those of a
critic and of Muon tensor ranks."""
STEP = 2


def build(
    model_path: Path, mesh: Mesh, distributed: bool = False, dtype: str = "float32"
) -> Policy:
    return Policy(
        HfModel.read(model_path),
        mesh,
        ModelConfig.model_validate({"path": str(model_path), "dtype": dtype}),
        OptimizerConfig(
            lr=1e-3, weight_decay=0.01, lr_warmup_steps=3, use_distributed_optimizer=distributed
        ),
        recompute=False,
        temperature=0.8,
    )


def next_step(policy: Policy, mesh: Mesh, samples: list[Sample]) -> dict[str, Any]:
    batch, _ = ready_batch(policy, mesh, samples)
    out = policy.train_step(batch, loss, Replay.rollout)
    loss_sum = reduce_statistics(out.stats)["loss/policy"]
    weights = exported(policy)
    return {"grad_norm": out.grad_norm, "lr": out.lr, "loss": loss_sum, "weights": weights}


def save_after_training(
    model_path: Path, layout: Layout, samples: list[Sample], root: Path, dtype: str
) -> dict[str, Any]:
    """Two steps, save, one more; and the same one more after loading, which must be the same bits."""
    mesh = join_mesh(model_path, layout[1])
    policy = build(model_path, mesh, layout[2], dtype)
    batch, _ = ready_batch(policy, mesh, samples)
    for _ in range(STEP):
        policy.train_step(batch, loss, Replay.rollout)
    store = Checkpoints(root, mesh, keep=1)
    store.save(STEP, policy, {"cursor": 7})
    draw = torch.rand(3)
    saved = exported(policy)
    after = next_step(policy, mesh, samples)
    again = build(model_path, mesh, layout[2], dtype)
    loaded = store.load_newest(again)
    same_draw = torch.equal(torch.rand(3), draw)
    back = exported(again)
    resumed = next_step(again, mesh, samples)
    same = {
        "draw": same_draw,
        "trainer": loaded.trainer == {"cursor": 7} and loaded.same_layout,
        "loaded": all(torch.equal(back[name], t) for name, t in saved.items()),
        "resumed": all(torch.equal(resumed["weights"][n], t) for n, t in after["weights"].items()),
        "norm": resumed["grad_norm"] == after["grad_norm"],
    }
    return {"saved": saved, "after": after, "same": same}


def load_all(
    model_path: Path, layout: Layout, samples: list[Sample], roots: list[Path], dtype: str
) -> list[dict[str, Any]]:
    """Load each checkpoint at this layout, save it again beside, and take one step."""
    mesh = join_mesh(model_path, layout[1])
    results = []
    for root in roots:
        policy = build(model_path, mesh, layout[2], dtype)
        loaded = Checkpoints(root, mesh, keep=1).load_newest(policy)
        first = torch.rand(1).item()
        Checkpoints(root / "again", mesh, keep=1).save(STEP, policy, loaded.trainer)
        result = {"saved": exported(policy), "after": next_step(policy, mesh, samples)}
        more = {"trainer": loaded.trainer, "draw": first, "same_layout": loaded.same_layout}
        results.append({**result, **more})
    return results


def save_at(
    name: str, layout: Layout, model_path: Path, folder: Path, dtype: str = "float32"
) -> dict[str, Any]:
    arguments = (model_path, layout, few_samples(), folder / name, dtype)
    return run_ranks(layout[0], save_after_training, *arguments, folder=folder / f"{name}.out")[0]


def load_at(
    layout: Layout, roots: list[Path], model_path: Path, folder: Path, dtype: str = "float32"
) -> list[dict[str, Any]]:
    arguments = (model_path, layout, few_samples(), roots, dtype)
    return run_ranks(layout[0], load_all, *arguments, folder=folder)[0]


def assert_same_tensors(root: Path, dtypes: set[torch.dtype]) -> None:
    """The checkpoint in `root` and the one in `root/again`, written by another layout."""
    one, two = (SavedTensors(r / folder_name(STEP)) for r in (root, root / "again"))
    keys = sorted(key for key in one if not key.startswith("random."))
    assert keys == sorted(key for key in two if not key.startswith("random."))
    kinds = {key.split(".")[0] for key in keys}
    assert {"model", "exp_avg", "exp_avg_sq"} <= kinds
    assert {one[key].dtype for key in keys} == dtypes
    for key in keys:
        assert torch.equal(one[key], two[key]), key
        assert not key.startswith("exp_avg_sq.") or one[key].any(), key


@pytest.fixture(scope="module")
def saved(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[str], dict[str, Any]]]:
    """The folder of the checkpoints, and what saved one of them, by its name; each is made once."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, cache(lambda name: save_at(name, SAVED[name], model_path, folder))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", only_in_release(SAVED, lambda n: n != SAVED_IN_SHORT[0]))
def test_the_same_layout_goes_on_bit_for_bit(name: str, saved: tuple) -> None:
    same = saved[1](name)["same"]
    assert same == dict.fromkeys(same, True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "written_by"),
    [
        *((name, SAVED_IN_SHORT) for name in LOADED_IN_SHORT),
        *(release(name, tuple(SAVED)) for name in LOADED),
    ],
)
def test_another_layout_loads_the_same_bits(
    name: str, written_by: tuple[str, ...], saved: tuple, model_path: Path, tmp_path: Path
) -> None:
    folder, references = saved[0], {n: saved[1](n) for n in written_by}
    loaded = load_at(LOADED[name], [folder / n for n in written_by], model_path, tmp_path)
    draws = {result["draw"] for result in loaded if not result["same_layout"]}
    assert len(draws) == 1  # seeded anew from the seed and the step
    for result, (writer, reference) in zip(loaded, references.items(), strict=True):
        assert result["trainer"] == {"cursor": 7}
        for key, tensor in reference["saved"].items():
            assert torch.equal(result["saved"][key], tensor), (writer, key)
        assert_same_tensors(folder / writer, {torch.float32})
        after, expected = result["after"], reference["after"]
        assert after["lr"] == expected["lr"]
        assert after["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert after["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert distance(after["weights"], expected["weights"]) < 1e-6, writer
        assert distance(after["weights"], reference["saved"]) > 1e-4


@pytest.mark.timeout(300)
@pytest.mark.release  # test_bf16.py resumes at one layout
@pytest.mark.parametrize("whole", [False, True])
def test_bf16_with_its_main_parameters(model_path: Path, tmp_path: Path, whole: bool) -> None:
    one = save_at("ep", (2, {"expert": 2}, True), model_path, tmp_path, "bfloat16")
    assert one["same"] == dict.fromkeys(one["same"], True)
    layout: Layout = (2, {"tensor": 2}, False) if whole else (1, {}, False)
    (two,) = load_at(layout, [tmp_path / "ep"], model_path, tmp_path / "out", "bfloat16")
    assert all(torch.equal(two["saved"][key], tensor) for key, tensor in one["saved"].items())
    assert_same_tensors(tmp_path / "ep", {torch.float32, torch.bfloat16})
    if not whole:
        return

    # Taken up in fp32, the weights are the main parameters; back in bf16, the bf16 weights.
    (full,) = load_at((1, {}, False), [tmp_path / "ep"], model_path, tmp_path / "full")
    saved, name = SavedTensors(tmp_path / "ep" / folder_name(STEP)), "model.embed_tokens.weight"
    assert torch.equal(full["saved"][name], saved["main.embedding.word_embeddings.weight"])
    (half,) = load_at(layout, [tmp_path / "ep" / "again"], model_path, tmp_path / "2", "bfloat16")
    assert all(torch.equal(half["saved"][key], tensor) for key, tensor in one["saved"].items())
    assert distance(half["after"]["weights"], two["after"]["weights"]) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "distributed"), [release(4, False), release(4, True), (2, True)])
def test_a_tied_output_layer_on_a_stage_of_its_own(
    world: int, distributed: bool, tied_model_path: Path, tmp_path: Path
) -> None:
    layout: Layout = (world, {"pipeline": 2}, distributed)
    one = save_at("pp", layout, tied_model_path, tmp_path)
    assert one["same"] == dict.fromkeys(one["same"], True)
    (two,) = load_at((1, {}, False), [tmp_path / "pp"], tied_model_path, tmp_path / "out")
    assert_same_tensors(tmp_path / "pp", {torch.float32})
    assert distance(two["after"]["weights"], one["after"]["weights"]) < 1e-6
    if world == 2:
        return
    (back,) = load_at(layout, [tmp_path / "pp" / "again"], tied_model_path, tmp_path / "back")
    assert distance(back["after"]["weights"], one["after"]["weights"]) < 1e-6


def hop(model_path: Path, sizes: dict[str, int], seed: int, root: Path, step: int) -> list[Any]:
    """Load the step before, if there is one, and save this one -> [seed on disk, a draw]."""
    mesh = join_mesh(model_path, sizes)
    policy, store = build(model_path, mesh), Checkpoints(root, mesh, keep=9, seed=seed)
    draw = None
    if step:
        store.load(step - 1, policy)
        draw = torch.rand(1).item()
    store.save(step, policy, {})
    common = torch.load(root / folder_name(step) / "common.pt", weights_only=True)
    return [common["seed"], draw]


@pytest.mark.timeout(300)
def test_the_seed_is_the_first_one_after_every_change_of_layout(
    model_path: Path, tmp_path: Path
) -> None:
    root, seeds, draws = tmp_path / "c", [], []
    layouts = [(1, {}), (2, {"expert": 2}), (1, {}), (1, {})]
    for step, (world, sizes) in enumerate(layouts):
        args = (model_path, sizes, 7 if step == 0 else 99, root, step)
        seed, draw = run_ranks(world, hop, *args, folder=tmp_path / str(step))[0]
        seeds.append(seed)
        draws.append(draw)
    assert seeds == [7, 7, 7, 7]
    for step in (1, 2):
        expected = torch.rand(1, generator=torch.Generator().manual_seed(7 + STRIDE * (step - 1)))
        assert draws[step] == expected.item()
