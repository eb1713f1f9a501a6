"""Training of multi-token-prediction layers: what they compute, and that only they learn from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import parallel.mtp
from mrl.cli import main
from mrl.errors import InputError
from mrl.kernels import linear_logprob
from mrl.planner.memory import gradient_bytes, optimizer_bytes, weight_bytes
from mrl.planner.shape import read_shape
from mrl.planner.stages import stages
from mrl.planner.workload import Workload
from mrl.types import MicroBatch
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.export import export_buckets
from parallel.ledger import gradient_tensors
from parallel.model import unwrap
from parallel.mtp import mtp_targets, next_tokens
from parallel.optimizer.state import optimizer_shards
from parallel.packing import WeightedSample, pack
from parallel.policy import Policy
from parallel.reduce import reduce_statistics
from tests.parallel.layouts import (
    TOLERANCE,
    build,
    distance,
    drained,
    exported,
    join_mesh,
    loss,
    ready_batch,
    replay_of,
    saved_and_resumed,
    train,
)
from tests.parallel.models import tiny_samples
from tests.parallel.mtp_models import FAMILIES, FILE, reference_logprobs, write_mtp
from tests.ranks import run_ranks
from tests.release import only_in_release, release

FACTOR = 0.3


def all_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights under HF names, with those of MTP layers."""
    return drained(export_buckets(policy.weights, 0, 4096))


def is_mtp(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.4."))


def test_targets_stay_within_their_sequence() -> None:
    batch = MicroBatch(
        input_ids=torch.arange(10, 19),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1]),
        cu_seqlens=torch.tensor([0, 4, 7, 9], dtype=torch.int32),
        loss_mask=torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 1]).bool(),
        rollout_logprobs=torch.zeros(9),
        rewards=torch.zeros(3),
        seq_weight=torch.zeros(3),
    )
    assert mtp_targets(batch, 0).nonzero().flatten().tolist() == [0, 1, 4]  # tokens 2, 3 and 6
    assert mtp_targets(batch, 1).nonzero().flatten().tolist() == [0]  # token 3
    assert next_tokens(batch, 1).tolist() == [11, 12, 13, 0, 15, 16, 0, 18, 0]
    assert next_tokens(batch, 2).tolist() == [12, 13, 0, 0, 16, 0, 0, 0, 0]
    short = dataclasses.replace(
        batch, **{n: getattr(batch, n)[:1] for n in ("input_ids", "position_ids", "loss_mask")}
    )
    assert not mtp_targets(short, 0).any()


def logprobs_of_targets(path: Path, samples: list) -> dict[str, Any]:
    """What the MTP layer gives for its targets in one packed micro-batch, and the step's metric."""
    mesh = join_mesh(path, {})
    policy = build(path, mesh, mtp=FACTOR, logprob_chunk_tokens=24)
    caught = []

    def spy(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor, how: Any) -> Any:
        found = linear_logprob(hidden, weight, labels, rows, how)
        caught.append((found[0].detach(), rows))
        return found

    parallel.mtp.linear_logprob = spy
    batch = pack([WeightedSample(sample, 1.0, 0.01) for sample in samples], 1)
    before = policy.forward_only([batch], replay_of(samples))  # no MTP layer runs in it
    assert not caught
    (ready,) = [dataclasses.replace(batch, old_logprobs=before.logprobs[0])]
    train_batch, _ = ready_batch(policy, mesh, samples)
    out = policy.train_step(
        dataclasses.replace(train_batch, micro_batches=[ready]), loss, replay_of(samples)
    )
    ((logprobs, rows),) = caught
    return {"logprobs": logprobs, "rows": rows, "mtp": reduce_statistics(out.stats)["loss/mtp"]}


@pytest.mark.parametrize(
    "model_type", only_in_release(FAMILIES, lambda name: name == "deepseek_v3")
)
def test_logprobs_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    path = write_mtp(model_type, tmp_path / "model")
    samples = [dataclasses.replace(s, routing=None) for s in tiny_samples(path, (9, 17))]
    (found,) = run_ranks(1, logprobs_of_targets, path, samples, folder=tmp_path / "out")
    expected = [reference_logprobs(path, s.token_ids, tmp_path) for s in samples]
    wanted = torch.cat([each[1:] for each in expected])  # from the first loss token on, token 3
    assert found["rows"].tolist() == [*range(1, 7), *range(10, 24)]
    assert torch.allclose(found["logprobs"], wanted, rtol=0, atol=1e-5)
    assert found["mtp"] == pytest.approx(-float(wanted.mean()), abs=1e-5)


