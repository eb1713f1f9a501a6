"""What a real run leaves to explain itself: that it is there, and that it is true."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.diagnosis.tokens import TokenRecord, load_tokens
from mrl.preflight import load_tokenizer
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import load_groups, save_groups
from mrl.types import Sample, SampleGroup
from parallel.hf_config import HfModel
from tests.loop.conftest import Toy, trained
from tests.loop.test_run import metrics
from tests.parallel.models import reference_logprobs
from tests.ranks import run_ranks

BAD_LAYER = 3


def record_of(run: Path, step: int) -> TokenRecord:
    return load_tokens(RunFolder(run).token_file(step))


def rolled_out(run: Path, step: int) -> list[SampleGroup]:
    return load_groups(saved_step(run / "rollouts", step))


def test_the_record_is_of_the_tokens_that_were_rolled_out(toy: Toy, recorded: Path) -> None:
    tokenizer = load_tokenizer(HfModel.read(toy.model))
    for step in range(4):
        record, groups = record_of(recorded, step), rolled_out(recorded, step)
        samples = [sample for group in groups for sample in group.samples]
        assert (record.step, record.version, record.routing_replay) == (step, step, "r3")
        assert (record.layer_numbers, record.num_experts) == ((1, 2, 3, 4), 8)
        assert record.sample_ids.tolist() == list(range(record.num_samples_of_step))
        assert record.num_samples == len(samples) == 16
        rows = (recorded / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        for i, (sample, row) in enumerate(zip(samples, map(json.loads, rows), strict=True)):
            part = record.sample(i)
            assert torch.equal(record.token_ids[part], sample.token_ids)
            assert torch.equal(record.loss_mask[part], sample.loss_mask)
            assert torch.equal(record.rollout_logprobs[part], sample.rollout_logprobs)
            assert torch.equal(record.weight_versions[part], sample.token_versions())
            assert sample.routing is not None
            assert record.expert_ids is not None
            routes = record.expert_ids[part]
            assert torch.equal(routes[:-1], sample.routing.expert_ids.short())
            assert (routes[-1] == -1).all()
            advantages = record.advantages[part][sample.loss_mask]
            assert torch.equal(advantages, torch.full_like(advantages, row["advantage"]))
            text = "".join(record.pieces[t] for t in sample.response_ids.tolist())
            assert text == tokenizer.decode(sample.response_ids)


def test_old_logprobs_are_those_of_the_weights_before_the_update(toy: Toy, recorded: Path) -> None:
    """The weights before step 0 are the model folder's; transformers gives the reference."""
    record = record_of(recorded, 0)
    assert record.temperature == 1.0
    for i in range(record.num_samples):
        part = record.sample(i)
        mask, ids = record.loss_mask[part], record.token_ids[part]
        expected = reference_logprobs(toy.model, ids, record.temperature)
        difference = (record.old_logprobs[part][1:] - expected)[mask[1:]]
        assert difference.abs().max() < 1e-5
        assert (record.old_logprobs[part][~mask] == 0).all()


def test_the_metrics_are_of_the_tokens_on_file(recorded: Path) -> None:
    for row in metrics(recorded):
        record = record_of(recorded, row["step"])
        mask = record.loss_mask
        d = (record.old_logprobs - record.rollout_logprobs)[mask].double()
        assert row["mismatch/logprob_abs_mean"] == pytest.approx(float(d.abs().mean()), rel=1e-9)
        assert row["mismatch/logprob_abs_max"] == float(d.abs().max())
        assert row["mismatch/k1"] == pytest.approx(float(-d.mean()), rel=1e-9)
        exact = float(np.quantile(d.abs().numpy(), 0.9, method="inverted_cdf"))
        assert row["mismatch/p90"] == pytest.approx(exact, rel=0.0222)
        assert row["mismatch/extreme_share"] == 0.0
        assert row["entropy"] == pytest.approx(float(record.entropy[mask].mean()), rel=1e-6)
        assert row["staleness/max"] == 0.0
        assert record.margins is not None
        assert 0 < row["routing/margin_at_agreement"] < float(record.margins.max())


def test_steps_that_are_due_are_decomposed(recorded: Path) -> None:
    assert [f.name for f in (recorded / "diagnosis").iterdir()] == ["step_000000.json"]
    found = json.loads((recorded / "diagnosis/step_000000.json").read_text())
    first, *others = metrics(recorded)
    assert found["step"] == 0
    assert found["num_tokens"] > 0
    assert found["levels"]["ids"]["logprob_abs_mean"] < 1e-5  # fp32 on both sides
    assert first["decompose/ids/k3"] == found["levels"]["ids"]["k3"]
    assert [layer["layer"] for layer in found["layers"]] == [1, 2, 3, 4]
    assert not [key for row in others for key in row if key.startswith("decompose/")]


