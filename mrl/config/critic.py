"""Configuration of the critic, for algorithms that need one (ppo, vapo)."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class CriticConfig(Branch):
    path: str | None = None
    """Folder of a saved critic, or of a Hugging Face model, whose output layer is then replaced by a
    value head. Null takes model.path. The critic's vocabulary must contain the policy's vocabulary."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic's own optimizer. All other settings, including warm-up and decay,
    are those of the policy's optimizer. With a decay, the critic's learning rate ends at `critic.lr
    x optimizer.min_lr / optimizer.lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of rollout steps at the start in which only the critic is trained; VAPO (arXiv
    2504.05118) uses 50."""
    head_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the initial weights of a new value head. With 0, the critic predicts 0
    everywhere at first."""