def gradients(policy: Policy) -> dict[str, Tensor]:
    (chunk,) = policy.chunks
    return {n: p.main_grad.clone() for n, p in unwrap(chunk).named_parameters()}


def trains_both(path: Path, samples: list, dtype: str) -> dict[str, Any]:
    """Three steps with and without MTP layers, with clipping; the last gradients of both."""
    mesh, found = join_mesh(path, {}), {}
    for key, factor in (("off", 0.0), ("on", FACTOR)):
        policy = build(path, mesh, recompute=True, dtype=dtype, mtp=factor)
        steps = train(policy, mesh, samples, 3)
        found[key] = {"steps": steps, "sent": exported(policy), "gradients": gradients(policy)}
    found["mtp"] = {n: t for n, t in all_weights(policy).items() if is_mtp(n)}
    return found


@pytest.mark.parametrize("dtype", ["float32", release("bfloat16")])
def test_only_mtp_layers_learn_from_their_loss(dtype: str, tmp_path: Path) -> None:
    path = write_mtp("glm4_moe", tmp_path / "model")
    (found,) = run_ranks(1, trains_both, path, tiny_samples(path), dtype, folder=tmp_path / "out")
    off, on = found["off"], found["on"]
    losses = [step.pop("loss/mtp") for step in on["steps"]]
    assert losses[0] > losses[1] > losses[2]
    assert on["steps"] == off["steps"]  # every metric, and the norm by which both were clipped
    assert all(step["grad_norm"] > 0.05 for step in on["steps"])
    assert on["sent"].keys() == off["sent"].keys()  # an engine gets no MTP layer
    assert all(torch.equal(tensor, off["sent"][name]) for name, tensor in on["sent"].items())
    assert all(torch.equal(on["gradients"][n], tensor) for n, tensor in off["gradients"].items())
    more = on["gradients"].keys() - off["gradients"].keys()
    assert {n.partition(".")[0] for n in more} == {"mtp"}
    assert all(bool(on["gradients"][name].any()) for name in more if "experts" not in name)
    before = {
        n: t.to(found["mtp"][n].dtype)
        for n, t in load_file(path / FILE).items()
        if n in found["mtp"]
    }
    learned = {n for n, tensor in found["mtp"].items() if not torch.equal(tensor, before[n])}
    bias = "model.layers.4.mlp.gate.e_score_correction_bias"
    same = found["mtp"].keys() - learned  # experts without a token only decay
    assert {n for n in same if dtype == "float32" or ".experts." not in n} <= {bias}


def trains(path: Path, sizes: dict, samples: list, distributed: bool) -> dict[str, Any]:
    mesh = join_mesh(path, sizes)
    policy = build(
        path, mesh, recompute=bool(sizes), mtp=FACTOR, distributed_optimizer=distributed,
        logprob_chunk_tokens=24,
    )  # fmt: skip
    loaded = all_weights(policy)
    steps = train(policy, mesh, samples, 3)
    return {"loaded": loaded, "steps": steps, "weights": all_weights(policy)}


@pytest.mark.parametrize(
    ("model_type", "world", "sizes", "distributed"),
    [
        ("glm4_moe", 2, {"pipeline": 2}, False),
        release("glm4_moe", 2, {"tensor": 2}, False),
        release("glm4_moe", 2, {"expert": 2}, False),
        release("glm4_moe", 4, {"tensor": 2, "context": 2}, False),
        release("glm4_moe", 2, {}, True),
        release("glm4_moe", 2, {"pipeline": 2, "virtual_pipeline": 2}, True),
        release("qwen3_next", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, True),
        release("deepseek_v3", 4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}, True),
    ],
)
def test_layouts_train_as_one_process(
    model_type: str, world: int, sizes: dict, distributed: bool, tmp_path: Path
) -> None:
    path = write_mtp(model_type, tmp_path / "model")
    samples = tiny_samples(path)
    (one,) = run_ranks(1, trains, path, {}, samples, False, folder=tmp_path / "one")
    ours, *_ = run_ranks(world, trains, path, sizes, samples, distributed, folder=tmp_path / "out")
    folder = load_file(path / FILE)
    kept = {
        n: t for n, t in folder.items() if not n.endswith(("embed_tokens.weight", "head.weight"))
    }
    assert {n for n in ours["loaded"] if is_mtp(n)} == kept.keys()
    assert all(torch.equal(ours["loaded"][name], tensor) for name, tensor in kept.items())
    for key in ("loss/policy", "loss/mtp", "grad_norm"):
        for a, b in zip(ours["steps"], one["steps"], strict=True):
            assert a[key] == pytest.approx(b[key], rel=TOLERANCE), key
    assert distance(ours["weights"], one["weights"]) < TOLERANCE


