"""What the policy is trained with: loss, advantages, corrections, KL, critic.

None stands for the algorithm's published value. `mrl.algorithms.check_algorithm` refuses what an
algorithm does not read and what contradicts itself.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class MaskConfig(Branch):
    """Says which tokens or sequences leave the policy loss; they still count in its denominator."""

    name: Literal["token_mask", "sequence_mask", "opsm", "dppo"]
    """`token_mask` (IcePop, arXiv 2510.18855): exp(old - rollout) of the token outside [low, high].
    `sequence_mask`: its geometric mean over the sequence outside [low, high]. `opsm` (DeepSeek-V3.2,
    arXiv 2512.02556): A < 0 and the mean of rollout - logp over the sequence above high. `dppo` (arXiv
    2602.04879, binary TV): p - p_rollout above high where A > 0, below -low where A < 0."""
    low: float | None = Field(default=None, ge=0)
    """The default is 0.5 for `token_mask`, 0.999 for `sequence_mask`, 0.15 for `dppo`; `opsm` has
    none."""
    high: float | None = Field(default=None, gt=0)
    """The default is 5 for `token_mask`, 1.002 for `sequence_mask`, 0.15 for `dppo`; `opsm` has no
    published value and must be given one (slime's is 1e-4, TRL suggests 0.5)."""


class AlgorithmConfig(Branch):
    name: str = "gspo"
    """A file of mrl/algorithms/, or your own: `path/file.py` or `package.module`, with `:NAME` where
    the three functions are those of an object in it."""
    aggregation: (
        Literal[
            "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
        ]
        | None
    ) = None
    """How token losses become one number, over the whole optimizer step: mean over all tokens; or mean
    over samples of their tokens' mean, sum, or sum / `rollout.max_response_len`."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = Field(default=None, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where A < 0 the ratio counts as at most this (arXiv 1912.09729); usual: 3. None: no bound."""
    tau_positive: float | None = Field(default=None, gt=0)
    """SAPO's temperature where A > 0."""
    tau_negative: float | None = Field(default=None, gt=0)
    """SAPO's temperature where A <= 0."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference); 0 keeps no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of each token (PPO, REINFORCE++)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"] = "k3"
    """Estimates the KL of a token from one sample (Schulman 2020); k3 is never negative and has little
    variance. `k1+`, `k3+`: their value with the gradient of k2, which is that of the KL.
    `k3_unbiased` (DeepSeek-V3.2): k3 times the ratio policy / old. The last three are for the loss
    only."""
    kl_target: float | None = Field(default=None, gt=0)
    """Adapts kl_coef after each step until the measured KL a token is this (arXiv 1909.08593, section
    2.2); kl_coef is the first value."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples over which an adaptive kl_coef changes by at most a fifth."""
    reference_path: str | None = None
    """Folder of the frozen reference, of the model's architecture and sizes; by default model.path, as
    it was before SFT or a resume."""

    importance: Literal["none", "tis", "mis"] = "none"
    """Weight exp(old - rollout) that corrects for what the tokens were sampled from: another engine,
    and older weights where `rollout.partial_rollouts` is `resume`. `tis`: clamped into a range; `mis`:
    0 outside of it. decoupled_ppo and a3po weigh without it, too: see their files."""
    importance_level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a sequence: of the mean of old - rollout over its loss tokens."""
    importance_low: float | None = Field(default=None, ge=0)
    """Lower end of that range; by default 0 for `tis`, for `mis` 0.5 a token and 0.999 a sequence."""
    importance_high: float | None = Field(default=None, gt=0)
    """Upper end; by default 2 for `tis`, for `mis` 5 a token and 1.002 a sequence."""
    masks: tuple[MaskConfig, ...] = ()
    """Any number of them beside `importance`, each name once; `mask/NAME` is the share of loss tokens
    that each takes out alone."""

    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation that rewards are divided by."""
    min_group_std: float = Field(default=1e-3, ge=0)
    """That standard deviation counts as at least this: a nearly equal group must not explode."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are replaced by further prompts (DAPO, arXiv 2503.14476)."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """The last tokens before `rollout.max_response_len` over which a reward falls by up to 1 (DAPO,
    eq. 13); 0 turns it off."""
    overlong_filter: bool = False
    """Answers that were cut off leave the loss (DAPO, section 3.4); their rewards still count in the
    advantages of their group."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a token, with a critic."""
    lam: float | Literal["adaptive"] | None = None
    """GAE's lambda for the policy; `adaptive`: 1 - 1 / (lam_alpha * tokens), as in VAPO."""
    lam_alpha: float = Field(default=0.05, gt=0)
    """Alpha of the adaptive lambda."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """GAE's lambda for the critic's returns; by default that of the policy (ppo), or 1 (vapo)."""
    whiten: bool | None = None
    """Token advantages to mean 0 and variance 1 over the step, with a critic."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """The critic's values count as at most this far from those before the update; null: no bound."""
    nll_coef: float | None = Field(default=None, ge=0)
    """VAPO's weight of the log-likelihood of samples with a positive reward."""
