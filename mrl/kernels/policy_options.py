"""Options of `policy_loss`: ratio, clip, importance weight, KL penalty."""

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
    """How the ratio r is bounded in f(r, A), the objective of a token with advantage A.

    none: `f = r A`.

    ppo (arXiv 1707.06347 eq. 7): `f = min(r A, clip(r, 1 - low, 1 + high) A)`. With `dual` (arXiv
    1912.09729 eq. 5), f is at least `dual * A` if A < 0.

    cispo (arXiv 2506.13585 eq. 4): `f = clip(r, 1 - low, 1 + high) A logp`, where the clipped ratio
    is treated as a constant in the gradient. `low = 1` means no lower bound.

    sapo (arXiv 2511.20347): `f = (4 / tau) sigmoid(tau (r - 1)) A`.
    """

    kind: ClipKind = "ppo"
    low: float = 0.2
    """For `ppo` and `cispo`: r is bounded below by `1 - low`. `low = 1` means no lower bound, as in the
    CISPO paper."""
    high: float = 0.2
    dual: float | None = None
    tau_positive: float = 1.0
    """The tau of `sapo` if A > 0."""
    tau_negative: float = 1.05
    """The tau of `sapo` if A <= 0."""

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
    """The importance weight `w = exp(old - rollout)`, and how it is bounded.

    `old` and `rollout` are a token's log-probs under the trainer before the update and under the
    engine. The weight corrects the loss for tokens that were sampled by the engine instead of the
    trainer. It is a constant in the gradient.

    tis (truncated; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"): w is clamped to [low, high].

    mis (masked; IcePop, arXiv 2510.18855): w is 0 outside of [low, high].

    At level `sequence`, all loss tokens of a sequence share one weight, the exponential of the mean
    of `old - rollout`. A sum instead of the mean would make the weight depend on the length.
    """

    kind: Literal["tis", "mis"]
    level: Literal["token", "sequence"]
    low: float
    """Usual values: 0 for `tis`; 0.5 (level `token`) or 0.999 (level `sequence`) for `mis`."""
    high: float
    """Usual values: 2 for `tis`; 5 (level `token`) or 1.002 (level `sequence`) for `mis`."""

    def __post_init__(self) -> None:
        check_choice("importance", self.kind, _IMPORTANCE[1:])
        check_choice("importance.level", self.level, _LEVELS)
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"importance: got the range [{self.low}, {self.high}], expected 0 <= low <= high"
            )


@dataclass(frozen=True)
class KlPenalty:
    """Penalty `coef * KL(current || ref)`, estimated from one sample per token (Schulman 2020).

    With the log-prob difference `d = ref - logp`, the estimates are `k1 = -d`, `k2 = d^2 / 2` and
    `k3 = exp(d) - 1 - d`, each with its own gradient. `k1+` and `k3+` have the values of `k1` and
    `k3` but the gradient of `k2`, whose expectation is the gradient of the KL.
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
    """Encode the options as numbers, in the order of `PolicyLossOptions` in csrc/policy_loss.h.

    Kinds are encoded as the values of their enums. The arguments are those of `policy_loss`.
    """
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
"""The index of `token_advantages` in the list that `encode_options` returns."""


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(choices)}")
