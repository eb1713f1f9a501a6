"""One process: parity with transformers, what replay does, refusals of folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from moe.align import local_routes
from moe.routes import Replay
from mrl.errors import InputError
from mrl.types import NATIVE_ROUTE, LossOutput, MicroBatch, Sample, TrainBatch
from parallel.hf_config import HfModel
from parallel.packing import pack
from tests.parallel.conftest import weighted
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, exported, join_mesh
from tests.ranks import run_ranks

TEMPERATURE = 0.8  # of layouts.build


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def packed(samples: list[Sample]) -> MicroBatch:
    return pack([weighted(s) for s in samples], 1)


def native_logprobs(model_path: Path, samples: list[Sample]) -> Tensor:
    policy = build(model_path, join_mesh(model_path, {}))
    return policy.forward_only([packed(samples)], Replay.off).logprobs[0]


def one_rank(tmp_path: Path, function: Any, *args: Any) -> Any:
    return run_ranks(1, function, *args, folder=tmp_path / "out")[0]


@pytest.mark.parametrize("kind", ["model_path", "tied_model_path"])
def test_logprobs_equal_transformers(
    kind: str, request: pytest.FixtureRequest, samples: list[Sample], tmp_path: Path
) -> None:
    path = request.getfixturevalue(kind)
    ours = one_rank(tmp_path, native_logprobs, path, samples)
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    start = 0
    for sample in samples:
        ids = sample.token_ids
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0] / TEMPERATURE
        theirs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        mine = ours[start : start + len(ids)]
        wanted = sample.loss_mask[1:]
        assert wanted.any()
        assert (mine[1:] - theirs)[wanted].abs().max() < 1e-5
        assert (mine[~sample.loss_mask] == 0).all()  # rows that lead to none are not computed
        start += len(ids)


def replay_effects(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    policy = build(model_path, join_mesh(model_path, {}))
    # Every token but the first counts here, so that every log-prob can be seen.
    seen = [dataclasses.replace(s, loss_mask=torch.arange(len(s.token_ids)) > 0) for s in samples]
    batch = packed(seen)
    before = policy.forward_only([batch], Replay.rollout)
    assert batch.routes is not None
    numbers = batch.routes.layer_numbers
    captured = local_routes(batch.routes, numbers, 0, 1)
    changed = torch.stack([captured[number] for number in numbers], dim=1)  # [N, L, K]
    # The second token of the first sample, in the first MoE layer: one expert for an unused one.
    row = changed[1, 0]
    row[0] = next(e for e in range(4) if e not in row.tolist())
    # Rows without a captured route are -1 here; what their ids are has no meaning.
    narrow = changed.to(batch.routes.expert_ids.dtype)
    routes = dataclasses.replace(batch.routes, expert_ids=narrow)
    after = policy.forward_only([dataclasses.replace(batch, routes=routes)], Replay.rollout)
    native = policy.forward_only([batch], Replay.off)
    record = Replay.recorded(native.native_routes)
    recorded = policy.forward_only([batch], record)

    def used_equals_captured() -> list[bool]:
        """The router's own output of the last R3 pass against the captured ids."""
        policy.forward_only([batch], Replay.rollout)
        replays = next(iter(policy.runner.replays.values())).layers
        answers = []
        for number, ids in captured.items():
            keep = ids[:, 0] != NATIVE_ROUTE
            used = replays[number].routing_map[keep]
            wanted = torch.zeros_like(used).scatter(1, ids[keep], True)
            answers.append(torch.equal(used, wanted))
        return answers

    return {
        "replayed": before.logprobs[0],
        "changed": after.logprobs[0],
        "native": native.logprobs[0],
        "recorded": recorded.logprobs[0],
        "equal": used_equals_captured(),
    }


def test_one_captured_id_changes_what_follows_and_nothing_else(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    out = one_rank(tmp_path, replay_effects, model_path, samples)
    assert out["equal"] == [True, True, True]
    length = len(samples[0].token_ids)
    difference = (out["changed"] - out["replayed"]).abs()
    assert (difference[:2] == 0).all()  # causal: the changed token predicts only later ones
    assert (difference[2:length] > 0).all()
    assert (difference[length:] == 0).all()  # other sequences of the pack
    assert not torch.equal(out["native"], out["replayed"])
    assert torch.equal(out["recorded"], out["native"])  # R2: its own routes change nothing


def survives_a_bad_step(model_path: Path, samples: list[Sample]) -> dict[str, Any]:
    policy = build(model_path, join_mesh(model_path, {}))
    before = exported(policy)

    def poisoned(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
        return LossOutput(logprobs.sum() * float("nan"))

    try:
        policy.train_step(TrainBatch([packed(samples)], 1, 1), poisoned, Replay.rollout)
    except RuntimeError as error:
        after = exported(policy)
        return {"error": str(error), "same": all(torch.equal(after[k], before[k]) for k in before)}
    return {"error": "", "same": False}


def test_a_nan_gradient_stops_the_step_and_touches_no_weight(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    out = one_rank(tmp_path, survives_a_bad_step, model_path, samples)
    assert "nan" in out["error"].lower() or "finite" in out["error"]
    assert out["same"]


def test_a_folder_that_is_not_a_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        HfModel.read(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        HfModel.read(empty)
    (empty / "config.json").write_text('{"model_type": "gemma2"}')
    with pytest.raises(InputError, match="safetensors"):
        HfModel.read(empty)
    shutil.copy(model_path / "model.safetensors", empty)
    with pytest.raises(
        InputError, match=r"'gemma2' is not in .*: expected one of deepseek_v3, .*qwen3_moe"
    ):
        HfModel.read(empty)


def load_other_shape(model_path: Path) -> str:
    try:
        build(model_path, join_mesh(model_path, {}))
    except InputError as error:
        return str(error)
    return ""


def test_weights_that_do_not_fit_the_config_are_refused(model_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 20}))
    message = one_rank(tmp_path, load_other_shape, copy)
    assert "mlp.experts.3.gate_proj.weight" in message
