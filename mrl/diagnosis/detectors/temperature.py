"""This detector finds log-probs of the engine that look like those of another temperature.

With logits z at the trainer's temperature T and b = T/T', the engine's log-prob of token y is
b z_y - lse(b z). As E_p[z] = lse(z) - H, it differs from the trainer's by

    d = old - rollout = (1 - b) (old + H) + c,     c = KL(p || p_T') >= 0,

where c depends on the distribution at the position but not on the token drawn, and old + H has mean 0
over the draws. So a regression of d on old + H has slope 1 - T/T', to all orders in T' - T, where the
tokens were drawn from p; drawn at T', the error is of third order.

Tokens that the engine drew from a wrong distribution are unlikely to the trainer: both d and old + H
are far below 0 there, and a few of them make such a slope by themselves. A temperature makes it in the
others too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import MIN_TOKENS, Finding, LossTokens

MIN_R2 = 0.5
"""Less, and something else is behind most of the mismatch. An old policy is often a flatter one, and so
looks a little like a higher temperature: that stays below."""
MIN_Z = 8.0
BULK = 0.9
"""Share of the tokens, those with the smallest |old + H|, that must show the slope too."""
MIN_BULK_SLOPE = 1 / 3
"""A share of the slope of all tokens: wild tokens leave less than 0.1, a temperature 0.6 or more."""


def detect(tokens: LossTokens) -> Finding | None:
    if len(tokens.d) < MIN_TOKENS:
        return None
    x = tokens.old + tokens.entropy
    x, y = x - x.mean(), tokens.d - tokens.d.mean()
    xx, yy = float(x.square().sum()), float(y.square().sum())
    if xx == 0 or yy == 0:
        return None
    slope = float(x @ y) / xx
    if not math.isfinite(slope):  # the entropy is not known, as for a session's samples
        return None
    residual = y - slope * x
    # Errors that may differ from token to token (White 1980).
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
    """Return the slope of y on x, f64[M] each, without the tokens that are farthest out."""
    bulk = x.abs() <= x.abs().sort().values[int(BULK * (len(x) - 1))]
    x, y = x[bulk] - x[bulk].mean(), y[bulk] - y[bulk].mean()
    return float(x @ y) / max(float(x.square().sum()), 1e-300)


def _hint(seen: float, asked: float) -> str:
    close = torch.isclose(torch.tensor([seen]), torch.tensor([1.0]), rtol=0.03)
    return "; as if they were taken before the temperature was applied" if close and (
        abs(asked - 1) > 0.05
    ) else ""  # fmt: skip
