"""Training on conversations through the command line, and what is refused before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli import main
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy
from tests.loop.test_refusals import refused

RECIPE = REPOSITORY / "launch/recipes/multi_turn.yaml"


@pytest.mark.timeout(400)
def test_a_step_of_conversations(toy: Toy, tmp_path: Path) -> None:
    """Some turns end, some are cut short; the loss has holes, the routes and log-probs have none."""
    output = tmp_path / "run"
    data = tmp_path / "chats.jsonl"
    chat = {"prompt": [{"role": "user", "content": "guess"}]}
    data.write_text((json.dumps(chat) + "\n") * 8)
    more = ("train.num_steps=1", "environment.num_workers=2", f"data.path={data}")
    done = toy.run(output, *more, recipe=RECIPE)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["episode/num_turns"] == 3
        assert row["episode/tool_tokens"] > 40  # two times the template's and the letters
        assert row["response_len/mean"] <= 36
        assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["routing/replay_coverage"] == 1.0
        assert row["routing/disagreement"] < 0.01
        assert row["ratio/mean"] == 1.0
        assert row["reward/abstained"] == 0
        file = output / f"rollouts/step_{row['step']:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == 16
        assert all(0 <= s["reward"] <= 1 for s in samples)
        assert all(s["completion"].count("<|im_start|>user\n") == 2 for s in samples)
        # The letter is one for all samples of a prompt.
        told = {(s["group_id"], s["completion"].split("<|im_start|>user\n")[1][0]) for s in samples}
        assert len(told) == 4
    assert any(row["grad_norm"] > 0 for row in rows)


NO_REWARD = ("reward=null",)
GUESS = (*NO_REWARD, "environment.name=guess_letter")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "neither": (NO_REWARD, "reward and environment: neither is given, expected exactly one"),
    "both": (("environment.name=guess_letter",), "reward and environment: both are given"),
    "unknown": ((*NO_REWARD, "environment.name=gues_letter"), "did you mean 'guess_letter'?"),
    "no class": (
        (*NO_REWARD, "environment.name=mrl.system.plugins:Kinds"),
        "no class 'Kinds' in it",
    ),
    "turns": ((*GUESS, "environment.max_turns=0"), "environment.max_turns: Input should be gr"),
    "unknown key": ((*GUESS, "environment.turns=3"), "unknown key 'environment.turns'"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, reason = CASES[case]
    line = refused(capsys, ["check", str(TOY_RECIPE), *toy.overrides(tmp_path / "run", *changes)])
    assert reason in line


def test_rows_are_checked_and_the_plan_says_what_is_played(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "seed": 1}\n' * 6)
    overrides = toy.overrides(tmp_path / "run", *GUESS)
    line = refused(capsys, ["check", str(TOY_RECIPE), *overrides, f"data.path={data}"])
    assert (
        f"{data}:1: column 'seed' is the name of an argument of the environment's reset()" in line
    )
    main(["check", str(TOY_RECIPE), *overrides])
    assert "environment guess_letter, up to 8 turns" in " ".join(capsys.readouterr().out.split())
