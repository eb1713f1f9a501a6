"""What `policy_loss` can be told to compute: ratio, clip, importance weight, KL penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RatioKind = Literal["token", "sequence"]
ClipKind = Literal["none", "ppo", "cispo", "sapo"]

RATIOS = ("token", "sequence")
_CLIPS = ("none", "ppo", "cispo", "sapo")
_IMPORTANCE = ("none", "tis", "mis")
_LEVELS = ("token", "sequence")
_KLS = ("none", "k1", "k2", "k3", "k1+", "k3+")


@dataclass(frozen=True)
class Clip:
    """What bounds the ratio r. f(r, A) is the objective of one token.

    `none`: f = r A. `ppo` (arXiv 1707.06347 eq. 7): f = min(r A, clip(r, 1-low, 1+high) A); with
    `dual` (arXiv 1912.09729 eq. 5) at least dual * A where A < 0. `cispo` (arXiv 2506.13585 eq. 4):
    f = clip(r, 1-low, 1+high) A logp with the factor held constant; low = 1 leaves the lower side
    open. `sapo` (arXiv 2511.20347): f = (4 / tau) sigmoid(tau (r - 1)) A.
    """

    kind: ClipKind = "ppo"
    low: float = 0.2
    """The lower side of `ppo` and `cispo`; the CISPO paper leaves it open: 1."""
    high: float = 0.2
    dual: float | None = None
    tau_positive: float = 1.0
    """SAPO's tau where A > 0."""
    tau_negative: float = 1.05
    """SAPO's tau where A <= 0."""

    def __post_init__(self) -> None:
        check_choice("clip", self.kind, _CLIPS)
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip.low: got {self.low}, expected between 0 and 1")
        if not self.high >= 0:
            raise ValueError(f"clip.high: got {self.high}, expected at least 0")
        if self.dual is not None and not (self.kind == "ppo" and self.dual > 1):
            raise ValueError(
                f"clip.dual: got {self.dual} with {self.kind}, expected None, or above 1 with ppo"
            )
        for name, tau in (("positive", self.tau_positive), ("negative", self.tau_negative)):
            if not 0 < tau < math.inf:
                raise ValueError(f"clip.tau_{name}: got {tau}, expected above 0 and finite")


@dataclass(frozen=True)
class ImportanceWeight:
    """The detached weight w that corrects for the rollout engine: w = exp(old - rollout).

    `tis` (truncated; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"): clamped into [low, high]. `mis` (masked; IcePop, arXiv 2510.18855): 0 outside of it.
    At level `sequence` one weight for all tokens, of the mean of old - rollout over the loss tokens:
    the product would depend on the length.
    """

    kind: Literal["tis", "mis"]
    level: Literal["token", "sequence"]
    low: float
    """Usual: 0 for `tis`; 0.5 for `mis` per token, 0.999 per sequence."""
    high: float
    """Usual: 2 for `tis`; 5 for `mis` per token, 1.002 per sequence."""

    def __post_init__(self) -> None:
        check_choice("importance", self.kind, _IMPORTANCE[1:])
        check_choice("importance.level", self.level, _LEVELS)
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"importance: got the range [{self.low}, {self.high}], expected 0 <= low <= high"
            )


@dataclass(frozen=True)
class KlPenalty:
    """The penalty is coef * KL(current || ref), estimated from one sample with d = ref - logp
    (Schulman 2020).

    `k1` = -d, `k2` = d^2 / 2, `k3` = exp(d) - 1 - d; differentiated as they stand. `k1+`, `k3+`: their
    value with the derivative of `k2`, whose expectation is the gradient of the KL.
    """

    kind: Literal["k1", "k2", "k3", "k1+", "k3+"]
    coef: float

    def __post_init__(self) -> None:
        check_choice("kl", self.kind, _KLS[1:])
        if not math.isfinite(self.coef):
            raise ValueError(f"kl.coef: got {self.coef}, expected a finite number")


def encode_options(
    ratio: RatioKind,
    clip: Clip,
    token_advantages: bool,
    importance: ImportanceWeight | None,
    kl: KlPenalty | None,
) -> list[float]:
    """Encode `PolicyLossOptions` of csrc/policy_loss.h in its order, kinds as their numbers there."""
    weight = importance or ImportanceWeight("tis", "token", 0.0, math.inf)
    return [
        RATIOS.index(ratio),
        _CLIPS.index(clip.kind),
        clip.low,
        clip.high,
        clip.dual or math.inf,
        clip.tau_positive,
        clip.tau_negative,
        token_advantages,
        _IMPORTANCE.index(weight.kind) if importance else 0,
        _LEVELS.index(weight.level),
        weight.low,
        weight.high,
        _KLS.index(kl.kind) if kl else 0,
        kl.coef if kl else 0.0,
    ]


TOKEN_ADVANTAGES = 7
"""Its place in that list."""


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(choices)}")
