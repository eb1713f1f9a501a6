"""Configures what the policy is trained with: loss, advantages, corrections, KL, critic.

None stands for the algorithm's published value. `mrl.algorithms.check_algorithm` refuses keys that an
algorithm does not read, and keys that contradict each other.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class MaskConfig(Branch):
    """Says which tokens or sequences leave the policy loss; they still count in its denominator."""

    name: Literal["token_mask", "sequence_mask", "opsm", "dppo"]
    """What is masked. `token_mask`: a token whose exp(old - rollout) is outside [low, high]; the
    others get no weight (IcePop, which gives them one, is `importance: mis`). `sequence_mask`: a
    sequence whose geometric mean of that is outside [low, high]. `opsm` (DeepSeek-V3.2, arXiv
    2512.02556): a sequence with A < 0 whose mean of rollout - logp is above high. `dppo` (arXiv
    2602.04879, binary TV): a token whose p - p_rollout is above high where A > 0, or below -low
    where A < 0."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound. The default is 0.5 for `token_mask`, 0.999 for `sequence_mask`, 0.15 for `dppo`;
    `opsm` has none."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound. The default is 5 for `token_mask`, 1.002 for `sequence_mask`, 0.15 for `dppo`;
    `opsm` has no published value and must be given one (slime's is 1e-4, TRL suggests 0.5)."""


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
    """How the token losses of an optimizer step become one number: `token_mean` is the mean over all
    tokens; the others are means over samples, of the mean of their tokens, of the sum, or of the sum
    divided by `rollout.max_response_len` (`..._norm`). Null takes the algorithm's published form."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low; null takes the algorithm's published value."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above at 1 + clip_high; null takes the algorithm's published value."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The ratio is bounded by this from above if A < 0 (arXiv 1912.09729); 3 is usual. Null sets no
    bound."""
    tau_positive: float | None = Field(default=None, gt=0)
    """SAPO's temperature where A > 0; null takes the published value."""
    tau_negative: float | None = Field(default=None, gt=0)
    """SAPO's temperature where A <= 0; null takes the published value."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus: the loss falls by this times the entropy of the whole distribution
    at each loss token, weighed as the token's loss is. 0 turns it off, and it costs nothing."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference). At 0 no reference model is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or is subtracted from the reward of each token (PPO,
    REINFORCE++)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"] = "k3"
    """How the KL of a token is estimated from one sample (Schulman 2020); k3 is never negative and
    has little variance. `k1+`, `k3+`: their value with the gradient of k2, which is that of the KL.
    `k3_unbiased` (DeepSeek-V3.2): k3 times the ratio policy / old. The last three are for the loss
    only."""
    kl_target: float | None = Field(default=None, gt=0)
    """The KL per token that is aimed at: kl_coef is adapted after each step (arXiv 1909.08593, section
    2.2), starting from the given value. Null keeps kl_coef constant."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """The number of samples over which an adaptive kl_coef changes by at most a fifth."""
    reference_path: str | None = None
    """Folder of the frozen reference, which must have the model's architecture and sizes. Null takes
    model.path, without SFT and training."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """What the ratio is against. `trainer`: its log-probs before the update, from a pass of its own.
    `rollout`: the engine's (verl's bypass mode), which saves that pass and makes the ratio correct for
    the engine's gap, too; refused where that gap would use up a narrow clip range, as GSPO's."""
    importance: Literal["none", "tis", "mis"] = "none"
    """Weighs the loss by exp(old - rollout), as the tokens were sampled by the engine, and from older
    weights where `rollout.partial_rollouts` is `resume`. `tis` clamps the weight into a range; `mis`
    sets it to 0 outside of the range, which for tokens is IcePop (arXiv 2510.18855). decoupled_ppo and
    a3po weigh by themselves, see their files."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether each token has its weight, or each sequence one (from the mean of old - rollout over its
    loss tokens)."""
    importance_low: float | None = Field(default=None, ge=0)
    """Lower end of that range. Null: 0 for `tis`; for `mis` 0.5 for tokens and 0.999 for sequences."""
    importance_high: float | None = Field(default=None, gt=0)
    """Upper end of that range. Null: 2 for `tis`; for `mis` 5 for tokens and 1.002 for sequences."""
    masks: tuple[MaskConfig, ...] = ()
    """Masks on top of `importance`, each name at most once. The metric `mask/NAME` is the share of loss
    tokens that this mask alone takes out."""

    advantage_eps: float = Field(default=1e-4, gt=0)
    """Is added to the standard deviation that rewards are divided by."""
    min_group_std: float = Field(default=1e-3, ge=0)
    """Lower bound of that standard deviation, so that the advantages of nearly equal rewards do not
    explode."""
    dynamic_sampling: bool = False
    """Replace zero-variance groups by groups of further prompts (DAPO, arXiv 2503.14476)."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """Tokens before `rollout.max_response_len` over which a penalty on the reward rises to 1 (DAPO,
    eq. 13); 0 turns it off."""
    overlong_filter: bool = False
    """Leave truncated answers out of the loss (DAPO, section 3.4). Their rewards still count in the
    advantages of their group."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token; only with a critic."""
    lam: float | Literal["adaptive"] | None = None
    """GAE's lambda for the policy; `adaptive` is 1 - 1 / (lam_alpha * tokens), as in VAPO. Null takes
    the algorithm's published value."""
    lam_alpha: float = Field(default=0.05, gt=0)
    """The factor alpha of the adaptive lambda."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """GAE's lambda for the critic's returns. Null takes that of the policy (ppo), or 1 (vapo)."""
    whiten: bool | None = None
    """Whiten the token advantages to mean 0 and variance 1 over the step; only with a critic. Null
    takes the algorithm's published choice."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far the critic's values may move from those before the update before the value loss is
    clipped; null does not clip."""
    proximal_at_no_lag: Literal["rollout", "policy"] = "rollout"
    """A-3PO's proximal policy for tokens that the present weights sampled: the one that sampled them
    (`rollout`, as in AReaL's code), or the policy itself, so that such tokens are never clipped
    (`policy`, as in the paper)."""
    bootstrap_truncated: bool = False
    """GAE takes the critic's value of the state behind the last token of an answer that was cut off,
    and not 0: the answer would have gone on."""
    turn_rewards: bool = False
    """Credit each reward of an environment at the last token of the turn that earned it, and not their
    sum at the last token of the sample."""
    nll_coef: float | None = Field(default=None, ge=0)
    """VAPO's weight of the log-likelihood of samples with a positive reward; null takes the published
    one."""
