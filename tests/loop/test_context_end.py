"""Everything that a run asks of an engine near the end of the context, up to its last token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.loop.conftest import REPOSITORY, Toy

MULTI_TURN = REPOSITORY / "launch/recipes/multi_turn.yaml"
CHATTY = REPOSITORY / "tests/environments/chatty.py"
CONTEXT_LEN, PROMPT, TURN_LEN = 64, "abc", 2


def played(letters: int, turns: int) -> tuple[int, str]:
    """Return how many tokens a conversation has at its end, less what the environment said last, and
    why it ended. A text is one token a character."""
    size, said, reason = len(PROMPT), letters, ""
    while not reason:
        size += min(TURN_LEN, CONTEXT_LEN - size)
        turns -= 1
        if not turns:
            reason = "stop"
        elif size + said >= CONTEXT_LEN:
            reason = "length"
        else:
            size, said = size + said, 1
    return size, reason


@pytest.mark.release
@pytest.mark.timeout(600)
def test_conversations_end_at_every_length_of_the_last_tokens(toy: Toy, tmp_path: Path) -> None:
    """The second turn begins with every number of tokens from 53 to 63, and ends with up to 64."""
    first = len(PROMPT) + TURN_LEN
    rows = [(begin - first, turns) for begin in range(53, 64) for turns in (2, 99)]
    data, output = tmp_path / "chats.jsonl", tmp_path / "run"
    lines = [{"prompt": PROMPT, "letters": letters, "turns": turns} for letters, turns in rows]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = toy.run(
        output, f"environment.name={CHATTY}", "environment.arguments={}", "environment.max_turns=99",
        f"data.path={data}", "data.shuffle=false", "train.num_steps=2",
        f"rollout.prompts_per_step={len(rows)}", "rollout.samples_per_prompt=2",
        f"rollout.context_len={CONTEXT_LEN}", f"rollout.max_response_len={TURN_LEN}",
        f"rollout.min_response_len={TURN_LEN}", "train.micro_batch_tokens=512",
        recipe=MULTI_TURN,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting another one" not in done.stdout + done.stderr
    ends = {played(*row)[0] for row in rows if played(*row)[1] == "stop"}
    assert ends == set(range(55, 65))
    for step in range(2):
        text = (output / f"rollouts/step_{step:06d}.jsonl").read_text()
        samples = [json.loads(line) for line in text.splitlines()]
        assert len(samples) == 2 * len(rows)
        for number, sample in enumerate(samples):
            size, reason = played(*rows[number // 2])
            tokens = re.sub(r"<\|\w+\|>", "?", sample["completion"])  # a character each
            got = (len(PROMPT) + len(tokens), sample["finish_reason"])
            assert got == (size, reason), rows[number // 2]
            assert sample["reward"] is not None
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all(row["rollout/engine_restarts"] == 0 for row in metrics)


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [0, 1, 2])
def test_answers_of_one_token_end_the_context(toy: Toy, tmp_path: Path, more: int) -> None:
    """Row 11 of a second look: a context of 18 tokens for prompts of 16 and answers of one."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "abcdefghijklmnop", "answer": "a"}\n' * 8)
    done = toy.run(
        tmp_path / "run", f"data.path={data}", f"rollout.context_len={17 + more}",
        "rollout.max_response_len=1", "train.num_steps=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
