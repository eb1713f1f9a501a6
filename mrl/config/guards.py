"""Configuration of the checks on the log-probs, losses, gradients and importance weights of each
optimizer step.

Depending on the check, a failure only warns, ends the run, or skips the optimizer step; too many
consecutive skipped steps end the run.
"""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class GuardConfig(Branch):
    ratio_tolerance: float | None = Field(default=None, gt=0)
    """Largest allowed difference between a token's log-prob and its old log-prob in the first
    update after a start, when both come from the same weights. Null takes 1e-4 in float32 and 0.1
    in half precision. The run stops if more tokens exceed this tolerance than `ratio_quantile`
    allows."""
    ratio_quantile: float = Field(default=0.999, gt=0, le=1)
    """Share of the loss tokens of all ranks that must be within `ratio_tolerance`. The default is
    below 1 because single tokens may differ on a GPU, where kernels sum in no fixed order and a
    router's choice may be nearly a tie. With 1, all loss tokens must be within the tolerance; with
    0.999, this is also the case if there are fewer than 1,000 loss tokens."""
    clip_budget: float = Field(default=0.1, gt=0)
    """Limit on the trainer's numerical noise before the first update, as a share of the clip range
    of a sequence's probability ratio (3e-4 for GSPO). If the noise is larger, a warning says that
    sequences will be clipped before the policy has learned anything."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """The run ends with exit code 76 if the log-probs, loss or gradients of the policy, the critic
    or SFT are NaN or infinite in this many consecutive optimizer steps. Each such step is skipped:
    weights, optimizer state and learning-rate schedule do not change, a warning names the samples,
    and the metric `train/nonfinite_steps` counts the step. 1 ends the run at the first such step."""
    min_ess: float | None = Field(default=None, gt=0, le=1)
    """Minimum effective sample size of the importance weights `p / q` of an optimizer step, as a
    share of its loss tokens (`guard/ess`). `p` is the trainer's probability of a token in this
    step, and `q` is the engine's probability when it sampled the token. A small value means that a
    few tokens have nearly all of the weight. A step below the minimum is skipped like a non-finite
    step, with a warning, and the metric `train/low_ess_steps` counts it. Null turns the check off."""
    max_low_ess_steps: int = Field(default=10, ge=1)
    """The run ends with exit code 70 if this many consecutive optimizer steps have an effective
    sample size below `min_ess`; 1 ends the run at the first such step. Each such step is skipped, so
    the weights do not change. Once all optimizer steps of `async.max_staleness` consecutive rollouts
    have been skipped, all tokens come from the current weights, and staleness can no longer explain a
    small effective sample size. So choose more than `async.max_staleness` times the number of
    optimizer steps per rollout."""
