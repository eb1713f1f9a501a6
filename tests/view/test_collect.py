import base64
import dataclasses
import itertools
import json
import math

import pytest
import torch

from mrl.cli import main
from mrl.commands.view import read_steps
from mrl.diagnosis.why import explain
from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.view.collect import choose_steps, collect
from mrl.view.samples import choose_samples, pack_step
from mrl.view.texts import ends_of
from parallel.checkpoint.manifest import folder_name, point_to, set_aside, write_manifest
from tests.view.invented import EXPERTS, LAYERS, PROMPT, TOKENS, TOPK, record, rollout, write_run

PLENTY = 10**9


def test_a_step_is_packed_as_it_was_recorded():
    source = record(3, num_samples=4)
    packed = pack_step(source, [rollout(i) for i in range(4)], 16, PLENTY)
    assert [packed[k] for k in ("step", "num_experts", "topk", "num_samples")] == [
        3,
        EXPERTS,
        TOPK,
        4,
    ]
    sample = next(s for s in packed["samples"] if s["id"] == 1)
    assert sample["mask"] == [[0, PROMPT], [1, TOKENS - PROMPT]]
    assert sample["versions"] == [[-1, PROMPT], [3, TOKENS - PROMPT]]
    assert sample["d"][PROMPT:9] == [0.2, 0.2, 0.2]
    assert (sample["max_d"], sample["num_extreme"]) == (1.5, 1)
    assert (sample["reward"], sample["top_advantage"]) == (0.5, 0.5)
    assert sample["rollout"] == pytest.approx(source.rollout_logprobs[24:48].tolist(), abs=1e-5)
    # Layer 1 has the same experts in another order; only layer 2 of token 8 is another choice.
    assert sample["differ_at"] == [8 * LAYERS + 1]
    assert list(base64.b64decode(sample["native"])) == [6, 7]
    assert sample["margins"] == [0.25]
    routes = torch.tensor(list(base64.b64decode(sample["routes"]))).view(TOKENS, LAYERS, TOPK)
    assert routes[:-1].equal(source.expert_ids[TOKENS : 2 * TOKENS - 1].long())
    assert (routes[-1] == 255).all()
    assert [sum(layer) for layer in packed["load"]] == [4 * (TOKENS - 1) * TOPK] * LAYERS


def test_a_tiny_difference_keeps_its_digits():
    source = record(0, num_samples=1)
    old = source.rollout_logprobs.clone()
    old[PROMPT] += 3e-7
    packed = pack_step(dataclasses.replace(source, old_logprobs=old), [], 1, PLENTY)
    d = float(old[PROMPT].double() - source.rollout_logprobs[PROMPT].double())
    assert d > 0
    assert packed["samples"][0]["d"][PROMPT] == pytest.approx(d, rel=1e-3)


def test_many_experts_take_two_bytes():
    source = dataclasses.replace(record(0, num_samples=1), num_experts=300)
    ids = source.expert_ids.clone()
    ids[0, 0, 0] = 299
    packed = pack_step(dataclasses.replace(source, expert_ids=ids), [], 1, PLENTY)
    raw = base64.b64decode(packed["samples"][0]["routes"])
    assert int.from_bytes(raw[:2], "little") == 299
    assert raw[-2:] == b"\xff\xff"


def test_not_finite_becomes_null():
    source = record(0, num_samples=1)
    old = source.old_logprobs.clone()
    old[PROMPT] = math.nan
    sample = pack_step(dataclasses.replace(source, old_logprobs=old), [], 1, PLENTY)["samples"][0]
    assert sample["d"][PROMPT] is None
    assert sample["max_d"] == pytest.approx(0.1)
    json.dumps(sample, allow_nan=False)


def test_what_does_not_fit_is_left_out_routes_first():
    source = record(0, num_samples=4)
    whole = pack_step(source, [], 4, PLENTY)
    less = pack_step(source, [], 4, whole["num_bytes"] - 1)
    kept = [s["id"] for s in whole["samples"]]
    assert [s["id"] for s in less["samples"]] == kept
    assert [bool(s.get("routes_left_out")) for s in less["samples"]] == [False] * 3 + [True]
    assert pack_step(source, [], 4, 0)["samples"] == []
    assert len(pack_step(source, [], 2, PLENTY)["samples"]) == 2


def test_samples_are_chosen_in_turn_from_four_rankings():
    rows = [{"max_d": d, "top_advantage": a, "reward": r} for d, a, r in
            [(0.1, 0, 0.5), (9, 0, 0.5), (0.2, -5, 0.5), (0.3, 1, 1.0), (0.4, 2, -1.0),
             (None, None, None)]]  # fmt: skip
    assert choose_samples(rows, 4) == [1, 2, 3, 4]
    assert choose_samples(rows, 99)[-1] == 5
    assert sorted(choose_samples(rows, 99)) == list(range(6))
    assert choose_samples([], 3) == []


