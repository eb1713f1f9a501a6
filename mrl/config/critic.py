"""Configures the critic of algorithms that need one (ppo, vapo)."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class CriticConfig(Branch):
    path: str | None = None
    """Folder of a Hugging Face model whose output layer a value head takes the place of, or of a saved
    critic; by default model.path. Its vocabulary must hold the policy's."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of its own optimizer; the rest is as for the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Rollout steps at the start in which only the critic is trained (VAPO, arXiv 2504.05118: 50)."""
    head_std: float = Field(default=0.0, ge=0)
    """Standard deviation of a value head that starts anew; at 0 all values are 0 at first."""
