"""Whole runs of `mrl train` whose samples are episodes of agents, with a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy
from tests.loop.test_refusals import refused

RECIPE = REPOSITORY / "launch/recipes/agent.yaml"
AGENT = REPOSITORY / "tests/endpoint/agent.py"
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.num_steps=2")
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")
COMMAND = ("reward=null", "rollout.endpoint=true", f"environment.command=[python, {AGENT}]")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "no endpoint": (COMMAND[:1] + COMMAND[2:], "set rollout.endpoint=true"),
    "nobody at it": (COMMAND[1:2], "rollout.endpoint is true, but nothing would use it"),
    "both forms": ((*COMMAND, "environment.name=guess_letter"), "name and command are given"),
    "arguments": ((*COMMAND, "environment.arguments={a: 1}"), "write those of a command after its"),
    "no program": (
        (*COMMAND[:2], "environment.command=no-such-agent"),
        "there is no program 'no-such-agent' in PATH",
    ),
    "no file": (
        (*COMMAND[:2], "environment.command=[python, no_agent.py]"),
        "environment.command: there is no file no_agent.py",
    ),
    "turns": (
        (*COMMAND, "algorithm.name=gspo_token", "algorithm.turn_rewards=true"),
        "has one reward for the whole episode",
    ),
    "more than a step": ((*COMMAND, "rollout.over_sampling=1.5"), "waits for all episodes"),
    "tree": (("rollout.endpoint_branches=tree",), "there are no agents"),
    "critic": ((*COMMAND, "rollout.endpoint_branches=tree", "algorithm.name=ppo"), "has a critic"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, reason = CASES[case]
    line = refused(capsys, ["check", str(TOY_RECIPE), *toy.overrides(tmp_path / "run", *changes)])
    assert reason in line


def test_the_plan_says_who_plays(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", str(RECIPE), *toy.overrides(tmp_path / "run")])
    said = " ".join(capsys.readouterr().out.split())
    assert "environment command 'python " in said
    assert "guess_agent.py 3 abcdefgh', up to 3 turns" in said


def train(
    toy: Toy, output: Path, ranks: int, *more: str, recipe: Path = RECIPE
) -> list[dict[str, Any]]:
    """Train -> the rows of metrics.jsonl."""
    launcher = [sys.executable, "-m", "mrl.launch", "--standalone", f"--nproc-per-node={ranks}"]
    keys = (f"model.path={toy.model}", f"output_dir={output}", *SMALL, *more)
    done = subprocess.run(
        [*launcher, "-m", "mrl", "train", str(recipe), *keys], cwd=REPOSITORY, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ()),
        (1, ("rollout.endpoint_branches=tree", "train.share_prefixes=auto")),
        (2, ()),
        (2, APART),
        (2, (*APART, "async.groups_in_flight=2", "async.max_staleness=1", "algorithm.importance=tis")),
    ],
    ids=["colocated", "tree", "two engines", "fixed", "free"],
)  # fmt: skip
def test_two_steps(toy: Toy, tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    rows = train(toy, tmp_path / "run", ranks, *more)
    assert len(rows) == 2
    for row in rows:
        assert row["episode/num_turns"] == 3
        assert row["reward/abstained"] == 0
        if "async.max_staleness=1" not in more:  # there the weights have changed since
            assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["routing/replay_coverage"] == 1.0
        assert row["routing/disagreement"] < 0.01
        file = tmp_path / f"run/rollouts/step_{row['step']:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == 16
        assert all(s["completion"].count("<|im_start|>user\n") == 2 for s in samples)
    assert any(row["grad_norm"] > 0 for row in rows)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_failures_of_a_few_agents_are_masked_and_of_many_end_the_run(
    toy: Toy, tmp_path: Path
) -> None:
    """Branches of agents that forget are trained beside them."""
    kinds = ["good"] * 19 + ["dies later"]
    data, output = tmp_path / "rows.jsonl", tmp_path / "run"
    row = {"prompt": [{"role": "user", "content": "x"}], "turns": 2}
    data.write_text("".join(json.dumps(row | {"kind": kind}) + "\n" for kind in kinds))
    keys = (
        f"environment.command=[python, {AGENT}]", f"data.path={data}", "data.shuffle=false",
        "rollout.prompts_per_step=20", "rollout.samples_per_prompt=2", "train.num_steps=1",
    )  # fmt: skip
    (metrics,) = train(toy, output, 1, *keys)
    assert metrics["reward/abstained"] == 2
    samples = (output / "rollouts/step_000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] is None for line in samples] == [False] * 38 + [True] * 2
    data.write_text("".join(json.dumps(row | {"kind": "dies"}) + "\n" for _ in range(20)))
    done = toy.run(tmp_path / "other", *keys, recipe=RECIPE)
    assert done.returncode == 70
    assert "agent.py' failed on 3 of 40 samples of this step" in done.stderr
    assert "on purpose" in done.stderr
