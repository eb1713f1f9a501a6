"""Detectors on two copies of a tiny MoE, one of them faulty: what is named, how well, and when not."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mrl.diagnosis.detectors import extremes, router
from mrl.diagnosis.detectors.base import LossTokens
from mrl.diagnosis.findings import Finding, Usual, find, usual_mismatch
from mrl.diagnosis.tokens import TokenRecord
from tests.diagnosis.tiny_moe import PROMPT, Model, T, make_record
from tests.release import release

FLOAT32, HALF = 1e-6, 0.02
"""Noise of logits."""
USUAL = Usual(FLOAT32, FLOAT32)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.make()


def first(record: TokenRecord) -> Finding:
    return find(record)[0]


@pytest.mark.parametrize(("noise", "name"), [(0.0, "nothing_wrong"), (FLOAT32, "nothing_wrong"),
                                             (HALF, "noise"), (0.2, "unexplained")])  # fmt: skip
def test_noise_is_not_blamed_on_anything(model: Model, noise: float, name: str) -> None:
    found = find(make_record(model, model, noise=noise))
    assert found[0].name == name
    assert not any(finding.is_cause for finding in found)


@pytest.mark.parametrize(("noise", "name"), [(HALF, "noise"), (0.01, "stale_weights")])
def test_a_record_without_routes_says_nothing_of_experts(
    model: Model, noise: float, name: str
) -> None:
    usual = USUAL if name == "stale_weights" else None
    record = make_record(model, model, noise=noise)
    dense = dataclasses.replace(
        record, layer_numbers=(), num_experts=0, expert_ids=None, native_ids=None, margins=None
    )
    for given, says in ((record, True), (dense, False)):
        found = find(given, usual)[0]
        assert found.name == name
        assert ("expert" in found.text) == says


@pytest.mark.parametrize("reported_only", [True, False])
@pytest.mark.parametrize(
    ("asked", "theirs"), [(1, 1.01), (0.7, 1), release(1, 1.3), release(1, 0.7), release(1, 2)]
)
def test_another_temperature_is_measured(
    model: Model, asked: float, theirs: float, reported_only: bool
) -> None:
    """Whether the engine samples at it or only says so; slope and sign."""
    record = make_record(
        model,
        model,
        temperature=asked,
        engine_temperature=theirs,
        reported_only=reported_only,
        noise=FLOAT32,
    )
    found = first(record)
    assert found.name == "temperature"
    assert found.where["temperature"] == pytest.approx(theirs, rel=0.04)
    assert found.where["r2"] > 0.9
    assert ("before the temperature" in found.text) == ((asked, theirs) == (0.7, 1))


def test_a_small_change_of_temperature_drowns_in_half_precision(model: Model) -> None:
    loud, quiet = (
        find(make_record(model, model, engine_temperature=t, noise=HALF)) for t in (1.05, 1.005)
    )
    assert loud[0].name == "temperature"
    assert quiet[0].name == "noise"


@pytest.mark.parametrize("share", [0.005, 0.05])
def test_a_few_tokens_that_went_astray_are_no_temperature(model: Model, share: float) -> None:
    """They are what the trainer finds unlikely, so a line through them has the slope of a heated
    engine; another temperature moves all the other tokens too."""
    sharp = dataclasses.replace(model, head=4 * model.head)
    record = make_record(sharp, sharp, noise=FLOAT32)
    g = torch.Generator().manual_seed(0)
    astray = record.loss_mask & (torch.rand(record.num_tokens, generator=g) < share)
    usual = record.old_logprobs + 1e-3 * torch.randn(record.num_tokens, generator=g)
    rollout = torch.where(astray, -3 * torch.rand(record.num_tokens, generator=g), usual)
    old = torch.where(astray, -8 - 4 * torch.rand(record.num_tokens, generator=g), usual)
    found = find(dataclasses.replace(record, rollout_logprobs=rollout, old_logprobs=old))
    assert "temperature" not in [finding.name for finding in found]
    assert "extreme_tokens" in [finding.name for finding in found]


@pytest.mark.parametrize("noise", [FLOAT32, HALF])
@pytest.mark.parametrize(("layer", "expert"), [(0, 3), release(1, 5), (2, 2)])
def test_a_stale_expert_is_found(model: Model, layer: int, expert: int, noise: float) -> None:
    found = first(make_record(model, model.perturbed(layer, expert, 0.3), noise=noise))
    assert found.name == "stale_expert"
    assert found.where["layers"] == [layer + 1]
    assert found.where["experts"] == [expert]


def test_the_row_before_is_the_one_that_made_the_log_prob(model: Model) -> None:
    """Were row t taken for token t, the last layer's expert would not stand out in full."""
    record = make_record(model, model.perturbed(2, 2, 0.3), noise=FLOAT32)
    tokens = LossTokens(record)
    assert record.expert_ids is not None
    right, wrong = ((record.expert_ids[tokens.index - back, 2] == 2).any(-1) for back in (1, 0))
    assert float(tokens.d.abs()[~right].max()) < 1e-4  # nothing is left without it
    assert float(tokens.d.abs()[~wrong].max()) > 1e-2


