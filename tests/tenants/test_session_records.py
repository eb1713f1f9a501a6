"""Samples of a session are in its run folder, and on its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.run.folder import RunFolder
from mrl.service.sessions import records
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.records import SampleRecords
from mrl.service.tokenizer import ServiceTokenizer
from mrl.view.collect import collect
from parallel.hf_config import HfModel
from tests.tenants.parts import make_model

BOUNDS = Bounds(128, 64)


def asked(**keys: Any) -> Any:
    return read_body({"kind": "sample", "max_tokens": 4, **keys}, BOUNDS)


def answers(name: str, *lists: list[list[int]]) -> dict[str, Any]:
    """What the service answers: for each prompt some lists of tokens."""
    return {
        "samples": [
            [
                {
                    "id": f"{name}/{i}/{k}",
                    "tokens": tokens,
                    "logprobs": [-1.5] * len(tokens),
                    "version": 0,
                    "stop_reason": "length",
                }
                for k, tokens in enumerate(each)
            ]
            for i, each in enumerate(lists)
        ]
    }


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    for each in (made.rollouts, made.tokens):
        each.mkdir(parents=True)
    made.config.write_text("output_dir: run\n")
    return made


@pytest.fixture
def kept(folder: RunFolder, made_once: Callable[..., Path]) -> SampleRecords:
    model = HfModel.read(str(made_once("tenants_model", make_model) / "model"))
    return SampleRecords(folder, ServiceTokenizer(model), 1.0)


def test_samples_of_a_session_are_on_its_page(folder: RunFolder, kept: SampleRecords) -> None:
    kept.add(
        0, asked(prompts=[[70, 71], [72]], n=2), answers("a-1", [[73, 74], [75]], [[76], [77]])
    )
    for version in (0, 1):
        folder.add_metrics({"step": version, "loss/policy": 1.0})
    trained = {
        "tokens": [70, 71, 73, 74],
        "advantages": [0, 0, 0.5, 0.5],
        "logprobs": [0, 0, -1.5, -1.5],
        "sample": "a-1/0/0",
    }
    body = {"kind": "forward_backward", "loss": "ppo", "sequences": [trained]}
    kept.train(0, read_body(body, BOUNDS), {"logprobs": [[0.0, 0.0, -1.25, -1.5]]})  # pyright: ignore[reportArgumentType]
    kept.add(1, asked(prompts=[[70]]), answers("a-3", [[73]]))
    page = collect(folder.root, None, 64)
    assert [step["step"] for step in page["steps"]] == [0, 1]
    shown = {sample["id"]: sample for sample in page["steps"][0]["samples"]}
    assert len(shown) == 4
    assert all("\u2192" in sample["text"] for sample in shown.values())
    assert (shown[0]["max_d"], shown[0]["top_advantage"]) == (0.25, 0.5)
    assert (shown[1]["max_d"], shown[1]["num_loss_tokens"]) == (None, 0)
    rows = folder.read_rollouts(0)
    assert [row["response_len"] for row in rows] == [2, 1, 1, 1]
    assert [row["advantage"] for row in rows] == [0.5, None, None, None]
    main(["view", str(folder.root)])
    assert (folder.root / "view.html").is_file()


@pytest.mark.parametrize(
    "other", [{"tokens": [70, 73, 74, 75]}, {"tokens": [70, 72]}, {"targets": [70, 73, 75]}]
)
def test_other_tokens_than_those_of_the_named_sample_are_not_shown(
    folder: RunFolder, kept: SampleRecords, other: dict[str, Any]
) -> None:
    """With replay="match", a sequence may name a sample of which it has only a part, or more."""
    kept.add(0, asked(prompts=[[70]]), answers("a-1", [[73, 74]]))
    trained: dict[str, Any] = {"tokens": [70, 73, 74], **other, "sample": "a-1/0/0"}
    size = len(trained["tokens"])
    trained |= {"advantages": [0.0] + [0.5] * (size - 1), "logprobs": [-1.5] * size}
    body = read_body(
        {"kind": "forward_backward", "loss": "ppo", "replay": "match", "sequences": [trained]},
        BOUNDS,
    )
    kept.train(0, body, {"logprobs": [[-1.25] * size]})  # pyright: ignore[reportArgumentType]
    folder.add_metrics({"step": 0, "loss/policy": 1.0})
    (step,) = collect(folder.root, None, 64)["steps"]
    (shown,) = step["samples"]
    assert (shown["max_d"], shown["num_loss_tokens"]) == (None, 0)


def test_what_is_not_known_of_samples_is_no_finding(folder: RunFolder, kept: SampleRecords) -> None:
    tokens = [[70 + (i + k) % 9 for i in range(40)] for k in range(4)]
    kept.add(0, asked(prompts=[[70]], n=4, max_tokens=40), answers("a-1", tokens))
    bodies = [
        {
            "tokens": [70, *each],
            "advantages": [0, *[1.0] * 40],
            "logprobs": [0, *[-1.5] * 40],
            "sample": f"a-1/0/{k}",
        }
        for k, each in enumerate(tokens)
    ]
    body = read_body({"kind": "forward_backward", "loss": "ppo", "sequences": bodies}, BOUNDS)
    old = [[0.0, *[-1.5 + 1e-6 * (i % 7) for i in range(40)]] for _ in tokens]
    kept.train(0, body, {"logprobs": old})  # pyright: ignore[reportArgumentType]
    folder.add_metrics({"step": 0, "loss/policy": 1.0})
    found = [finding["text"] for finding in collect(folder.root, None, 64)["findings"]]
    assert found
    assert not [text for text in found if "nan" in text], found


def test_the_first_answers_of_a_version_are_kept(
    folder: RunFolder, kept: SampleRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_SAMPLES", 3)
    for number in range(4):
        kept.add(7, asked(prompts=[[70]], n=2), answers(f"a-{number}", [[73], [74]]))
    assert len(folder.read_rollouts(7)) == 3
    page = collect(folder.root, None, 64)
    assert page["steps"][0]["num_samples"] >= 3
