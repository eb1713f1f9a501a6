"""Reward functions, one file each, found by name; `runner.py` calls them in a worker process.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`, sync or async, and
returns one entry per sample of a group. Every column of the prompt's row, repeated for each sample, and
`completion_ids` are keyword arguments. `None` means that the sample has no reward: it is masked, not
scored 0. A reward may also be the address of a server (`http://...`, `remote.py`) or a model
(`reward_model:FOLDER`).
"""

from mrl.rewards.base import RewardFunction
from mrl.rewards.resolve import resolve_reward, reward_names

# RewardRunner is not here: it imports torch, and worker processes start faster without it.
__all__ = ["RewardFunction", "resolve_reward", "reward_names"]