def test_steps_are_chosen_last_first_worst_then_spread():
    rows = [
        {"step": i, "mismatch/k3": 9.0 if i == 37 else 0.1, "grad_norm": None} for i in range(90)
    ]
    recorded = list(range(0, 80))
    assert choose_steps(recorded, rows, 3) == [0, 37, 79]
    chosen = choose_steps(recorded, rows, 12)
    assert len(chosen) == 12
    assert {0, 37, 79} <= set(chosen)
    assert max(b - a for a, b in itertools.pairwise(chosen)) < 30
    assert choose_steps([5], [], 12) == [5]
    assert choose_steps([], rows, 12) == []


def test_the_page_says_what_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", num_steps=5)
    data = collect(run, range(1, 3), 2)
    assert [step["step"] for step in data["steps"]] == [1, 2]
    notes = " ".join(data["notes"])
    assert "2 of 5 steps" in notes
    assert "4 of the 8 samples" in notes
    assert "metrics.jsonl that could not be read: 1" in notes
    assert data["steps"][0]["findings"][0]["text"]
    assert data["findings"][-1]["step"] == 2
    with pytest.raises(InputError, match="from step 0 to 4"):
        collect(run, range(7, 9), 2)


def test_damaged_files_cost_only_themselves(tmp_path):
    run = write_run(tmp_path / "run", num_steps=3)
    (run / "tokens/step_000001.safetensors").write_bytes(b"cut")
    (run / "rollouts/step_000002.jsonl").write_text('{"reward": 1')
    (run / "diagnosis/step_000001.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    data = collect(run, None, 4)
    assert [step["step"] for step in data["steps"]] == [0, 2]
    assert data["steps"][1]["samples"][0]["reward"] is None
    notes = " ".join(data["notes"])
    for damaged in ("Step 1: ", "diagnosis/step_000001.json", "config.yaml"):
        assert damaged in notes


def test_a_run_without_anything_but_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n')
    data = collect(tmp_path, None, 4)
    assert data["steps"] == data["findings"] == data["diagnosis"] == []
    assert data["state"].startswith("1 steps")


def write_checkpoint(run, step):
    """The folder, with a manifest of the shape that `Checkpoints` writes."""
    folder = run / "checkpoints" / folder_name(step)
    folder.mkdir(parents=True)
    versions = {"mrl": "0.0.1", "torch": f"9.{step}", "megatron-core": "0.16.1"}
    content = {"step": step, "device": "cpu", "versions": versions, "trainer": {}}
    write_manifest(folder, content, {})
    point_to(folder.parent, step)
    return folder


def test_versions_are_those_of_the_newest_whole_checkpoint(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    set_aside(write_checkpoint(run, 30))
    write_checkpoint(run, 10)
    newest = write_checkpoint(run, 20)
    shown = dict(collect(run, None, 1)["versions"])
    assert shown["torch of the last checkpoint"] == "9.20"
    assert shown["mrl of the last checkpoint"] == "0.0.1"
    assert shown["megatron-core of the last checkpoint"] == "0.16.1"
    (newest / "manifest.json").write_text("{")
    data = collect(run, None, 1)
    assert dict(data["versions"])["torch of the last checkpoint"] == "9.10"
    assert "Versions of iter_0000020 are left out" in " ".join(data["notes"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{}/nowhere"], "is not a folder"),
        (["{}"], "neither metrics.jsonl nor config.yaml"),
        (["{}/run", "--steps", "5:2"], "--steps 5:2: expected A:B"),
        (["{}/run", "--steps", "x"], "--steps x: expected A:B"),
        (["{}/run", "--max-samples", "-1"], "--max-samples is -1"),
        (["{}/run", "--output", "{}/no/such/view.html"], "choose another file"),
        (["{}/run", "--output", "."], "--output .: it is a folder; give a file, such as view.html"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, capsys):
    write_run(tmp_path / "run", num_steps=1)
    with pytest.raises(SystemExit) as stopped:
        main(["view", *(word.format(tmp_path) for word in words)])
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1


def test_steps_of_the_command_line():
    assert read_steps("3:5") == range(3, 5)
    assert read_steps("7") == range(7, 8)
    assert read_steps(":4") == range(4)
    assert 10**6 in read_steps("2:")


def test_the_page_finds_what_mrl_why_finds(tmp_path):
    """Also what is told by the other steps alone: all tokens are off, and by far more than usual."""
    run = write_run(tmp_path)
    for step in collect(run, None, 4)["steps"]:
        found = explain(RunFolder(run), step["step"]).findings
        assert [finding["text"] for finding in step["findings"]] == [f.text for f in found]
        assert step["findings"][0]["name"] == "stale_weights"


def test_the_time_is_that_of_the_run_and_not_of_the_copy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time/timestamp": 1000000000.0}\n')
    assert "2001-09-0" in collect(tmp_path, None, 4)["state"]


def test_the_list_has_the_end_of_a_prompt_of_messages():
    row = {"prompt": [{"role": "user", "content": "x" * 99 + " why?"}], "completion": "so\nit is"}
    assert ends_of(row["prompt"], row["completion"]) == f"...{'x' * 55} why? \u2192 so it is"
    assert ends_of(None, None) is None
