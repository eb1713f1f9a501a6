"""Faults in an engine's adapter, planted where digests cannot see them: canaries and `mrl why` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import planted_faults
from benchmarks.planted_engine import Fault, StaleExpert, WrongAdapter
from benchmarks.planted_faults import HEALTHY_FIRST
from mrl.cli import main
from mrl.errors import RunFailed
from mrl.run.folder import RunFolder
from tests.loop.stepped import part_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.release, pytest.mark.timeout(300)]

LAYER, EXPERT = 2, 3
FAULTS: dict[str, Fault] = {
    "A and B swapped": WrongAdapter("A and B swapped"),
    "wrong alpha": WrongAdapter("wrong alpha"),
    "a stale adapter": StaleExpert(0, None, version=1),
    "another tenant's": WrongAdapter("another tenant's"),
    "one expert's A missing": WrongAdapter("A missing", LAYER, EXPERT),
}
STEPS = {name: HEALTHY_FIRST + 2 * number for number, name in enumerate(FAULTS)}
"""The step that has each fault; a healthy one follows."""
NAMED = dict.fromkeys(FAULTS, "stale_weights") | {"one expert's A missing": "stale_expert"}
LORA = ("lora.rank=4", "lora.alpha=8", "lora.experts=per_expert", "rollout.canary_prompts=4")


def planted(scratch: str) -> dict[int, str]:
    """Run every fault on this rank -> what the canaries said, by step. They let the run go on here."""
    said: dict[int, str] = {}
    with planted_faults.started(Path(scratch), LORA) as run:
        part = part_of(run.collector)
        check = part.check_sync

        def noted() -> None:
            try:
                check()
            except RunFailed as failed:
                said[run.step] = str(failed)

        part.check_sync = noted
        planted_faults.plant(run, list(FAULTS.values()))
    return said


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Path]) -> tuple[RunFolder, dict[int, str]]:
    """The run folder, and what the canaries said in each step."""

    def make(scratch: Path) -> None:
        run_ranks(1, planted, str(scratch), folder=scratch / "out")

    scratch = made_once("planted_adapters", make)
    return RunFolder(scratch / "run"), torch.load(scratch / "out/0.pt", weights_only=True)


@pytest.mark.parametrize("name", FAULTS)
def test_canaries_end_the_run_before_a_token_is_generated(name: str, ran: Any) -> None:
    step = STEPS[name]
    assert ran[1][step].startswith(
        f"weight sync to version {step}: engine and trainer disagree on the canary prompts: mean "
    )


@pytest.mark.parametrize("name", FAULTS)
def test_why_names_what_the_engine_held(
    name: str, ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(ran[0].root), str(STEPS[name])])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("diagnosis: "))
    assert line.startswith(f"diagnosis: {NAMED[name]}: ")
    if NAMED[name] == "stale_expert":
        assert f"expert {EXPERT} of layer {LAYER} is not the same on both sides" in line


def test_healthy_steps_are_blamed_on_nothing(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    steps = set(range(HEALTHY_FIRST + 2 * len(FAULTS)))
    assert ran[1].keys() == set(STEPS.values())
    for step in steps - ran[1].keys():
        main(["why", str(ran[0].root), str(step)])
        assert "diagnosis: nothing_wrong: " in capsys.readouterr().out
