"""The unmodified SDK against a service with the real engine on a toy model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mrl.toy_model import write_toy_model
from tests.tinker.running import (
    key_of,
    needs_sdk,
    result_of,
    run_program,
    served,
    start_program,
    tinker_service,
)

TOGETHER = {"batch_invariant": True, "context_len": 64, "max_total_tokens": 2048}
APART = {**TOGETHER, "placement": "disaggregated", "num_ranks": 1}
pytestmark = [needs_sdk, pytest.mark.timeout(900), pytest.mark.release]


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def test_stock_programs(model: Path, tmp_path: Path) -> None:
    service = tinker_service(tmp_path, model)
    key = key_of(service)
    with served(service) as (url, _):
        trains = run_program("trains", url, key)
        saves = run_program("saves", url, key)
        sampling = run_program("sampling", url, key)
        refusals = run_program("refusals", url, key)
        download = run_program("download", url, key)
    check_trains(trains)
    check_saves(saves)
    check_sampling(sampling)
    check_refusals(refusals)
    assert download["path"].endswith("/external_weights/mine")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(download["sizes"])
    assert (download["rank"], download["alpha"]) == (4, 32)


def test_two_clients_have_the_bits_of_each_alone(model: Path, tmp_path: Path) -> None:
    service = tinker_service(tmp_path, model)
    key, other = key_of(service), key_of(service, "bob")
    with served(service) as (url, _):
        both = [
            start_program("reinforces", url, key, "2"), start_program("reinforces", url, other, "8"),
        ]  # fmt: skip
        together = [result_of(each) for each in both]
        alone = [run_program("reinforces", url, key, rank) for rank in ("2", "8")]
    assert together == alone
    assert together[0] != together[1]
    assert not any(step["native"] for steps in together for step in steps)


def test_engines_on_ranks_of_their_own(model: Path, tmp_path: Path) -> None:
    """The bits are those of a service whose engine is on the trainer."""
    found = []
    for name, ranks, rollout in (("apart", 2, APART), ("together", 1, TOGETHER)):
        service = tinker_service(tmp_path / name, model, ranks=ranks, rollout=rollout)
        key = key_of(service)
        with served(service) as (url, _):
            if name == "apart":
                check_trains(run_program("trains", url, key))
                check_saves(run_program("saves", url, key))
                check_sampling(run_program("sampling", url, key))
            found.append(run_program("reinforces", url, key, "4"))
    assert found[0] == found[1]
    assert not any(step["native"] for step in found[0])


def check_trains(found: dict) -> None:
    assert found["info"] == [4, True]
    losses = found["losses"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5
    loss, logprobs = found["forward"]
    assert abs(loss + sum(logprobs)) < 1e-4
    assert loss < losses[-1]
    assert found["ids"] == 4
    for tokens, sampled, reason in found["answers"]:
        assert len(tokens) == len(sampled)
        assert reason in ("stop", "length")
    for name, metrics in found["passes"].items():
        assert metrics["session/native_rows:sum"] == 0, name
        assert metrics["session/replayed_rows:sum"] > 0, name
    own, square, norm = found["custom"]
    assert abs(own - square) < 1e-3
    assert norm > 0


def check_saves(found: dict) -> None:
    state, named = found["paths"]
    assert state.endswith("/weights/one")
    assert named.endswith("/sampler_weights/fixed")
    assert found["first"] == found["frozen"] == found["of state"] == found["hosted"]
    moved, back, same = found["loaded"]
    assert back == same
    assert abs(back - moved) > 1e-3
    assert found["checkpoints"] == [
        ["weights/one", "training", {"of": "test"}, True],
        ["sampler_weights/fixed", "sampler", None, True],
    ]
    assert found["run"] == [4, state, True]
    assert found["left"] == [[state, True]]
    assert found["gone"][0] == "NotFoundError"
    assert found["closed"][0] == "AuthenticationError"


def check_sampling(found: dict) -> None:
    one, two = found["greedy"]
    assert one == two
    first, *rest = found["prompt"]
    assert first is None
    assert np.allclose(rest, found["trainer"], atol=1e-4)
    assert found["last"][:-2] == [None] * (len(rest) - 1)
    assert np.allclose(found["last"][-2:], rest[-2:], atol=1e-5)
    assert found["top"][0] is None
    assert all(len(row) == 3 for row in found["top"][1:])
    assert found["never"] == [8, 8]
    assert found["base"]


def check_refusals(found: dict) -> None:
    for name, (kind, says) in found.items():
        assert kind in ("BadRequestError", "NotFoundError"), (name, kind, says)
    assert "lora.max_rank" in found["rank"][1] or "rank" in found["rank"][1]
    assert "train_unembed" in found["unembed alone"][1]
    assert "takes tokens only" in found["image"][1]
    assert "does not read temp" in found["option"][1]
