"""Which columns a reward needs, as `mrl check` sees it."""

from __future__ import annotations

import asyncio

from mrl.preflight.reward_columns import needed_columns
from mrl.rewards.resolve import resolve_reward

REWARDS = """
def ours(prompts, completions, *, answer, note="", **columns): ...
def custom(cfg, item, **keywords): return float(item.response == item.label)
def score(source, response, truth, extra): return float(response == truth)
"""


def test_needed_columns(tmp_path) -> None:
    file = tmp_path / "rewards_of_mine.py"
    file.write_text(REWARDS)
    assert needed_columns(f"{file}:ours") == ["answer"]
    for form, name in (("slime", "custom"), ("verl", "score")):  # other names than the framework's
        assert needed_columns(f"{form}:{file}:{name}") == []
        given = {"label": ["a"], "ground_truth": ["a"], "answer": ["a"]}
        reward = resolve_reward(f"{form}:{file}:{name}")
        assert asyncio.run(reward(["p"], ["a"], **given)) == [1.0]
