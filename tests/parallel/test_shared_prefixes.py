"""Samples that share the rows of their prefixes train as samples that do not.

`make layouts` and the tests marked `release` do so in more layouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.align import routes_of_traces
from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.config import ModelConfig, MoeConfig, OptimizerConfig
from mrl.diagnosis.decompose import decompose
from mrl.diagnosis.gather import gather_tokens
from mrl.learn.batching import make_train_batch, make_train_batches
from mrl.types import MicroBatch, Sample, TokenRoutes
from parallel.critic import Critic
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.layers.balancing import expert_biases
from parallel.ledger import Ledger
from parallel.mesh import Mesh
from parallel.packing import num_rows
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics
from tests.parallel.adapters import write_lora
from tests.parallel.conftest import MOE_LAYERS
from tests.parallel.layers.test_balancing import nothing
from tests.parallel.layouts import (
    Layout,
    agreement,
    build,
    distance,
    drained,
    exported,
    join_mesh,
    loss,
    train_layout,
)
from tests.parallel.models import tiny_samples, write_tiny
from tests.parallel.shared_samples import make_mixed_groups, with_prefix
from tests.parallel.test_critic import loss as value_loss
from tests.ranks import run_ranks
from tests.release import release

TOLERANCE = 1e-6
"""Relative, for float32."""
TP2, PP2 = {"tensor": 2}, {"pipeline": 2}
LAYOUTS = [
    Layout(1),
    release(Layout(2, PP2)),
    release(Layout(1, recompute=False)),
    release(Layout(2)),
    release(Layout(2, TP2)),
    release(Layout(2, {"expert": 2})),
    release(Layout(2, {"context": 2})),
    release(Layout(2, PP2 | {"virtual_pipeline": 2})),
    release(Layout(2, {"expert": 2, "dispatcher": "allgather"})),
    release(Layout(2, distributed_optimizer=True)),
    release(Layout(4, TP2 | {"context": 2})),
    release(Layout(8, TP2 | PP2 | {"expert": 2})),
    release(Layout(1, lora="per_expert")),
    release(Layout(2, TP2 | {"expert_tensor": 2}, lora="shared_outer")),
    release(Layout(1, true_on_policy=True)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_three_steps_are_the_same(layout: Layout, model_path: Path, tmp_path: Path) -> None:
    """Loss, gradient norm and weights or adapter, with captured routes replayed."""
    if layout.lora is not None:
        write_lora(model_path, layout.lora)
    samples = make_mixed_groups()
    shared = dataclasses.replace(layout, share_prefixes=True)
    plain, ours = (
        run_ranks(each.world, train_layout, model_path, each, samples, folder=tmp_path)[0]
        for each in (layout, shared)
    )
    assert plain["shared"] == 0
    assert ours["shared"] > (80 if layout.sizes.get("context") else 150)
    found = agreement(ours, plain, plain["loaded"])
    assert max(found.grad_norm, found.weights, found.merged) < TOLERANCE
    assert found.loss < 5 * TOLERANCE  # its terms of both signs add up to almost 0 in some steps
    assert found.replay_coverage == 1.0
    assert ours["routing"] == pytest.approx(plain["routing"], rel=1e-6, nan_ok=True)


def shared_on_stages(model_path: Path, sizes: dict[str, Any]) -> list[Any]:
    """The shared rows of each micro-batch, where a rank has the routes of its own layers alone."""
    mesh = join_mesh(model_path, sizes)
    layers = (MOE_LAYERS[:1], MOE_LAYERS[1:])[mesh.pp_rank] if mesh.dims.pp > 1 else MOE_LAYERS

    def own(samples: Sequence[Sample], shares: Any) -> dict[int, TokenRoutes]:
        traces = [sample.routing for sample in samples if sample.routing is not None]
        return dict(enumerate(routes_of_traces(traces, layers)))

    samples = make_mixed_groups()
    parts = [(samples, [1.0] * len(samples))]
    (batch,) = make_train_batches(parts, gspo, mesh, 64, own, share_prefixes=True)
    found = [micro.shared for micro in batch.micro_batches if micro.shared]
    lengths = {num_rows(micro) for micro in batch.micro_batches}
    assert len(lengths) == 1 or mesh.dims.pp == 1
    return [[list(each.leaders), list(each.num_rows)] for each in found]


def test_pipeline_stages_agree_on_the_rows(model_path: Path, tmp_path: Path) -> None:
    """A route that differs in a layer of the last stage splits the samples on the first one, too."""
    first, last = run_ranks(2, shared_on_stages, model_path, PP2, folder=tmp_path)
    assert first == last
    counts = {count for _, counts in first for count in counts}
    assert 11 in counts  # the row of the other route; the first stage alone would share 20
    (alone,) = run_ranks(1, shared_on_stages, model_path, {}, folder=tmp_path)
    assert 11 in {count for _, counts in alone for count in counts}


def micro_batches(
    samples: list[Sample], mesh: Mesh, share: bool, size: int = 100
) -> list[MicroBatch]:
    signs = [(-1.0) ** i for i in range(len(samples))]
    batch = make_train_batch(samples, signs, gspo, mesh, size, share_prefixes=share)
    assert share == any(b.shared for b in batch.micro_batches)
    assert all(num_rows(b) <= size for b in batch.micro_batches)
    return batch.micro_batches


def recorded(model_path: Path) -> list[dict[str, Any]]:
    """Without and with sharing: the record of the tokens, metrics and decomposition of a step."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    samples = make_mixed_groups()
    results = []
    for share in (False, True):
        batches = micro_batches(samples, mesh, share, 4096)
        old = policy.forward_only(batches, Replay.rollout, observe="rows")
        batches = with_old_logprobs(batches, old)
        record = gather_tokens(policy, samples, batches, old, MOE_LAYERS, 4096)
        assert record is not None
        (routes,) = policy.runner.captured(batches)
        found = decompose(policy, batches[0], routes, MOE_LAYERS, max_layers=2)
        metrics = reduce_statistics(dict(old.routing))
        results.append({**record[1], "metrics": metrics, "parts": json.dumps(found.as_json())})
    return results


