"""Each architecture, trained at one layout: exports of it and of one process, read by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe.routes import Replay
from mrl.cli import main
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from tests.parallel import models
from tests.parallel.layouts import build, exported, join_mesh, loss, ready_batch, replay_of
from tests.parallel.models import SETTINGS, checkpoint_tensors, tiny_samples, write_tiny
from tests.parallel.test_policy import TEMPERATURE, packed
from tests.ranks import run_ranks
from tests.release import release

SPARSE = (8, {"tensor": 2, "pipeline": 2, "expert": 2})
DENSE = (4, {"tensor": 2, "pipeline": 2})


def trains(folder: Path, sizes: dict[str, int], samples: list[Sample], root: Path) -> Any:
    mesh = join_mesh(folder, sizes)
    policy = build(folder, mesh)
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, replay_of(samples))
    Checkpoints(root, mesh, keep=1).save(1, policy, {})
    return exported(policy)


def takes_over(folder: Path, samples: list[Sample], written: Path, root: Path) -> Any:
    """One process loads the checkpoint of the other layout, and saves its own."""
    mesh = join_mesh(folder, {})
    policy = build(folder, mesh)
    Checkpoints(written, mesh, keep=1).load_newest(policy)
    Checkpoints(root, mesh, keep=1).save(1, policy, {})
    return {
        "weights": exported(policy),
        "logprobs": policy.forward_only([packed(samples)], Replay.off).logprobs[0],
    }


SHORT = (2, {"tensor": 2, "expert": 2})
"""`make test` exports a model of qwen3_moe from four ranks in test_hf_export.py, and writes back every
architecture in test_architectures.py."""


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("deepseek_v3", SHORT),
        *(release(name, DENSE if name in models.DENSE else SPARSE) for name in SETTINGS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} ranks",
)
def test_export_from_a_layout_equals_that_from_one_process(
    model_type: str, layout: tuple[int, dict[str, int]], tmp_path: Path
) -> None:
    base = write_tiny(model_type, tmp_path / "base")
    samples, (world, sizes) = tiny_samples(base), layout
    many, one = tmp_path / "many", tmp_path / "one"
    arguments = (base, sizes, samples, many)
    live = run_ranks(world, trains, *arguments, folder=tmp_path / "out")[0]
    out = run_ranks(1, takes_over, base, samples, many, one, folder=tmp_path / "out")[0]
    folders = {}
    for root in (many, one):
        folders[root] = tmp_path / f"hf-{root.name}"
        main(["export", str(root / "iter_0000001"), str(folders[root])])
    files = [load_file(next(f.glob("*.safetensors"))) for f in (base, *folders.values())]
    assert files[0].keys() == files[1].keys() == files[2].keys()
    assert [t.shape for t in files[0].values()] == [files[1][name].shape for name in files[0]]
    before, ours, theirs = (checkpoint_tensors(f) for f in (base, *folders.values()))
    assert ours.keys() == theirs.keys() == live.keys() == out["weights"].keys() == before.keys()
    for name, tensor in ours.items():
        for other in (theirs[name], live[name], out["weights"][name]):
            assert torch.equal(tensor, other), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.items())

    model = AutoModelForCausalLM.from_pretrained(folders[many], dtype=torch.float32)
    start = 0
    for sample in samples:
        ids = sample.token_ids
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0] / TEMPERATURE
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        wanted = sample.loss_mask[1:]
        mine = out["logprobs"][start + 1 : start + len(ids)]
        assert (mine - logprobs)[wanted].abs().max() < 1e-5
        start += len(ids)