def with_wrong_routes(run: Path, folder: Path) -> Path:
    """The rollouts of a run with every expert of one layer the next one."""

    def wrong(sample: Sample) -> Sample:
        assert sample.routing is not None
        ids = sample.routing.expert_ids.clone()
        ids[:, BAD_LAYER - 1] = (ids[:, BAD_LAYER - 1] + 1) % 8
        return dataclasses.replace(
            sample, routing=dataclasses.replace(sample.routing, expert_ids=ids)
        )

    folder.mkdir()
    groups = rolled_out(run, 0)
    for group in groups:
        group.samples = [wrong(sample) for sample in group.samples]
    save_groups(saved_step(folder, 0), groups)
    return folder


def rerun(toy: Toy, folder: Path, rollouts: Path, world: int, *more: str) -> dict[str, Any]:
    """The metrics of one step from saved rollouts."""
    load = (f"debug.load_rollouts={rollouts}", "train.num_steps=1")
    run_ranks(world, trained, toy.overrides(folder, *load, *more), folder=folder / "out")
    return metrics(folder)[0]


def test_a_layer_whose_routes_are_wrong_is_named(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    rollouts = with_wrong_routes(recorded, tmp_path / "rollouts")
    row = rerun(toy, tmp_path / "run", rollouts, 2)
    found = json.loads((tmp_path / "run/diagnosis/step_000000.json").read_text())
    assert found["first_divergent_layer"] == row["decompose/first_divergent_layer"] == BAD_LAYER
    gap = {layer["layer"]: layer["gap_without"] for layer in found["layers"]}
    assert gap[BAD_LAYER] < 1e-5
    assert min(gap[n] for n in (1, 2, 4)) > 1e-3
    assert found["levels"]["none"]["logprob_abs_mean"] < 1e-5
    assert found["levels"]["ids"]["logprob_abs_mean"] > 1e-3
    shares = [row[f"routing/disagreement/layer_{n:02d}"] for n in (1, 2, 3, 4)]
    assert shares[:2] == [0.0, 0.0]
    assert shares[2] > 0.4
    assert row["routing/margin_at_disagreement"] > 0
    record = record_of(tmp_path / "run", 0)
    assert record.num_samples == 16  # of both ranks


def trained_with_a_loss(overrides: list[str]) -> None:
    """`mrl train`, but the second rank kills its engine after the first step."""
    from mrl.collect.collector import Collector
    from mrl.engine_pool.local import LocalPool
    from mrl.trainer import Trainer

    whole_step = Trainer.run_step

    def step_and_kill(self: Trainer) -> dict[str, float]:
        found = whole_step(self)
        if found["step"] == 0 and self.mesh.rank == 1:
            assert isinstance(self.collector, Collector)
            assert isinstance(self.collector.pool, LocalPool)
            engine = self.collector.pool.part.engine.server
            assert engine is not None
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGKILL)
        return found

    Trainer.run_step = step_and_kill
    trained(overrides)


@pytest.mark.release
def test_the_engines_gate_weights_are_replayed(toy: Toy, tmp_path: Path) -> None:
    """Two real engines give them to two ranks that share their samples.

    Then one engine is killed: both ranks send the weights again, to its successor as well.
    """
    weights = ("rollout.return_routing_weights=true", "moe.replay=ids_order_weights")
    more = (
        "train.num_steps=2",
        "train.num_steps_per_rollout=2",
        "debug.save_rollouts=true",
        *weights,
    )
    folder = tmp_path / "run"
    overrides = toy.overrides(folder, *more)
    run_ranks(2, trained_with_a_loss, overrides, folder=tmp_path / "out")
    rows = metrics(folder)
    assert [row["rollout/engine_restarts"] for row in rows] == [0.0, 1.0]
    for row in rows:
        assert row["routing/replay_coverage"] == 1.0
        assert row["mismatch/logprob_abs_max"] < 1e-5
        assert row["routing/wire_bytes_per_token"] == 4 + 4 * 2 * 4  # 4 layers, top-2, 4 bytes
    assert rows[0]["decompose/weights/logprob_abs_mean"] < 1e-5
    traces = [s.routing for g in rolled_out(folder, 0) for s in g.samples]
    assert all(trace is not None and trace.expert_weights is not None for trace in traces)


def test_routes_may_be_captured_without_replay(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    """They are compared, and the update is the same to the bit."""
    rollouts = with_wrong_routes(recorded, tmp_path / "rollouts")
    more = ("moe.routing_replay=r2", "moe.replay=ids_weights", "train.num_steps_per_rollout=2")
    capture = "diagnosis.capture_routes=true"
    with_routes = rerun(toy, tmp_path / "a", rollouts, 1, *more, capture)
    without = rerun(toy, tmp_path / "b", rollouts, 1, *more)
    for key in ("loss/policy", "grad_norm", "ratio/max", "mismatch/k3"):
        assert with_routes[key] == without[key]
    layer = f"routing/disagreement/layer_{BAD_LAYER:02d}"
    assert with_routes[layer] > 0.4
    assert record_of(tmp_path / "a", 0).expert_ids is not None
    bare = record_of(tmp_path / "b", 0)
    assert (bare.expert_ids, bare.layer_numbers) == (None, ())
    assert (tmp_path / "b/diagnosis/step_000000.json").read_text().count('"ids"') == 0