def test_records_metrics_and_decomposition_are_the_same(model_path: Path, tmp_path: Path) -> None:
    ((plain, ours),) = run_ranks(1, recorded, model_path, folder=tmp_path)
    assert ours.keys() == plain.keys()
    for name, values in plain.items():
        if isinstance(values, Tensor) and values.is_floating_point():
            assert torch.allclose(ours[name], values, rtol=1e-5, atol=1e-6), name
        elif isinstance(values, Tensor):
            assert torch.equal(ours[name], values), name
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-6, nan_ok=True)
    parts, expected = json.loads(ours["parts"]), json.loads(plain["parts"])
    assert parts["levels"]["none"] == pytest.approx(expected["levels"]["none"], rel=1e-5)
    for layer, other in zip(parts["layers"], expected["layers"], strict=True):
        known = {key: value for key, value in other.items() if value is not None}
        assert {key: layer[key] for key in known} == pytest.approx(known, rel=1e-5)


KINDS = ("seq_aux_loss", "global_aux_loss")


def balanced(model_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Without and with sharing: gradients and metrics of router losses alone, and expert biases."""
    mesh = join_mesh(model_path, {})
    samples = tiny_groups(model_path)
    model, config = HfModel.read(model_path), ModelConfig(path=str(model_path))
    rate = 0.01 if model.config["model_type"] == "deepseek_v3" else 0.0
    results: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        moe = MoeConfig(
            load_balancing_type=kind, aux_loss_coeff=0.3, z_loss_coeff=0.1,
            expert_bias_update_rate=rate,
        )  # fmt: skip
        for share in (False, True):
            policy = Policy(
                model, mesh, config, OptimizerConfig(lr=1e-3, clip_grad=0), recompute=True,
                temperature=1.0, moe=moe,
            )  # fmt: skip
            batch = make_train_batch(
                samples, [1.0] * len(samples), gspo, mesh, 4096, share_prefixes=share
            )
            stats = policy.train_step(batch, nothing, Replay.rollout).stats
            metrics = {k: v for k, v in reduce_statistics(stats).items() if k.startswith("moe/")}
            biases = [bias.clone() for bias in expert_biases(policy.chunks)]
            results.setdefault(kind, []).append(
                {"gradients": buffers_of(policy), "metrics": metrics, "biases": biases}
            )
    return results


def buffers_of(policy: Policy) -> dict[str, Tensor]:
    """Return the gradients of the last step."""
    named = [pair for chunk in policy.chunks for pair in chunk.named_parameters()]
    return {name: getattr(parameter, "main_grad").clone() for name, parameter in named}  # noqa: B009


def tiny_groups(model_path: Path) -> list[Sample]:
    """Two groups of four samples with prompts of 20 and 12 tokens, for any model."""
    drawn = tiny_samples(model_path, [25, 31, 26, 29, 17, 22, 16, 15])
    samples = []
    for number, sample in enumerate(drawn):
        group, prompt_len = divmod(number, 4)[0], (20, 12)[number // 4]
        mask = torch.arange(len(sample.token_ids)) >= prompt_len
        one = dataclasses.replace(sample, group_id=group, prompt_len=prompt_len, loss_mask=mask)
        samples.append(one if number % 4 == 0 else with_prefix(one, samples[4 * group], prompt_len))
    off = dataclasses.replace(samples[2], loss_mask=torch.zeros_like(samples[2].loss_mask))
    return [*samples[:2], off, *samples[3:]]  # the third one has no reward


@pytest.mark.parametrize("model_type", [release("qwen3_moe"), "deepseek_v3"])
def test_router_losses_and_biases_count_a_row_for_every_sample(
    model_type: str, tmp_path: Path
) -> None:
    """Also under latent attention, and with a sample that has no loss token."""
    path = write_tiny(model_type, tmp_path / "model")
    (found,) = run_ranks(1, balanced, path, folder=tmp_path)
    for kind in KINDS:
        plain, ours = found[kind]
        assert distance_of_gradients(ours["gradients"], plain["gradients"]) < TOLERANCE
        assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
        assert all(map(torch.equal, ours["biases"], plain["biases"]))
    assert bool(found[KINDS[0]][0]["biases"]) == (model_type == "deepseek_v3")


@pytest.mark.release  # tests/parallel/layers has sinks and windows
@pytest.mark.parametrize("sizes", [{}, {"context": 2}])
def test_sinks_and_windows_are_those_of_each_sample(sizes: dict[str, int], tmp_path: Path) -> None:
    """Of gpt-oss, whose windows are shorter than the prompts: three steps, with and without."""
    path = write_tiny("gpt_oss", tmp_path / "model")
    samples = tiny_groups(path)
    plain, ours = (
        run_ranks(
            sizes.get("context", 1), train_layout, path,
            Layout(sizes.get("context", 1), sizes, share_prefixes=share), samples, folder=tmp_path,
        )[0]
        for share in (False, True)
    )  # fmt: skip
    assert plain["shared"] == 0
    assert ours["shared"] > 40
    found = agreement(ours, plain, plain["loaded"])
    assert found.worst < TOLERANCE
    assert found.replay_coverage == 1.0


def distance_of_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    names = [name for name in b if b[name].any()]
    assert not any(a[name].any() for name in b if name not in names)
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in names)


def other_passes(model_path: Path) -> list[dict[str, Any]]:
    """Without and with sharing: a critic's values and steps, and a step of R2 with gate weights."""
    mesh = join_mesh(model_path, {})
    samples = make_mixed_groups()
    results = []
    for share in (False, True):
        signs = [(-1.0) ** i for i in range(len(samples))]
        batch = make_train_batch(samples, signs, gspo, mesh, 100, share_prefixes=share)
        critic = Critic(
            HfModel.read(model_path), mesh, ModelConfig(path=str(model_path)),
            # As in `build`: with Adam's usual epsilon rounding noise around 0 becomes a full step.
            OptimizerConfig(lr=1e-3, clip_grad=0.05, adam_eps=1e-6), recompute=True,
            ledger=Ledger(mesh.device), head_std=0.1, seed=3,
        )  # fmt: skip
        values, after = critic.values(batch.micro_batches)
        steps = [critic.train_step(batch, value_loss, Replay.off) for _ in range(2)]
        policy = build(model_path, mesh, recompute=True, replay="ids_weights")
        before = policy.forward_only(batch.micro_batches, Replay.off)
        filled = with_old_logprobs(batch.micro_batches, before)
        ready = dataclasses.replace(batch, micro_batches=filled)
        record = Replay.recorded(before.native_routes)
        outputs = [policy.train_step(ready, loss, record) for _ in range(2)]
        results.append({
            "values": by_sample(batch.micro_batches, values),
            "after": by_sample(batch.micro_batches, after),
            "norms": [step.grad_norm for step in [*steps, *outputs]],
            "critic": drained(export_buckets(critic.weights, 0, 4096)),
            "policy": exported(policy),
        })  # fmt: skip
    return results


def by_sample(batches: list[MicroBatch], values: list[Tensor]) -> Tensor:
    """Join the values of all samples, in their order."""
    found: dict[int, Tensor] = {}
    for batch, own in zip(batches, values, strict=True):
        assert batch.sample_ids is not None
        parts = own.split(batch.cu_seqlens.diff().tolist())
        found |= dict(zip(batch.sample_ids.tolist(), parts, strict=True))
    return torch.cat([found[i] for i in sorted(found) if i >= 0])


def test_critic_and_recorded_routes(model_path: Path, tmp_path: Path) -> None:
    ((plain, ours),) = run_ranks(1, other_passes, model_path, folder=tmp_path)
    for name in ("values", "after"):
        assert plain[name].any()
        assert torch.allclose(ours[name], plain[name], rtol=1e-5, atol=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=TOLERANCE)
    for name in ("critic", "policy"):
        assert distance(ours[name], plain[name]) < TOLERANCE


def logprobs(model_path: Path, true_on_policy: bool) -> list[Tensor]:
    """The log-probs of the samples, alone and with two ways of sharing."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, true_on_policy=true_on_policy)
    samples = make_mixed_groups()
    found = []
    for share, size in ((False, 100), (True, 100), (True, 4096)):
        batches = micro_batches(samples, mesh, share, size)
        output = policy.forward_only(batches, Replay.rollout)
        found.append(by_sample(batches, output.logprobs))
    return found


@pytest.mark.parametrize("true_on_policy", [True, release(False)])
def test_log_probs_do_not_depend_on_who_shares(
    true_on_policy: bool, model_path: Path, tmp_path: Path
) -> None:
    """To the bit with mrl's batch-invariant kernels; torch's own round by the shapes of a batch."""
    ((plain, *ours),) = run_ranks(1, logprobs, model_path, true_on_policy, folder=tmp_path)
    for each in ours:
        assert torch.allclose(each, plain, rtol=0, atol=1e-5)
        assert not true_on_policy or torch.equal(each, plain)
