"""`mrl why` on a run folder made by hand: numbers against the other steps, and what is not there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.diagnosis.tokens import save_tokens
from mrl.diagnosis.why import explain, step_numbers
from mrl.run.folder import RunFolder
from tests.diagnosis.tiny_moe import PROMPT, Model, S, T, make_record
from tests.loop.test_refusals import refused


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Four steps; the record of step 3 has another temperature and no rollouts beside it."""
    folder = RunFolder(tmp_path)
    folder.config.write_text("see tests/config/test_config.py")
    for step in range(4):
        gap = 0.5 if step == 3 else 0.01 * (step + 1)
        row = {"step": step, "mismatch/k3": gap, "reward/mean": 1.0, "tokens/train": 7.0}
        folder.add_metrics(row)
    folder.token_file(3).parent.mkdir()
    model = Model.make()
    save_tokens(folder.token_file(3), make_record(model, model, engine_temperature=1.2))
    return folder


def test_numbers_are_compared_with_the_median_of_the_others() -> None:
    rows = [{"mismatch/k1": value, "entropy": 2.0} for value in (0.1, 0.2, 0.9)]
    row = {"mismatch/k1": 0.8, "entropy": 2.2, "ratio/max": 1.0, "tokens/train": 3.0, "lr": 1.0}
    numbers = {number.key: number for number in step_numbers(row, rows)}
    assert numbers.keys() == {"mismatch/k1", "entropy", "ratio/max"}
    assert numbers["mismatch/k1"].ratio == pytest.approx(4.0)
    assert numbers["mismatch/k1"].is_spike
    assert not numbers["entropy"].is_spike
    assert numbers["ratio/max"].median is None


def test_what_rounding_explains_is_no_spike() -> None:
    rows = [{"mismatch/k1": value} for value in (1e-8, 2e-8, 3e-8)]
    for value, is_spike in ((1e-7, False), (9e-6, False), (2e-5, True), (-2e-5, True)):
        (number,) = step_numbers({"mismatch/k1": value}, rows)
        assert number.is_spike == is_spike
        assert abs(number.ratio or 0) > 3  # the ratio is still shown


def test_why_explains_a_step(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["why", str(run.root), "3"])
    shown = capsys.readouterr().out
    assert "diagnosis: temperature: the engine's log-probs look like temperature 1." in shown
    assert "rollout.temperature" in shown.splitlines()[-1]
    main(["why", str(run.root), "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["where"]["temperature"] == pytest.approx(1.2, rel=0.01)
    assert [number["key"] for number in found["numbers"]] == ["mismatch/k3", "reward/mean"]
    assert all({"value", "median", "ratio", "is_spike"} <= n.keys() for n in found["numbers"])
    assert found["layers"][0]["margin_at_disagreement"] is None  # no NaN in JSON
    assert 0 <= found["samples"][0]["sample"] < S
    assert len(found["tokens"]) == 10


def test_a_step_without_a_record_says_which_key_writes_one(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(run.root), "1"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mismatch/k3") for line in lines)
    assert "diagnosis.save_tokens_every=1" in lines[-1]
    assert explain(run, 1).findings == []


@pytest.mark.parametrize("step", [1, 3], ids=["without a token record", "with one"])
def test_a_decomposition_is_shown_with_words(
    step: int, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps = {"none": 0.1, "ids": 0.066, "quantized": 0.036}
    levels = {
        level: {"logprob_abs_mean": gap, "k3": gap / 10, "extreme_share": None}
        for level, gap in gaps.items()
    }
    found = {"step": step, "num_tokens": 96, "levels": levels, "layers": []}
    run.diagnosis_file(step).parent.mkdir()
    run.diagnosis_file(step).write_text(json.dumps({**found, "first_divergent_layer": None}))
    main(["why", str(run.root), str(step)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Gap by what is replayed, 96 tokens" in shown
    assert "replay of ids, quantised weights 0.036 0.0036 -" in shown
    assert "measure total routes quantization rest mean |d| 0.1 0.034 0.03 0.036 k3 0.01" in shown
    assert "0.03 from the engine's quantised weights (quantization)" in shown
    main(["why", str(run.root), str(step), "--json"])
    parts = json.loads(capsys.readouterr().out)["decomposition"]["parts"]
    assert parts.keys() == {"logprob_abs_mean", "k3"}
    assert parts["k3"]["quantization"] == pytest.approx(0.003)


def test_a_step_that_died_is_explained_from_its_record(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not finite: the guard stops the run before the step has a line in metrics.jsonl."""
    model = Model.make()
    record = make_record(model, model)
    record.old_logprobs[5 * T + PROMPT] = float("nan")
    save_tokens(run.token_file(4), record)
    main(["why", str(run.root), "4"])
    shown = capsys.readouterr().out
    assert "step 4 has no numbers in metrics.jsonl" in shown
    assert "diagnosis: not_finite: 1 of " in shown
    assert "in samples 5" in shown
    assert shown.splitlines()[-1].startswith("next: the update did not happen")


def test_what_to_do_does_not_ask_for_what_is_done(run: RunFolder) -> None:
    model = Model.make()
    for replay, asks in (("r3", False), ("off", True)):
        record = make_record(model, model, noise=0.02)
        save_tokens(run.token_file(3), dataclasses.replace(record, routing_replay=replay))
        found = explain(run, 3)
        assert found.findings[0].name == "noise"
        assert ("moe.routing_replay=r3" in found.next) == asks


def test_bad_input_is_one_line(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "which holds 0 to 3" in refused(capsys, ["why", str(run.root), "9"])
    assert "no config.yaml" in refused(capsys, ["why", str(tmp_path / "nowhere"), "0"])
    run.token_file(3).write_bytes(b"no")
    assert "not a safetensors file" in refused(capsys, ["why", str(run.root), "3"])
