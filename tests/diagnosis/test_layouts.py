"""Every layout tells the same of a step: its metrics, the record of its tokens, its decomposition."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.routes import GatedRoute, Replay, ids_of
from mrl.algorithms import gspo
from mrl.diagnosis.decompose import decompose
from mrl.diagnosis.gather import gather_tokens
from mrl.diagnosis.mismatch import mismatch_statistics
from mrl.learn.batching import make_train_batch
from mrl.types import Sample, VersionSpan
from parallel.policy import with_old_logprobs
from parallel.reduce import reduce_statistics
from tests.parallel.conftest import MOE_LAYERS, make_samples, write_model
from tests.parallel.layouts import Layout, build, join_mesh
from tests.ranks import run_ranks
from tests.release import release

LAYOUTS = [
    release(Layout(2)),
    release(Layout(2, {"pipeline": 2, "virtual_pipeline": 2})),
    release(Layout(4, {"tensor": 2, "context": 2})),
    release(Layout(2, {"tensor": 2})),
    Layout(4, {"pipeline": 2, "context": 2, "expert": 2, "dispatcher": "allgather"}),
]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("diagnosis") / "model")


def of_versions(samples: list[Sample]) -> list[Sample]:
    """Sample i sampled, and routed, by weights i % 3."""
    made = []
    for i, sample in enumerate(samples):
        assert sample.routing is not None
        size = len(sample.token_ids)
        rows = dataclasses.replace(sample.routing, row_versions=(VersionSpan(i % 3, 0, size - 1),))
        spans = (VersionSpan(i % 3, sample.prompt_len, size),)
        made.append(dataclasses.replace(sample, routing=rows, weight_versions=spans))
    return made


def diagnosed(model_path: Path, layout: Layout) -> dict[str, Any]:
    """Runs on every rank; the record is on rank 0 alone."""
    mesh = join_mesh(model_path, layout.sizes)
    policy = build(model_path, mesh)
    samples = of_versions(make_samples())
    advantages = [float(i) for i in range(len(samples))]
    found: dict[str, Any] = {}
    for name, size in (("small", 64), ("whole", 4096)):  # tokens of a micro-batch
        batches = make_train_batch(samples, advantages, gspo, mesh, size).micro_batches
        old = policy.forward_only(batches, Replay.rollout, observe="rows")
        batches = with_old_logprobs(batches, old)
        for limit in (MAX_TOKENS, 4096):
            record = gather_tokens(policy, samples, batches, old, MOE_LAYERS, limit)
            if record is not None:
                ids = torch.tensor(record[0].ids)
                found[f"{name}/{limit}"] = {"sample_ids": ids, **record[1]}
        stats = mismatch_statistics(batches, old, 2) if mesh.reports_loss else {}
        found[f"{name}/metrics"] = reduce_statistics({**old.routing, **stats})
    (captured,) = policy.runner.captured(batches[:1])
    even = {n: GatedRoute(ids_of(r), torch.full(ids_of(r).shape, 0.5)) for n, r in captured.items()}
    result = decompose(policy, batches[0], even, MOE_LAYERS, max_layers=2)
    found["decomposition"] = json.dumps(result.as_json())
    return found


@pytest.fixture(scope="module")
def one(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    return run_ranks(1, diagnosed, model_path, Layout(1), folder=out)[0]


def close(ours: Any, theirs: Any) -> bool:
    """Integers to the bit, floating point to rounding; the same structure."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[k], v) for k, v in theirs.items())
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(theirs, torch.Tensor):
        if not theirs.is_floating_point():
            return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    if isinstance(theirs, float):
        both_nan = math.isnan(ours) and math.isnan(theirs)
        return both_nan or ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    return ours == theirs


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layouts_say_the_same(
    layout: Layout, model_path: Path, one: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(layout.world, diagnosed, model_path, layout, folder=tmp_path)
    for ours in ranks:
        assert close(ours["whole/metrics"], one["whole/metrics"])
        assert close(ours["small/metrics"], one["whole/metrics"])
        assert close(json.loads(ours["decomposition"]), json.loads(one["decomposition"]))
    for name in ("small", "whole"):
        for limit in (MAX_TOKENS, 4096):
            assert close(ranks[0][f"{name}/{limit}"], one[f"whole/{limit}"])
            assert f"{name}/{limit}" not in ranks[-1]


def test_the_record_is_what_went_in(one: dict[str, Any]) -> None:
    samples, record = of_versions(make_samples()), one["whole/4096"]
    joined = {
        "token_ids": [s.token_ids for s in samples],
        "loss_mask": [s.loss_mask for s in samples],
        "rollout_logprobs": [s.rollout_logprobs * s.loss_mask for s in samples],
        "weight_versions": [s.token_versions() for s in samples],
        "advantages": [i * s.loss_mask.float() for i, s in enumerate(samples)],
    }
    for name, parts in joined.items():
        assert torch.equal(record[name], torch.cat(parts))
    routes = [s.routing.expert_ids.short() for s in samples if s.routing is not None]
    none = torch.full((1, *routes[0].shape[1:]), -1, dtype=torch.int16)
    assert torch.equal(record["expert_ids"], torch.cat([r for s in routes for r in (s, none)]))
    assert (record["native_ids"] >= 0).all()
    assert (record["margins"] > 0).all()
    mask = record["loss_mask"]
    assert (record["old_logprobs"][~mask] == 0).all()
    assert (record["old_logprobs"][mask] < 0).all()
    assert (record["entropy"][mask] > 0).all()


def test_the_metrics_follow_from_the_record(one: dict[str, Any]) -> None:
    record, metrics = one["whole/4096"], one["whole/metrics"]
    mask = record["loss_mask"]
    d = (record["old_logprobs"] - record["rollout_logprobs"])[mask].double()
    assert metrics["mismatch/k1"] == pytest.approx(float(-d.mean()), rel=1e-6)
    assert metrics["mismatch/chi2"] == pytest.approx(float(d.expm1().square().mean()), rel=1e-6)
    extreme = ((d.exp() > 2) | (d.exp() < 0.5)).double().mean()
    assert metrics["mismatch/extreme_share"] == pytest.approx(float(extreme), rel=1e-9)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = float(np.quantile(d.abs().numpy(), q, method="inverted_cdf"))
        assert metrics[f"mismatch/{name}"] == pytest.approx(exact, rel=0.0222)
    age = (2 - record["weight_versions"][mask]).double()
    assert metrics["staleness/mean"] == pytest.approx(float(age.mean()), rel=1e-9)
    assert metrics["staleness/max"] == 2
    captured = record["expert_ids"][..., 0] >= 0
    choices = record["expert_ids"].unsqueeze(-1) == record["native_ids"].unsqueeze(-2)
    differs = ~choices.any(-1) & captured.unsqueeze(-1)  # [N, L, K]
    for i, layer in enumerate(MOE_LAYERS):
        share = differs[:, i].sum() / (captured[:, i].sum() * 2)
        assert metrics[f"routing/disagreement/layer_{layer:02d}"] == pytest.approx(float(share))
    rows = differs.any(-1)
    at = {"disagreement": record["margins"][rows], "agreement": record["margins"][captured & ~rows]}
    for name, found in at.items():
        margins = found.double()
        assert len(margins) > 20
        assert metrics[f"routing/margin_at_{name}"] == pytest.approx(float(margins.mean()))
        median = float(np.quantile(margins.numpy(), 0.5, method="inverted_cdf"))
        assert metrics[f"routing/margin_median_at_{name}"] == pytest.approx(median, rel=0.0222)


def test_a_bounded_record_holds_the_largest_gaps_and_some_of_the_rest(one: dict[str, Any]) -> None:
    whole, bounded = one["whole/4096"], one[f"whole/{MAX_TOKENS}"]
    lengths = [len(s.token_ids) for s in make_samples()]
    gaps = (whole["old_logprobs"] - whole["rollout_logprobs"]).abs().split(lengths)
    order = sorted(range(len(lengths)), key=lambda i: -float(gaps[i].max()))
    ids = bounded["sample_ids"].tolist()
    assert order[0] in ids
    assert ids == sorted(ids)
    assert len(ids) >= 4
    assert MAX_TOKENS / 2 < sum(lengths[i] for i in ids) == len(bounded["token_ids"]) <= MAX_TOKENS
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in ids])
    for name, values in whole.items():
        if name != "sample_ids":
            assert torch.equal(bounded[name], values[places])


def test_the_decomposition_says_where(one: dict[str, Any]) -> None:
    """Random routes: replaying them moves the states from the first MoE layer on."""
    found = json.loads(one["decomposition"])
    assert found["levels"].keys() == {"none", "ids", "weights"}
    gaps = {level: values["logprob_abs_mean"] for level, values in found["levels"].items()}
    assert len(set(gaps.values())) == 3
    metrics = one["whole/metrics"]
    assert gaps["ids"] == pytest.approx(metrics["mismatch/logprob_abs_mean"], rel=1e-6)
    assert found["first_divergent_layer"] == 1
    first, middle, last = found["layers"]
    assert [first["layer"], middle["layer"], last["layer"]] == list(MOE_LAYERS)
    assert first["hidden_rel_diff"] > 0.01
    assert middle["gap_without"] is None  # two layers of three were looked at
    assert first["gap_without"] not in (None, gaps["ids"], gaps["none"])
    assert last["gap_first"] == gaps["ids"]
    assert found["num_tokens"] == int(one["whole/4096"]["loss_mask"].sum())
