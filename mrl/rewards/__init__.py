"""Holds the reward functions: one file each, found by name; `runner.py` calls them in a worker.

`f(prompts, completions, **columns) -> list[float | None]`, sync or async: one entry per sample of
one group; every column of the prompt row, repeated, and `completion_ids` come by keyword. `None`
means that the sample has no reward: it is masked, not scored 0. A reward may also be given by address
(`http://...`, `remote.py`) and as a model (`reward_model:FOLDER`).
"""

from mrl.rewards.base import RewardFunction
from mrl.rewards.resolve import resolve_reward, reward_names

# Not RewardRunner: it needs torch, and the worker process starts faster without.
__all__ = ["RewardFunction", "resolve_reward", "reward_names"]
