"""Faults in the engine of a real run are named by `mrl why`; healthy steps are blamed on nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core import parallel_state

from benchmarks import planted_faults
from benchmarks.planted_faults import EXPERT, HEALTHY_FIRST, LAYER, PLANTED, Step
from mrl.cli import main
from mrl.run.folder import RunFolder
from tests.ranks import run_ranks

FEWER = ("rollout.prompts_per_step=4",)
"""Half as many samples a step as in `benchmarks.planted_faults` are enough to name each fault."""
MOVES = {
    "stale expert": "mismatch/logprob_abs_mean",
    "shifted routes": "routing/disagreement",
    "other temperature": "mismatch/k3",
    "stale model": "mismatch/logprob_abs_mean",
}
"""A metric of the dashboard that each of them moves."""


def planted(scratch: str) -> int:
    with planted_faults.started(Path(scratch), FEWER) as run:
        num_steps = len(planted_faults.plant(run, list(PLANTED.values())))
    assert not parallel_state.model_parallel_is_initialized()  # another part can start
    return num_steps


@pytest.fixture(scope="module")
def folder(made_once: Callable[..., Path]) -> RunFolder:
    """Three healthy steps, then each fault and a healthy step behind it, of one engine."""

    def make(scratch: Path) -> None:
        run_ranks(1, planted, str(scratch), folder=scratch / "out")

    return RunFolder(made_once("planted", make) / "run")


FAULTY = {name: HEALTHY_FIRST + 2 * i for i, name in enumerate(PLANTED)}
"""Steps."""


def steps(folder: RunFolder) -> dict[int, Step]:
    by_number = {step: PLANTED[name] for name, step in FAULTY.items()}
    rows = {row["step"]: row for row in folder.read_metrics()}
    return {n: Step(by_number.get(n), n, row) for n, row in rows.items()}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str, folder: RunFolder) -> None:
    step = steps(folder)[FAULTY[name]]
    found = step.why(folder)
    assert planted_faults.is_named(step.fault, found), found.findings
    spikes = {number.key for number in found.numbers if number.is_spike}
    assert MOVES[name] in spikes


def test_healthy_steps_are_blamed_on_nothing(folder: RunFolder) -> None:
    healthy = [step for step in steps(folder).values() if step.fault is None]
    assert len(healthy) == HEALTHY_FIRST + len(PLANTED)
    for step in healthy:
        assert step.why(folder).findings[0].name == "nothing_wrong"
        assert step.metrics["mismatch/logprob_abs_mean"] < 1e-5


def test_the_dashboard_tells_the_faults_apart(folder: RunFolder) -> None:
    """The stale expert and the other temperature leave the captured routes as they were."""
    by_step = steps(folder)
    rerouted = {n: by_step[s].metrics["routing/disagreement"] for n, s in FAULTY.items()}
    assert rerouted["shifted routes"] > 0.2
    assert rerouted["other temperature"] < 1e-3
    assert rerouted["stale expert"] < 0.1


def test_why_prints_where_and_what_next(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(folder.root), str(FAULTY["stale expert"])])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[-2].startswith(f"diagnosis: stale_expert: expert {EXPERT} of layer {LAYER} ")
    assert "rollout.canary_prompts" in lines[-1]
    row = next(line for line in lines if line.startswith("mismatch/logprob_abs_mean"))
    assert row.rstrip().endswith("spike")
    layers = lines[lines.index("Layers, by the expert whose tokens differ most") + 2 :]
    assert layers[0].split()[0] == str(LAYER)
    assert layers[0].split()[4] == str(EXPERT)

    main(["why", str(folder.root), str(FAULTY["shifted routes"]), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["where"]["shift"] == 1
    worst = found["samples"][0]
    sample = folder.read_rollouts(FAULTY["shifted routes"])[worst["sample"]]
    assert worst["completion"] == sample["completion"]
    token = found["tokens"][0]
    text = folder.read_rollouts(FAULTY["shifted routes"])[token["sample"]]
    assert token["piece"] in text["completion"] + "<|im_end|>"