def has_experts(path: Path) -> bool:
    policy = build(path, join_mesh(path, {}), mtp=FACTOR)
    names = [entry.rule.megatron for entry in policy.weights.entries]
    return any(name.startswith("mtp.") and ".experts." in name for name in names)


@pytest.mark.release
def test_the_layer_has_experts_after_a_dense_last_layer(tmp_path: Path) -> None:
    path = write_mtp("qwen3_next", tmp_path / "model", mlp_only_layers=[3], intermediate_size=64)
    assert run_ranks(1, has_experts, path, folder=tmp_path / "out") == [True]


def saves(path: Path, root: Path, samples: list) -> dict[str, Any]:
    """Saves before and after a step; then trains on, and again after a load."""
    mesh = join_mesh(path, {})
    policy = build(path, mesh, mtp=FACTOR)
    store = Checkpoints(root, mesh, keep=2)
    store.save(1, policy, {})
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, replay_of(samples))
    resumed = saved_and_resumed(policy, lambda: build(path, mesh, mtp=FACTOR), store)
    shape = read_shape(policy.weights.model.config, policy.weights.model.architecture)
    (stage,) = stages(shape, mesh.dims)
    work = Workload(8, 8, 8, 8, weight_bytes=4)
    parameters = [*unwrap(policy.chunks[0]).parameters()]
    biases = [b for n, b in unwrap(policy.chunks[0]).named_buffers() if "expert" in n]
    planned = [
        (stage.num_local, sum(p.numel() for p in parameters)),
        (
            weight_bytes(shape, stage, mesh.dims, work),
            sum(t.nbytes for t in (*parameters, *biases)),
        ),
        (gradient_bytes(stage, work), sum(t.nbytes for t in gradient_tensors(policy.chunks))),
        (
            optimizer_bytes(stage, mesh.dims, work),
            sum(
                tensor.nbytes
                for shard in optimizer_shards(policy.optimizer).values()
                for tensor in shard.tensors.values()
            ),
        ),
    ]
    ends = []
    for each in (policy, resumed):
        out = each.train_step(batch, loss, replay_of(samples))
        ends.append({**all_weights(each), "mtp": reduce_statistics(out.stats)["loss/mtp"]})
    with pytest.raises(InputError) as refusal:
        store.load_newest(build(path, mesh))
    return {"planned": planned, "ends": ends, "without": str(refusal.value)}


def test_checkpoints_have_the_layers_and_exports_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, root = write_mtp("glm4_moe", tmp_path / "model"), tmp_path / "checkpoints"
    (found,) = run_ranks(1, saves, base, root, tiny_samples(base), folder=tmp_path / "out")
    for planned, counted in found["planned"]:
        assert planned == counted
    assert "is of a run with another train.mtp_loss_scaling_factor" in found["without"]
    policy, resumed = found["ends"]
    assert policy.pop("mtp") == resumed.pop("mtp")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in policy.items())

    main(["export", str(root / "iter_0000001"), str(tmp_path / "begun")])
    assert "untrained" not in capsys.readouterr().out
    given = load_file(base / "model.safetensors") | load_file(base / FILE)
    begun = load_file(next((tmp_path / "begun").glob("*.safetensors")))
    assert begun.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in begun.items())
    config = json.loads((tmp_path / "begun" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1

    main(["export", str(root / "iter_0000002"), str(tmp_path / "trained")])
    trained = load_file(next((tmp_path / "trained").glob("*.safetensors")))
    assert trained.keys() == given.keys()
    for copy, original in (
        ("model.layers.4.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.4.shared_head.head.weight", "lm_head.weight"),
    ):
        assert not torch.equal(trained[copy], given[copy])
        assert torch.equal(trained[copy], trained[original])
    project = "model.layers.4.eh_proj.weight"
    assert not torch.equal(trained[project], given[project])
