"""Configuration of the RL algorithm: loss, advantages, importance weights, masks, KL, GAE.

A key that is None takes the algorithm's published value, if there is one.
`mrl.algorithms.check_algorithm` refuses keys that the algorithm does not read, and keys that
contradict each other.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.config.branch import Branch


class MaskConfig(Branch):
    """A mask that removes tokens from the policy loss. Masked tokens still count in the denominator
    of the loss."""

    name: Literal["token_mask", "sequence_mask", "opsm", "dppo"]
    """The kind of mask. The correction ratio of a token is `exp(old log-prob - rollout log-prob)`.
    `token_mask` masks a token if this ratio is outside [`low`, `high`]; the other tokens are not
    reweighted (IcePop, which reweights them, is `importance: mis`). `sequence_mask` masks a
    sequence if the geometric mean of its tokens' ratios is outside [`low`, `high`]. `opsm`
    (DeepSeek-V3.2, arXiv 2512.02556) masks a token with a negative advantage if the mean of
    `rollout log-prob - current log-prob` over its sequence is above `high`. `dppo` (arXiv
    2602.04879, binary TV) compares the current probability of a token with the engine's
    probability. It masks a token with a positive advantage if the probability has increased by more
    than `high`, and a token with a negative advantage if the probability has decreased by more than
    `low`."""
    low: float | None = Field(default=None, ge=0)
    """The bound `low` in the description of `name`. The default is 0.5 for `token_mask`, 0.999 for
    `sequence_mask` and 0.15 for `dppo`; `opsm` does not use it."""
    high: float | None = Field(default=None, gt=0)
    """The bound `high` in the description of `name`. The default is 5 for `token_mask`, 1.002 for
    `sequence_mask` and 0.15 for `dppo`. `opsm` has no default and requires a value (slime uses
    1e-4, TRL suggests 0.5)."""


class AlgorithmConfig(Branch):
    name: str = "gspo"
    """The algorithm: a file of mrl/algorithms/, or your own as `path/file.py` or `package.module`.
    Append `:NAME` if the functions of the algorithm are methods of an object NAME in your file."""
    aggregation: (
        Literal[
            "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
        ]
        | None
    ) = None
    """How the token losses of an optimizer step become one number. `token_mean` is the mean over
    all loss tokens. Each of the other values averages one number per sample: the mean over its
    tokens (`seq_mean_token_mean`), the sum over its tokens (`seq_mean_token_sum`), or that sum
    divided by `rollout.max_response_len` (`seq_mean_token_sum_norm`). Null takes the algorithm's
    published form."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The lower end of the clip range of the probability ratio is 1 - clip_low. Null takes the
    algorithm's published value."""
    clip_high: float | None = Field(default=None, gt=0)
    """The upper end of the clip range of the probability ratio is 1 + clip_high. Null takes the
    algorithm's published value."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the probability ratio for tokens with a negative advantage (arXiv 1912.09729);
    3 is usual. Null sets no bound."""
    tau_positive: float | None = Field(default=None, gt=0)
    """SAPO's temperature for tokens with a positive advantage; null takes the published value."""
    tau_negative: float | None = Field(default=None, gt=0)
    """SAPO's temperature for tokens with a negative or zero advantage; null takes the published
    value."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, which is subtracted from the loss. The bonus is a sum over the
    loss tokens: the entropy of each token's full, untruncated distribution, weighted like the
    token's loss. 0 turns the bonus off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference). If it is 0, no reference model is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss or is subtracted from the reward of each token (PPO,
    REINFORCE++)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"] = "k3"
    """How the KL of a token is estimated from one sample (Schulman 2020). `k3` is never negative
    and has low variance. `k1+` and `k3+` have the values of `k1` and `k3` and the gradient of `k2`,
    which is on average the gradient of the KL. `k3_unbiased` (DeepSeek-V3.2) is `k3` times the
    ratio of the current to the old policy. `k1+`, `k3+` and `k3_unbiased` work in the loss only."""
    kl_target: float | None = Field(default=None, gt=0)
    """Target for the mean KL per token. The coefficient starts at `kl_coef` and is adapted after
    each step (arXiv 1909.08593, section 2.2). Null keeps it constant."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Number of samples over which an adaptive kl_coef changes by at most a fifth."""
    reference_path: str | None = None
    """Folder of the frozen reference model, which must have the policy's architecture and sizes.
    Null takes the model in model.path, as it is before SFT."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Where the old log-probs in the denominator of the probability ratio come from. `trainer`: the
    trainer computes them in an additional forward pass before the update. `rollout`: the engine's
    log-probs are used (verl's bypass mode), which saves that pass. The ratio then also corrects for
    the numerical difference between engine and trainer. `rollout` is refused if that difference
    would exceed a narrow clip range, such as GSPO's."""
    importance: Literal["none", "tis", "mis"] = "none"
    """Whether the loss is weighted by `exp(old log-prob - rollout log-prob)`. This corrects for the
    difference between the trainer and the engine that sampled the tokens, possibly with older
    weights (`rollout.partial_rollouts: resume`, `async.max_staleness`). `tis` clamps the importance
    weight to a range. `mis` sets it to 0 outside of the range; at token level this is IcePop (arXiv
    2510.18855). With `none`, decoupled_ppo and a3po still apply their default importance weight;
    see their files."""
    importance_level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own importance weight. `sequence`: all tokens of a sequence have
    the same importance weight, the `exp` of the mean of `old log-prob - rollout log-prob` over the
    sequence's loss tokens."""
    importance_low: float | None = Field(default=None, ge=0)
    """Lower end of the range of `importance`. Null takes 0 for `tis`. For `mis`, null takes 0.5
    with token weights and 0.999 with sequence weights."""
    importance_high: float | None = Field(default=None, gt=0)
    """Upper end of the range of `importance`. Null takes 2 for `tis`. For `mis`, null takes 5 with
    token weights and 1.002 with sequence weights."""
    router_shift_floor: float | None = Field(default=None, gt=0, le=1)
    """Multiply the probability ratio of each token, before it is clipped, by RSPO's router-shift
    weight (arXiv 2510.23027): `exp(-shift)`, and at least this number. The shift says how far the
    routers have moved since the pass before the update, at the experts that were active then. 0.8 is
    usual. Null leaves the weight out."""
    masks: tuple[MaskConfig, ...] = ()
    """Masks in addition to `importance`; each name may occur once. The metric `mask/NAME` is the
    share of loss tokens that this mask masks, even if other masks mask the same tokens."""

    advantage_eps: float = Field(default=1e-4, gt=0)
    """Number that is added to a standard deviation before dividing by it: to the standard deviation
    of the rewards and, with `whiten`, to that of the token advantages."""
    min_group_std: float = Field(default=1e-3, ge=0)
    """Lower bound of the standard deviation by which rewards are divided and, with `whiten`, of the
    standard deviation by which token advantages are divided. The bound prevents nearly equal
    rewards from giving huge advantages."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups from other prompts (DAPO, arXiv
    2503.14476)."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """Number of tokens before `rollout.max_response_len` over which a reward penalty rises from 0
    to 1 (DAPO, eq. 13); 0 turns the penalty off."""
    overlong_filter: bool = False
    """Mask truncated responses out of the loss (DAPO, section 3.4). Their rewards still count in
    the advantages of their group."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token; only for algorithms with a critic."""
    lam: float | Literal["adaptive"] | None = None
    """GAE's lambda for the policy. `adaptive` is `1 - 1 / (lam_alpha * number of loss tokens)`, at
    least 0, as in VAPO. Null takes the algorithm's published value."""
    lam_alpha: float = Field(default=0.05, gt=0)
    """The factor `lam_alpha` in the formula of the adaptive lambda (see `lam`)."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """GAE's lambda for the critic's returns. Null takes 1 for vapo, and for ppo the policy's lambda
    (0.95 if the policy's lambda is adaptive)."""
    whiten: bool | None = None
    """Whiten the token advantages to mean 0 and variance 1 over the step; only for algorithms with
    a critic. Null takes the algorithm's published choice."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip range of the value loss: how far a value may move away from the value that the critic
    predicted before the update. Null turns the clipping off."""
    proximal_at_no_lag: Literal["rollout", "policy"] = "rollout"
    """Which log-prob A-3PO takes as the proximal policy's for a token that the newest weights
    sampled. `rollout` (AReaL's code): the engine's log-prob. `policy` (the paper): the current
    policy's log-prob, so that such a token is never clipped."""
    bootstrap_truncated: bool = False
    """For a truncated response, GAE uses the critic's value of the state after its last token
    instead of 0, because the response would have continued."""
    turn_rewards: bool = False
    """Credit each reward of an environment at the last token of the turn that earned it, instead of
    crediting their sum at the last token of the sample."""
    nll_coef: float | None = Field(default=None, ge=0)
    """Weight of VAPO's log-likelihood term, which uses only samples with a positive reward; null
    takes the published value."""