def test_all_experts_stale_are_not_blamed_on_one(model: Model) -> None:
    engine = dataclasses.replace(model, experts=model.experts + 0.1 * model.experts.flip(1))
    record = make_record(model, engine, noise=FLOAT32)
    assert not any(finding.is_cause for finding in find(record))
    found = find(record, USUAL)  # in this run, kernels and dtype are not to blame
    assert found[0].name == "stale_weights"
    wild = make_record(model, model, noise=FLOAT32)
    wild.rollout_logprobs[5 * T + PROMPT] -= 3.0
    assert find(wild, USUAL)[0].name != "stale_weights"


def test_weights_that_the_engine_calls_older_are_named(model: Model) -> None:
    engine = dataclasses.replace(model, experts=model.experts * 1.2)
    record = make_record(model, engine, noise=FLOAT32)
    versions = torch.where(record.loss_mask, 2, -1).int()
    found = first(dataclasses.replace(record, weight_versions=versions))
    assert found.name == "stale_weights"
    assert found.where["version"] == 2


@pytest.mark.parametrize("shift", [release(-2), -1, release(1), 2])
def test_shifted_routes_are_found_with_their_shift(model: Model, shift: int) -> None:
    found = first(make_record(model, model, route_shift=shift, noise=FLOAT32))
    assert found.name == "shifted_routes"
    assert found.where["shift"] == shift
    assert 1 in found.where["layers"]


def test_router_disagreement_by_layer(model: Model) -> None:
    """Another router in layer 2: layer 1 agrees, and the margins are not those of a coin toss."""
    routers = model.routers.clone()
    routers[1] += 0.3 * routers[1].roll(1, -1)
    record = make_record(model, dataclasses.replace(model, routers=routers))
    layers = router.layer_routes(record)
    assert [layer.number for layer in layers] == [1, 2, 3]
    assert layers[0].disagreement == 0
    assert math.isnan(layers[0].margin_at_disagreement)
    assert layers[1].disagreement > 0.05
    assert layers[1].margin_at_disagreement > 0.01
    found = {finding.name: finding for finding in find(record)}
    assert found["router_disagreement"].where["first_layer"] == 2


def test_a_wild_token_and_its_sample_are_named(model: Model) -> None:
    record = make_record(model, model, noise=1e-3)
    place = 5 * T + PROMPT + 3
    record.rollout_logprobs[place] -= 3.0
    found = {finding.name: finding for finding in find(record)}
    assert found["extreme_sample"].where["samples"] == [5]
    worst = found["extreme_tokens"].where["tokens"][0]
    assert (worst["sample"], worst["position"]) == (5, PROMPT + 3)
    assert worst["piece"] == record.pieces[int(record.token_ids[place])]
    assert len(worst["before"]) == PROMPT + 3
    assert extremes.worst_samples(LossTokens(record))[0]["sample"] == 5
    assert "stale_expert" not in found


def test_records_without_routes_and_without_tokens(model: Model) -> None:
    record = make_record(model, model, engine_temperature=1.3)
    bare = dataclasses.replace(record, expert_ids=None, native_ids=None, margins=None)
    assert first(bare).name == "temperature"
    assert router.expert_gaps(LossTokens(bare)) is None
    none = dataclasses.replace(record, loss_mask=torch.zeros_like(record.loss_mask))
    assert [finding.name for finding in find(none)] == ["no_tokens"]


def test_log_probs_that_are_not_finite_come_first(model: Model) -> None:
    record = make_record(model, model, noise=FLOAT32)
    place = 5 * T + PROMPT + 3
    record.old_logprobs[place] = float("nan")
    record.rollout_logprobs[7 * T + PROMPT] = -math.inf
    found = first(record)
    assert (found.name, found.is_cause, found.severity) == ("not_finite", True, 1.0)
    assert found.where["samples"] == [5, 7]
    assert found.where["tokens"][0] == {"sample": 5, "position": PROMPT + 3}
    assert "2 of" in found.text
    record.old_logprobs[:] = float("nan")
    assert first(record).name == "not_finite"


def test_wild_tokens_of_a_run_are_not_called_stale_weights(model: Model) -> None:
    """Other weights move every token: where the median is as ever, it is not the whole model."""
    record = make_record(model, model, noise=FLOAT32)
    record.rollout_logprobs[PROMPT + 3 :: 2 * T] -= 3.0  # of every second sample
    assert not any(finding.is_cause for finding in find(record, USUAL))


def test_what_is_usual_is_what_the_other_steps_have() -> None:
    rows = [
        {"step": i, "mismatch/logprob_abs_mean": mean, "mismatch/p50": None if i == 1 else mean / 2}
        for i, mean in enumerate((0.1, 0.2, 0.3, 9.0))
    ]
    assert usual_mismatch(rows, 3) == Usual(0.2, 0.1)
    assert usual_mismatch(rows[:2], 0) is None
