"""Sparse attention in whole models: beside DeepSeek-V3, and its choices of keys recorded and
replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.keys import NO_KEYS
from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.learn.batching import make_train_batch
from mrl.types import MicroBatch, Sample, TrainBatch
from parallel.dims import round_up
from parallel.model import unwrap
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics
from tests.parallel.layouts import build, distance, exported, join_mesh, loss
from tests.parallel.models import COMMON, SETTINGS, tiny_samples, write_tiny
from tests.parallel.test_policy import packed
from tests.ranks import run_ranks
from tests.release import release

TOPK = SETTINGS["deepseek_v32"][1]["index_topk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("deepseek_v32", tmp_path_factory.mktemp("v32") / "model")


def changed(model: Path, folder: Path, keep: Callable[[str], bool], **config: Any) -> Path:
    """The same model with other settings, and those of its tensors that `keep` names."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if keep(k)}, folder / "model.safetensors")
    settings = json.loads((model / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def logprobs(path: Path, samples: list[Sample], sizes: dict[str, int]) -> Tensor:
    policy = build(path, join_mesh(path, sizes))
    return policy.forward_only([packed(samples)], Replay.off).logprobs[0]


def test_with_a_choice_of_all_keys_it_is_deepseek_v3(model: Path, tmp_path: Path) -> None:
    """And with fewer, a query that has no more keys than that is computed the same."""
    samples = tiny_samples(model)
    longest = max(len(sample.token_ids) for sample in samples)
    whole = changed(model, tmp_path / "whole", lambda name: True, index_topk=longest)
    dense = changed(
        model, tmp_path / "dense", lambda name: ".indexer." not in name,
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], layer_types=None,
    )  # fmt: skip
    found = [
        run_ranks(1, logprobs, path, samples, {}, folder=tmp_path)[0]
        for path in (dense, whole, model)
    ]
    assert torch.equal(found[0], found[1])
    seen = torch.cat([s.loss_mask for s in samples])
    place = torch.cat([torch.arange(len(s.token_ids)) for s in samples])
    differs = (found[2] - found[0]).abs()[seen]
    early = place[seen] <= TOPK  # predicted by the token before
    assert differs[early].max() < 1e-6
    assert differs[~early].max() > 0.1


def disturb(policy: Policy) -> None:
    """Give every indexer other weights, as if other sums or another engine had chosen."""
    generator = torch.Generator().manual_seed(3)
    for chunk in policy.chunks:
        for layer in unwrap(chunk).decoder.layers:
            weight: Any = layer.self_attention.indexer.query_weight
            weight.copy_(torch.randn(weight.shape, generator=generator))


def one_step(
    policy: Policy, batches: list[MicroBatch], num_loss_tokens: int, replay: Replay
) -> dict[str, Any]:
    """One step from the same weights: its loss, its gradient norm and the weights after it."""
    out = policy.train_step(TrainBatch(batches, num_loss_tokens, 5), loss, replay)
    return {
        **{k: v for k, v in reduce_statistics(out.stats).items() if k == "loss/policy"},
        "grad_norm": out.grad_norm,
        "weights": exported(policy),
    }


def replays(path: Path, sizes: dict[str, int], samples: list[Sample], disturbs: bool) -> Any:
    """A pass that records the keys, then a step that replays them, with other indexers in between."""
    mesh = join_mesh(path, sizes)
    policy = build(path, mesh, recompute=True)
    advantages = [(-1.0) ** i * (1 + i / 10) for i in range(len(samples))]
    batch = make_train_batch(samples, advantages, gspo, mesh, micro_batch_tokens=64)
    before = policy.forward_only(batch.micro_batches, Replay.rollout, keep_keys=True)
    micro = with_old_logprobs(batch.micro_batches, before)
    again = None
    if disturbs:
        disturb(policy)
        native = policy.forward_only(micro, Replay.rollout)
        replay = Replay.rollout.with_keys(before.chosen_keys)
        again = policy.forward_only(micro, replay, keep_keys=True)
        same = [
            torch.equal(a[n], b[n])
            for a, b in zip(before.chosen_keys, again.chosen_keys, strict=True)
            for n in a
        ]
        assert same
        assert all(same)
        for ours, theirs in zip(again.logprobs, before.logprobs, strict=True):
            assert torch.equal(ours, theirs)
        gaps = [
            float((a - b).abs().max())
            for a, b in zip(native.logprobs, before.logprobs, strict=True)
        ]
        assert not gaps or max(gaps) > 0.01
    replay = Replay.rollout.with_keys(before.chosen_keys) if disturbs else Replay.rollout
    result = one_step(policy, micro, batch.num_loss_tokens, replay)
    kept = [keys for each in before.chosen_keys for keys in each.values()]
    result["keys"] = sum(int((keys[:, 0] != NO_KEYS).sum()) for keys in kept)
    return result


LAYOUTS: list[Any] = [
    (1, {}),
    (2, {"tensor": 2}),
    release(2, {"context": 2}),
    release(2, {"pipeline": 2, "virtual_pipeline": 2}),
    release(4, {"tensor": 2, "context": 2, "expert": 2}),
]


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_an_update_sees_the_keys_of_the_pass_before_it(
    world: int, sizes: dict[str, int], model: Path, tmp_path: Path
) -> None:
    """With recompute: loss, gradient and new weights are those of the old choice in one process."""
    samples = tiny_samples(model)
    ours = run_ranks(world, replays, model, sizes, samples, True, folder=tmp_path)
    theirs = run_ranks(1, replays, model, {}, samples, False, folder=tmp_path)[0]
    for key in ("loss/policy", "grad_norm"):
        assert ours[0][key] == pytest.approx(theirs[key], rel=1e-5), key
    trained = [name for name in theirs["weights"] if ".indexer." not in name]
    weights = [{name: each["weights"][name] for name in trained} for each in (ours[0], theirs)]
    assert distance(*weights) < 1e-5
    # Together the ranks record every row with more than TOPK keys once in each layer, each its own rows
    # in its own layers. Context parallelism pads sequences, and virtual stages pad micro-batches.
    multiple = 2 * sizes["context"] if "context" in sizes else 1
    rows = (round_up(len(s.token_ids), multiple) - TOPK for s in samples)
    num_rows = sum(max(0, each) for each in rows) * COMMON["num_hidden_layers"]
    found = sum(rank["keys"] for rank in ours)
    assert found > num_rows if "pipeline" in sizes else found == num_rows


def test_the_indexer_is_not_trained(model: Path, tmp_path: Path) -> None:
    found = run_ranks(1, replays, model, {}, tiny_samples(model), False, folder=tmp_path)[0]
    before = load_file(model / "model.safetensors")
    still = {name for name, tensor in found["weights"].items() if torch.equal(tensor, before[name])}
    assert still == {
        name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")
    }
