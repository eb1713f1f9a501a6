"""Detect that the engine's log-probs were computed at another temperature than the trainer's.

Let z be the logits divided by the trainer's temperature T, p = softmax(z), H the entropy of p, T' the
engine's temperature and b = T/T'. With lse for log-sum-exp, the engine's log-prob of token y is
b z_y - lse(b z). As E_p[z] = lse(z) - H, the trainer's log-prob minus the engine's is

    d = old - rollout = (1 - b) (old + H) + c,     c = KL(p || p_T') >= 0,

where c depends on the distribution at the position but not on the sampled token, and old + H has mean 0
over the sampled tokens. So a regression of d on old + H has slope 1 - T/T'. This is exact if the tokens
were sampled from p; if they were sampled at T', the error is of third order in T' - T.

Tokens that the engine sampled from a wrong distribution are unlikely under p. Both d and old + H are
far below 0 for such tokens, so a few of them alone produce a slope. A wrong temperature produces the
slope in all other tokens as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import MIN_TOKENS, Finding, LossTokens

MIN_R2 = 0.5
"""A temperature is reported only if it explains at least this share of the variance of d. An older
policy is often flatter, which resembles a higher temperature but explains a smaller share."""
MIN_Z = 8.0
"""A temperature is reported only if the slope of the regression of d on old + H (see the module's
docstring) is at least this many standard errors."""
BULK = 0.9
"""The bulk is this share of the tokens: those whose `old + H` (the trainer's log-prob plus the
entropy) is nearest to the mean of `old + H` over all tokens."""
MIN_BULK_SLOPE = 1 / 3
"""A temperature is reported only if the slope over the bulk of the tokens, divided by the slope
over all tokens, is at least this. Both are slopes of regressions of d on old + H. The quotient is
below 0.1 if a few extreme tokens cause the slope, and 0.6 or more if a temperature causes it."""


def detect(tokens: LossTokens) -> Finding | None:
    """Report the engine's temperature if it differs from the trainer's and explains the mismatch d.

    The difference must explain at least MIN_R2 of the variance of d. Returns None for fewer than
    MIN_TOKENS loss tokens, or if the entropy of a token is unknown (NaN).
    """
    if len(tokens.d) < MIN_TOKENS:
        return None
    x = tokens.old + tokens.entropy
    x, y = x - x.mean(), tokens.d - tokens.d.mean()
    xx, yy = float(x.square().sum()), float(y.square().sum())
    if xx == 0 or yy == 0:
        return None
    slope = float(x @ y) / xx
    if not math.isfinite(slope):  # the entropy is unknown, as for the samples of a session
        return None
    residual = y - slope * x
    # The standard error under heteroscedasticity (White 1980).
    error = math.sqrt(float((x * residual).square().sum())) / xx
    r2 = 1 - float(residual.square().sum()) / yy
    if r2 < MIN_R2 or abs(slope) < MIN_Z * error or slope >= 1:
        return None
    if _bulk_slope(x, y) / slope < MIN_BULK_SLOPE:
        return None
    asked = tokens.record.temperature
    seen = asked / (1 - slope)
    spread = asked * error / (1 - slope) ** 2
    return Finding(
        name="temperature",
        severity=tokens.severity(r2),
        text=(
            f"the engine's log-probs look like temperature {seen:.6g} (+- {2 * spread:.1g}), not "
            f"{asked:g}: that explains {r2:.0%} of the variance of old - rollout{_hint(seen, asked)}"
        ),
        where={"temperature": seen, "expected": asked, "r2": r2, "slope": slope},
        is_cause=True,
    )


def _bulk_slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the regression of y on x over the bulk of the tokens (see BULK).

    x, y: f64[M], each with its mean subtracted.
    """
    bulk = x.abs() <= x.abs().sort().values[int(BULK * (len(x) - 1))]
    x, y = x[bulk] - x[bulk].mean(), y[bulk] - y[bulk].mean()
    return float(x @ y) / max(float(x.square().sum()), 1e-300)


def _hint(seen: float, asked: float) -> str:
    """Return a likely reason why the log-probs were computed at the temperature `seen`, as text.

    A reason is known only if `seen` is near 1 and the recipe's temperature `asked` is not.
    Otherwise the result is an empty string.
    """
    close = torch.isclose(torch.tensor([seen]), torch.tensor([1.0]), rtol=0.03)
    return "; as if they were taken before the temperature was applied" if close and (
        abs(asked - 1) > 0.05
    ) else ""  # fmt: skip
