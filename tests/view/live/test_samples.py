"""The lists of samples, and single samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError
from mrl.view.live import samples as module
from mrl.view.live.samples import Rollouts
from tests.view.invented import HOSTILE, rollout


def write(run: Path, step: int, lines: list[Any], end: str = "") -> None:
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    (run / f"rollouts/step_{step:06d}.jsonl").write_text(text + end)


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    plain = {"prompt": "x", "completion": "y", "reward": 1}
    write(tmp_path, 4, [rollout(0), "{", {"prompt": 1}, rollout(3), plain], end='{"prompt": "cut')
    rollouts = Rollouts(tmp_path)
    assert rollouts.poll(5)
    found = rollouts.list(4)
    assert [sample["number"] for sample in found["samples"]] == [0, 3, 4]
    assert found["notes"] == ["Lines that are damaged, cut short or too long: 3."]
    assert rollouts.sample(4, 3)["turns"][-1]["parts"] == [["text", "", HOSTILE[0]]]
    for step, number in ((4, 1), (4, 99), (9, 0)):
        with pytest.raises(InputError):
            rollouts.sample(step, number)


def test_large_samples_lose_their_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 3_000_000)
    texts = ["a" * n + "z" for n in (2_000_000, 9)]
    write(tmp_path, 0, [{"prompt": "p", "completion": text, "reward": 0} for text in texts])
    with (tmp_path / "rollouts/step_000000.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "p", "completion": "b" * 4_000_000, "reward": 0}) + "\n")
        file.write(json.dumps({"prompt": "p", "completion": "last", "reward": 0}) + "\n")
    rollouts = Rollouts(tmp_path)
    assert [s["number"] for s in rollouts.list(0)["samples"]] == [0, 1, 3]
    (_, _, text), (_, _, raw) = (
        rollouts.sample(0, 0, is_raw=is_raw)["turns"][-1]["parts"][0] for is_raw in (False, True)
    )
    assert len(text) < 21_000
    assert "characters ...]" in text
    assert 900_000 < len(raw) < 1_100_000
    assert raw.endswith("z")
    assert rollouts.sample(0, 3)["turns"][-1]["parts"] == [["text", "", "last"]]


def test_steps_come_and_go(tmp_path: Path) -> None:
    rollouts = Rollouts(tmp_path)
    assert not rollouts.poll(0)
    for step in range(3):
        write(tmp_path, step, [rollout(0)])
        assert rollouts.poll(step)
        assert not rollouts.poll(step + 1)
    assert rollouts.around(1) == {"first": 0, "newest": 2, "count": 3, "before": 0, "after": 2}
    for step in (1, 2):  # a restart repeats them
        (tmp_path / f"rollouts/step_{step:06d}.jsonl").unlink()
    assert rollouts.poll(1)
    assert rollouts.around()["newest"] == 0
