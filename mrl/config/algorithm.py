"""What the policy is trained with: loss, advantages, corrections, KL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class AlgorithmConfig(Branch):
    name: str = "gspo"
    """A file of mrl/algorithms/, or `package.module` from outside."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low; by default the algorithm's published value."""
    clip_high: float | None = Field(default=None, gt=0)
    """Ratio is clipped above at 1 + clip_high; by default the algorithm's published value."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of one sample (Schulman 2020); k3 is never negative and has little variance."""
    reference_path: str | None = None
    """Folder of the frozen reference, of the model's architecture and sizes; by default model.path, as
    it was before any warm start or resume."""
    importance: Literal["none", "tis", "mis"] = "none"
    """Weight exp(old - rollout) that corrects for what the tokens were sampled from: another engine,
    and older weights where `rollout.unfinished` is `resume`. `tis`: clamped into a range; `mis`: 0
    outside of it."""
    importance_level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a sequence: of the mean of old - rollout over its loss tokens."""
    importance_low: float | None = Field(default=None, ge=0)
    """Lower end of that range; by default 0 for `tis`, for `mis` 0.5 a token and 0.999 a sequence."""
    importance_high: float | None = Field(default=None, gt=0)
    """Upper end; by default 2 for `tis`, for `mis` 5 a token and 1.002 a sequence."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the group's standard deviation: a nearly equal group must not explode."""
