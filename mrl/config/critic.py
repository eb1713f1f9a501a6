"""Configures the critic of algorithms that need one (ppo, vapo)."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class CriticConfig(Branch):
    path: str | None = None
    """Folder of a Hugging Face model, whose output layer is replaced by a value head, or of a saved
    critic. Null takes model.path. Its vocabulary must contain the policy's."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic's own optimizer, whose other settings are the policy's: also warm-up
    and decay, which ends at the same share of this one."""
    warmup_steps: int = Field(default=0, ge=0)
    """Rollout steps at the start in which only the critic is trained (VAPO, arXiv 2504.05118: 50)."""
    head_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the initial weights of a new value head; at 0 all values are 0 at first."""
