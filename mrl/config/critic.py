"""Configuration of the critic, for algorithms that need one (ppo, vapo)."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class CriticConfig(Branch):
    path: str | None = None
    """Folder of a Hugging Face model, whose output layer is replaced by a value head, or of a saved
    critic. Null takes model.path. The vocabulary of the model must contain the policy's vocabulary."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic's own optimizer. All other optimizer settings equal the policy's
    settings, including warm-up and decay. The decay ends at the same fraction of the learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Rollout steps at the start in which only the critic is trained (VAPO, arXiv 2504.05118: 50)."""
    head_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the initial weights of a new value head; with 0 all values are 0 at
    first."""
