"""Configures the checks before an update that stop the run, or warn."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class GuardConfig(Branch):
    ratio_tolerance: float | None = Field(default=None, gt=0)
    """How far |log-prob - old log-prob| of a token may be from 0 before the first update of a start,
    where both are of the same weights. Null: 1e-4 in float32 and 0.1 in half precision. The run stops
    where more tokens are further off than `ratio_quantile` allows."""
    ratio_quantile: float = Field(default=0.999, gt=0, le=1)
    """Share of the loss tokens of all ranks that must be within `ratio_tolerance`. It is below 1
    because single tokens may differ on a GPU, where kernels add in no fixed order and a router's choice
    is nearly a tie. With fewer than 1,000 tokens 0.999 means all of them; 1 judges the token that
    is furthest off."""
    clip_budget: float = Field(default=0.1, gt=0)
    """Share of the clip range of a sequence ratio (GSPO: 3e-4) that the trainer's own noise may take
    before the first update; above it a warning says that sequences clip before the policy has learned
    anything."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """The run ends with exit code 76 when the log-probs, loss or gradients of this many optimizer steps
    in a row, of the policy, the critic or SFT, are NaN or infinite. Each such step is skipped: weights,
    optimizer state and learning-rate schedule stay as they are, a warning names the samples, and
    `train/nonfinite_steps` counts it. 1 ends the run at the first."""
    min_ess: float | None = Field(default=None, gt=0, le=1)
    """Least effective sample size of the importance weights p/q of an optimizer step, as a share of
    its loss tokens (`guard/ess`): p is what the trainer gives a token in this step, q what the engine
    sampled it with. Where a step has less, a few tokens carry nearly all of the weight; it is skipped,
    as one that is not finite is, with a warning, and `train/low_ess_steps` counts it. Null judges
    nothing."""
    max_low_ess_steps: int = Field(default=10, ge=1)
    """The run ends with exit code 70 where this many optimizer steps in a row are below `min_ess`. 1
    ends it at the first. Give more than the updates of `async.max_staleness` rollouts: after so many
    skipped steps all tokens come from the present weights, and a gap that is left is not staleness."""
